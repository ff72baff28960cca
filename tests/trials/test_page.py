"""docs/your-own-code.md: all its examples are one file, which trains, and which ``hpclm selftest`` finds right."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpclm import cli
from hpclm.training.callbacks import load
from hpclm.trials import kinds
from hpclm.trials.verdict import SETTINGS
from tests.runs import PATIENCE, ROOT, hpclm
from tests.test_documentation import assert_printed

PAGE = (ROOT / "docs/your-own-code.md").read_text()
NAMES = dict(re.findall(r"`'?(?:hpclm preprocess --)?([\w.]+)[= ]\[?(mine:\w+)\]?'?`", PAGE.partition("## A block")[0]))
"""Setting -> the example that the page's table names."""
UNTRIED = ("job.cluster", "train.callbacks")
"""Settings whose code the selftest does not try."""


def write_examples(folder):
    """mine.py: all examples of the page."""
    (folder / "mine.py").write_text("\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.S)))


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The folder of mine.py, on Python's path."""
    write_examples(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_has_an_example_of_each_kind_that_the_selftest_knows(mine):
    assert {*NAMES} | {"data.tokenizer"} == {*SETTINGS.values(), "tokenizer", *UNTRIED}
    for setting, name in NAMES.items():
        if setting not in UNTRIED:
            kind = kinds.kind_of(name, kinds.load(name))
            assert SETTINGS[kind].endswith(setting), name


@pytest.mark.parametrize("block", ["mine:GatedBlock", "mine:TwoMLPs"])
def test_the_examples_train_together(mine, block):
    names = {key: name for key, name in NAMES.items() if key not in ("tokenizer", "log.sinks", *UNTRIED)}
    words = [f"{key}={name}" for key, name in (names | {"model.block": block}).items()]
    words += ["data.tokenizer=mine:Bytes", "model.vocab_size=257", "log.sinks=[mine:Lines]", "engine.device=cpu"]
    words += ["train.callbacks=[mine:EarlyStop, mine:Plot]"]
    assert cli.main(["train", "debug", "budget.steps=2", "optim.warmup=1", "out=run", *words]) == 0
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 2
    assert ("size" in rows[0]) == ("square" in rows[0]) == (block == "mine:GatedBlock")


def test_the_callbacks_of_the_page_stop_early_and_plot(mine, tmp_path):
    early, plot = (kind(tmp_path) for kind in load(["mine:EarlyStop", "mine:Plot"]))
    asked = [early.after_evaluation(number, {"valid": loss}) for number, loss in enumerate([3, 2, 2, 1, 2, 3, 1])]
    assert asked == [None, None, None, None, None, None, "stop"]
    for step in range(1, 101):
        plot.after_step(step, {"loss": 1 / step})
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.whole
@pytest.mark.parametrize("name", ["mine:TwoMLPs", *(name for key, name in NAMES.items() if key not in UNTRIED)])
def test_the_selftest_finds_every_example_right(mine, name):
    env = {**os.environ, "PYTHONPATH": str(mine), "OMP_NUM_THREADS": "1"}
    hpclm("selftest", name, check=0, env=env, cwd=mine)


@pytest.mark.whole
def test_the_message_of_the_page_is_what_the_selftest_says(mine):
    """Of the first block, without copy_to_tp."""
    code = Path("mine.py").read_text()
    assert code.count("copy_to_tp(self.gate, self.tp)") == 1
    Path("mine.py").write_text(code.replace("copy_to_tp(self.gate, self.tp)", "self.gate"))
    env = {**os.environ, "PYTHONPATH": str(mine), "OMP_NUM_THREADS": "1"}
    said = hpclm("selftest", "mine:GatedBlock", "--only", "tensor 2", check=64, env=env, cwd=mine).stdout
    [message] = re.findall(r"```\n(  tensor 2 .*?)```", PAGE, re.S)
    for number in ("block0", "block1"):
        assert (
            f"the gradient of {number}.gate is off by" in message and f"the gradient of {number}.gate is off by" in said
        )
    cause = " ".join(message.partition("usual cause:")[2].split())
    assert cause and cause in " ".join(said.split())


@pytest.mark.whole
def test_the_commands_at_the_top_of_the_page_work_as_typed(mine):
    [block, *_] = re.findall(r"```bash\n(.*?)```", PAGE, re.S)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-ec", block], cwd=mine, env=env, capture_output=True, text=True, timeout=PATIENCE * 6
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert_printed(ROOT / "docs/your-own-code.md", done.stdout + done.stderr)
    assert Path("runs/tensor/metrics.jsonl").is_file()
