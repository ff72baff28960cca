"""``hpclm demo``: from nothing to a model that writes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpclm import cli
from hpclm.launch import demo
from tests.runs import PATIENCE, has_step, hpclm, losses, until

SMALL = ["model={layers: 1, hidden: 32, context: 32, attention: {heads: 2}}", "batch={global_size: 4, micro_size: 4}"]
SMALL += ["budget.steps=4", "evaluate.every=2", "checkpoint.every=2", "optim.warmup=1", "engine.device=cpu"]


def test_the_demo_makes_its_data_trains_and_generates_and_continues_where_it_was(tmp_path):
    (tmp_path / "demo").mkdir()
    documents = [json.dumps({"text": f"def f{n}(x):\n    return x + {n}\n" * 20}) for n in range(100)]
    (tmp_path / "demo/corpus.jsonl").write_text("\n".join(documents) + "\n")  # what is there is not made again
    told = hpclm("demo", *SMALL, cwd=tmp_path, check=0).stdout
    assert "1/6" not in told and "   $ hpclm train-tokenizer --input demo/corpus.jsonl" in told
    assert "loss from the first step to the last: " in told
    assert "hpclm generate demo/run --prompt" in told
    assert list(losses(tmp_path / "demo/run")) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, id="SIGINT"), pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.whole)],
)
def test_a_signal_to_the_demo_saves_and_ends_the_training_that_it_has_started(number, tmp_path):
    (tmp_path / "demo").mkdir()
    documents = [json.dumps({"text": f"def f{n}(x):\n    return x + {n}\n" * 20}) for n in range(100)]
    (tmp_path / "demo/corpus.jsonl").write_text("\n".join(documents) + "\n")
    words = [*SMALL, "budget.steps=100000", "evaluate.every=0", "checkpoint.every=0", "out=demo/run"]
    command = [sys.executable, "-m", "hpclm", "demo", *words]
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stdout=subprocess.PIPE) as process:
        until(lambda: has_step(tmp_path / "demo/run", 3), "step 3")
        process.send_signal(number)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 85
    assert "saved" in (tmp_path / "demo/run/log.txt").read_text().splitlines()[-1]


def test_a_mistake_in_the_demos_settings_is_told_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "budget.stepps=3"]) == 64
    assert "budget.steps" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_corpus_has_a_document_for_each_source_file(tmp_path):
    told = demo.write_corpus(tmp_path / "corpus.jsonl", Path(json.__file__).parent)
    rows = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    assert f"{len(rows)} documents" in told
    assert {"__init__.py", "decoder.py", "encoder.py"} <= {row["source"] for row in rows}
    assert all(row["text"] for row in rows)
