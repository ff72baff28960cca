"""hpclm as a Python library: what a notebook or a script does."""

import faulthandler
import hashlib
import io
import json
import logging
import os
import pydoc
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections import Counter
from pathlib import Path

import datasets
import jedi
import numpy as np
import pytest

import hpclm
from hpclm import cli
from hpclm.api import dataset as api_dataset
from hpclm.base.errors import LockedError
from tests.runs import ROOT, until

TINY = {"model": {"layers": 1, "hidden": 16, "attention": {"heads": 2}, "context": 16}, "evaluate.every": 4}
LINES = ["Once upon a time there was a number."] * 100


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    return tmp_path


def test_text_is_preprocessed_once_for_all_runs_that_use_it(here, capsys):
    first = hpclm.train("small", TINY, data="text.jsonl", steps=2, device="cpu", out="runs/a")
    assert "100 documents" in capsys.readouterr().out
    second = hpclm.train("small", TINY, data="text.jsonl", steps=2, device="cpu", out="runs/b", lr=2e-3)
    assert "documents" not in capsys.readouterr().out
    assert first.settings.model.vocab_size == 257
    assert second.settings.diff(first.settings).keys() == {"out", "optim.lr"}
    assert [path.name for path in Path("runs/datasets").iterdir()] == [Path(first.settings.data.prefix).parent.name]
    prefix = first.settings.data.prefix
    with pytest.raises(hpclm.ConfigError, match="tokenizer='bytes' has no effect: the dataset"):
        hpclm.train("small", data=prefix, tokenizer="bytes")
    with pytest.raises(hpclm.ConfigError, match="has no effect without data="):
        hpclm.train("debug", tokenizer="bytes")
    with pytest.raises(hpclm.ConfigError, match=r"tokenizer='gpt2' must be 'bytes', a tokenizer.json"):
        hpclm.train("small", data="text.jsonl", tokenizer="gpt2")
    again = hpclm.train(first, {"data.split": first.settings.data.split}, data=prefix, steps=3)
    assert again.rows[-1]["step"] == 3
    Path("text.jsonl").write_text('{"text": "Something else."}\n' * 100)
    with pytest.raises(hpclm.ConfigError, match="data"):
        hpclm.train("small", TINY, data="text.jsonl", steps=2, device="cpu", out="runs/a")


def test_rows_of_a_dataset_are_documents(here, capsys):
    rows = datasets.Dataset.from_dict({"text": LINES})
    hpclm.train("small", TINY, data=rows, steps=1, device="cpu", out="runs/a")
    assert "100 documents" in capsys.readouterr().out
    run = hpclm.train(
        "small", TINY, data=datasets.Dataset.from_dict({"text": LINES}), steps=2, device="cpu", out="runs/a"
    )
    assert "documents" not in capsys.readouterr().out and run.rows[-1]["step"] == 2
    for wrong, said in (
        (rows.rename_column("text", "content"), "data must have a column 'text', not \\['content'\\]"),
        (datasets.DatasetDict(train=rows), "data has the splits train; choose one"),
        (datasets.IterableDataset.from_generator(lambda: iter([{"words": "x"}])), "a column 'text', not \\['words'\\]"),
        (datasets.Dataset.from_dict({"text": ["x", None]}), "^data, row 2: 'text' holds null, not text"),
        (rows.select([]), "^no documents in data; no dataset"),
    ):
        with pytest.raises(hpclm.ConfigError, match=said):
            hpclm.train("small", data=wrong)


def test_a_run_has_what_the_verbs_say(here, monkeypatch):
    run = hpclm.train("small", TINY, data="text.jsonl", steps=8, device="cpu", out="runs/a")
    run = hpclm.open(run)
    assert run.status == "done" and repr(run).startswith("Run('runs/a'): done at step 8")
    assert list(run.metrics["validation_loss"].dropna()) == [row["validation_loss"] for row in run.rows[4::5]]
    [checkpoint] = run.checkpoints
    assert checkpoint.step == 8 and checkpoint.path.is_dir() and checkpoint.validation_loss is not None
    assert run.evaluate()["loss"] == pytest.approx(checkpoint.validation_loss)
    assert run.evaluate(text="text.jsonl", tokens=100)["source"] == "text.jsonl"
    for wrong, said in (({"tokens": 100}, "use samples="), ({"text": "def f(): pass"}, "takes the path of a text")):
        with pytest.raises(hpclm.ConfigError, match=said):
            run.evaluate(**wrong)
    with pytest.raises(hpclm.ConfigError, match="the prompt must be text, or a list of texts, not int"):
        run.generate(5)
    with pytest.raises(hpclm.ConfigError, match=r"^tokens=-1 must be at least 1"):
        run.generate("Once", tokens=-1)
    Path("keyless.jsonl").write_text('{"content": "x"}')
    for verb, wrong, said in (
        (
            run.generate,
            {"prompt": "x", "tokens": 1.5, "stop": [1]},
            "tokens=1.5 must be a whole number\nstop=.* list of texts",
        ),
        (run.generate, {"prompt": "x", "batch": 0}, "batch=0 must be at least 1"),
        (run.evaluate, {"samples": 0}, "samples=0 must be at least 1"),
        (run.convert, {"target": "x", "dtype": "int4"}, "dtype='int4' must be one of fp32, bf16, fp16"),
        (run.convert, {"target": "x", "shard_gb": True}, "shard_gb=True must be a number"),
        (run.resume, {"resume_step": "4"}, "resume_step='4' must be a whole number or None"),
        (hpclm.open, {"run": ""}, "the name of the run is empty"),
        (run.resume, {"steps": 4}, r"go back to an earlier step \(--from STEP, or resume_step=STEP in Python\)"),
        (hpclm.train, {"base": "small", "data": "keyless.jsonl"}, "select one by hpclm preprocess --json-keys"),
        (run.settings.diff, {"other": run}, r"run\.settings\.diff\(other\.settings\)"),
        (
            hpclm.train,
            {"base": "small", "data": "data/x"},
            r"'data/x': there is no such text, and no dataset data/x\.idx",
        ),
    ):
        with pytest.raises(hpclm.ConfigError, match=said):
            verb(**wrong)
    text = run.generate("Once upon", tokens=np.int64(5))
    assert run.generate(["Once upon", "a time"], tokens=5)[0] == text
    assert (run.convert("hf", {"engine.device": "cpu"}) / "model.safetensors").is_file()
    assert run.resume(steps=10) is run and run.rows[-1]["step"] == 10
    assert (
        "settings have changed since the last attempt: budget.steps=10 (was 8)\n" in (run.path / "log.txt").read_text()
    )
    monkeypatch.chdir("runs/datasets")  # the run is where it was
    assert run.status == "done" and repr(run).startswith(f"Run('{here}/runs/a')")


@pytest.mark.parametrize(
    "changes", [("optim.lr=0.1", {"model": {"layers": 1}}), ({"optim.lr": 0.1, "model.layers": 1},)], ids=len
)
@pytest.mark.parametrize("base", ["debug", hpclm.settings("debug")], ids=["preset", "settings"])
def test_changes_are_the_same_in_every_form(base, changes):
    made = hpclm.settings(base, *changes, {"log.sinks": ["wandb"], "kill_switch": None}, steps=7, out=Path("runs/x"))
    assert (made.optim.lr, made.model.layers, made.budget.steps, made.out) == (0.1, 1, 7, "runs/x")
    assert made.log.sinks == ["wandb"] and made.kill_switch is None
    assert "optim.lr = 0.1" in repr(made) and "seed" not in repr(made)
    assert hpclm.settings(made) == made


@pytest.mark.parametrize("unit", ["samples", "tokens", "epochs", "hours"])
def test_steps_replaces_a_budget_of_any_unit(unit):
    base = hpclm.settings("small", {"budget": {"steps": None, unit: 9}})
    assert base.diff(hpclm.settings("small"))[f"budget.{unit}"][0] == 9
    made = hpclm.settings(base, steps=7)
    assert (made.budget.steps, getattr(made.budget, unit)) == (7, None)


def test_the_hash_of_a_datasets_rows_is_that_of_their_text(tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["ab", "é"]})
    found = api_dataset._write_rows(rows, tmp_path / "rows")
    assert (tmp_path / "rows").read_text() == '{"text": "ab"}\n{"text": "\\u00e9"}\n'
    assert found == hashlib.sha256((tmp_path / "rows").read_bytes()).hexdigest()[:10]


def test_steps_replace_the_budget_of_a_preset():
    assert hpclm.settings("small", steps=50).diff(hpclm.settings("small")) == {
        "budget.steps": (50, 2000),
        "budget.epochs": (None, 10.0),
    }


def test_training_leaves_signals_as_they_were_and_continues_the_run(tiny):
    numbers = signal.valid_signals()
    before = [signal.getsignal(number) for number in numbers]
    run = hpclm.train(hpclm.settings(*tiny("run", "stop_at=6")))
    with pytest.raises(hpclm.ConfigError, match=r"model\.layers was 2 and is now 3"):
        hpclm.train(hpclm.settings(*tiny("run", "model.layers=3")))
    assert [signal.getsignal(number) for number in numbers] == before
    assert not faulthandler.unregister(signal.SIGQUIT)  # nothing of ours answers it any more
    hpclm.train(hpclm.settings(*tiny()))
    assert [row["step"] for row in run.rows] == list(range(1, 13))


def test_an_interrupt_saves_and_is_raised(tiny, tmp_path):
    settings = hpclm.settings(*tiny("run", "budget.steps=1000000", "checkpoint.every=1000000"))

    def interrupt():
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size) and not given_up.wait(0.05):
            continue
        signal.raise_signal(signal.SIGINT) if not given_up.is_set() else None

    given_up = threading.Event()
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt, match=r"run: saved at step \d+; run the same call again to continue"):
            hpclm.train(settings)
    finally:
        given_up.set()
        thread.join()
    assert len(hpclm.open(settings.out).checkpoints) == 1


class Stopped:
    """A dataset during whose reading the user interrupts."""

    def __init__(self):
        self.column_names = ["text"]

    def iter(self, batch_size):
        signal.raise_signal(signal.SIGINT)
        yield {"text": ["never"]}


def test_an_interrupt_outside_training_is_one_line(here):
    with pytest.raises(KeyboardInterrupt) as raised:
        hpclm.train("small", data=Stopped())
    assert raised.value._render_traceback_() == ["Interrupted: train was interrupted"]


def test_after_a_run_logging_is_as_before(tiny):
    root, own = logging.getLogger(), logging.StreamHandler(io.StringIO())
    root.addHandler(own)
    before = [list(root.handlers), root.level, logging.raiseExceptions, warnings.showwarning]
    try:
        hpclm.train(hpclm.settings(*tiny("run", "budget.steps=1")))
        logging.getLogger("other").warning("afterwards")
        assert [list(root.handlers), root.level, logging.raiseExceptions, warnings.showwarning] == before
        assert own.stream.getvalue() == "afterwards\n"
    finally:
        root.removeHandler(own)


def test_a_second_interrupt_does_not_wait_and_says_what_is_lost(tiny, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TEST_PAUSE", "0.2")
    settings = hpclm.settings(*tiny("run", "model.block=tests.faults:SlowBlock", "checkpoint.every=1"))

    def interrupt():
        trains = threading.main_thread().ident  # whose sleep only a signal of its own interrupts
        until((tmp_path / "run/checkpoints/latest").exists)
        os.environ["TEST_PAUSE"] = "3600"  # the step is not finished before the second one
        signal.pthread_kill(trains, signal.SIGINT)
        until(lambda: "finishing this step" in capfd.readouterr().err)
        signal.pthread_kill(trains, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match=r"run: not saved since step \d+; run the same call again to continue"):
        hpclm.train(settings)
    thread.join()
    run = hpclm.open(settings.out)
    last = run.checkpoints[-1]
    assert repr(run).partition(": ")[2].startswith(f"exited, interrupted: not saved since step {last.step}, exiting")
    assert (
        (tmp_path / "run/log.txt").read_text().endswith(f"W interrupted: not saved since step {last.step}, exiting\n")
    )


def test_mistakes_are_errors_with_every_problem(tmp_path):
    with pytest.raises(hpclm.ConfigError) as caught:
        hpclm.settings("debug", "model.layers=x", {"optim.lrr": 1})
    assert caught.value.problems == [
        "model.layers='x' must be a whole number",
        "unknown setting optim.lrr. Did you mean 'optim.lr'?",
    ]
    with pytest.raises(hpclm.ConfigError, match="is not a run directory"):
        hpclm.open(tmp_path)
    with pytest.raises(
        hpclm.ConfigError, match=r"optim\.lr: settings are text, numbers, lists and mappings, not object"
    ):
        hpclm.settings("debug", {"optim.lr": object()})
    with pytest.raises(hpclm.ConfigError, match=r"model\.block: give its name, 'collections:Counter'"):
        hpclm.settings("debug", {"model.block": Counter})
    of_a_cell = type("Stop", (), {"__module__": "__main__"})
    for value in (of_a_cell, "__main__:Stop"):  # as a notebook's cell defines it
        with pytest.raises(hpclm.ConfigError, match=r"into a file, such as mine\.py, and give 'mine:Stop'"):
            hpclm.settings("debug", {"train.callbacks": [value]})
    for base in (None, 5, {"model.layers": 1}):
        with pytest.raises(hpclm.ConfigError, match=r"the first argument must be a preset.*it is (NoneType|int|dict)"):
            hpclm.train(base)
    with pytest.raises(hpclm.ConfigError, match=r"a change must be a mapping .* not int"):
        hpclm.settings("debug", 5)
    for data in (5, ["a", "b"]):
        with pytest.raises(hpclm.ConfigError, match=r"data= takes the prefix .* not (int|list)"):
            hpclm.train("small", data=data)
    with pytest.raises(hpclm.ConfigError, match="data is empty"):
        hpclm.train("small", data="")
    with pytest.raises(hpclm.ConfigError, match=r"train has no argument 'date'\. Did you mean 'data'"):
        hpclm.train("small", date="text.jsonl")
    with pytest.raises(hpclm.ConfigError, match=r"settings are given as {'model\.layers': \.\.\.}"):
        hpclm.train("small", layers=2)
    with pytest.raises(
        hpclm.ConfigError, match=r"data\.prefix is not set; give data= \(a text or the prefix of a dataset\)"
    ):
        hpclm.train("small")
    with pytest.raises(hpclm.ConfigError, match="train: missing a required argument: 'base'"):
        hpclm.train()
    for out in ("/", "a\nb", "runs/\x1b[2J"):
        with pytest.raises(hpclm.ConfigError, match=r"out=.* must be a folder of the run's own, on one line"):
            hpclm.settings("debug", out=out)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        hpclm.trian  # noqa: B018


def test_only_the_main_thread_trains(tiny):
    caught = []

    def attempt():
        try:
            hpclm.train(hpclm.settings(*tiny()))
        except hpclm.ConfigError as error:
            caught.append(str(error))

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert caught == ["hpclm.train catches signals, so it must be called in the main thread"]


def test_importing_hpclm_loads_nothing_and_the_programs_do_not_take_the_place_of_functions():
    code = (
        "import sys; before = set(sys.modules); import hpclm; new = set(sys.modules) - before\n"
        "print(sorted(name for name in new if name.partition('.')[0] in ('hpclm', 'torch', 'numpy', 'yaml')))\n"
        "from hpclm import train, settings; print(settings('debug').name, 'torch' in sys.modules)\n"
        "for name in ('train', 'submit'):\n"
        "    try: __import__(f'hpclm.{name}')\n"
        "    except ImportError as error: print(error.name, getattr(hpclm, name).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines() == ["['hpclm']", "debug False", "hpclm.train train", "hpclm.submit submit"]


def test_help_and_completion_show_the_interface():
    names = [name for name in dir(hpclm) if not name.startswith("_")]
    functions = ["compare", "load", "open", "report", "selftest", "settings", "submit", "sweep", "train"]
    assert names == ["ConfigError", "HpclmError", "Run", "RunConfig", *functions]
    shown = pydoc.render_doc("hpclm", renderer=pydoc.plaintext)
    assert all(f"    {name}(" in shown for name in ("open", "settings", "submit", "train"))
    made = hpclm.settings("debug")
    assert {"optim", "diff"} < set(dir(made)) > {"name"} and not {"problems", "plan", "for_engine"} & set(dir(made))
    assert "lr" in dir(made.optim) and not {"problems"} & set(dir(made.optim))
    for typed, names in (("run.settings.op", ["optim"]), ("run.settings.optim.l", ["lr"])):  # in a notebook
        run = hpclm.Run("x")
        assert [each.name for each in jedi.Interpreter(typed, [{"run": run}]).complete()] == names
    undocumented = [name for name in vars(hpclm.Run) if name[0] != "_" and not getattr(hpclm.Run, name).__doc__]
    assert not undocumented


@pytest.mark.whole
def test_the_examples_of_the_page_run(here):
    Path("stories.jsonl").write_text(Path("text.jsonl").read_text())
    assert (
        cli.main(["train-tokenizer", "--input", "stories.jsonl", "--output", "tokenizer.json", "--vocab-size", "300"])
        == 0
    )
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.S)
    here_alone = [each for each in examples if "hpclm.submit" not in each]
    assert len(here_alone) == 5
    names, more = {}, f'{TINY}, "engine.device=cpu",'
    for example in here_alone:
        small = example.replace('train("small",', f'train("small", {more}')
        exec(re.sub(r'(sweep\("small", \{.*?\},)(.*)steps=\d+', rf"\1 {more}\2steps=5", small), names)
    assert [run.rows[-1]["step"] for run in names["runs"]] == [5, 5, 5, 5]
    assert 257 < names["run"].settings.model.vocab_size <= 300
    assert hpclm.open("small").rows[-1]["step"] == 400 and hpclm.open("six").settings.model.layers == 6


@pytest.mark.slurm
def test_a_submitted_run_can_be_watched(cluster, tiny, tmp_path, monkeypatch):
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    first, *changes = tiny("run", "budget.steps=1000000")
    run = hpclm.submit(first, *changes, nodes=1, gpus=1)
    try:
        assert run.status in ("waiting", "starting", "running") and run.path == tmp_path / "run"
        with pytest.raises(LockedError, match="is in the queue"):
            hpclm.submit(first, *changes)
    finally:
        cluster.run(["scancel", "--me"])


def test_without_a_queue_nothing_is_submitted(here, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(hpclm.ConfigError, match=r"no Slurm here \(sbatch not found\); hpclm\.train trains"):
        hpclm.submit("debug", data="text.jsonl")
    assert not Path("runs").exists()


def test_out_that_is_a_file_or_a_folder_of_other_files_is_refused_before_anything_is_written(here):
    with pytest.raises(hpclm.ConfigError, match=r"run directory text\.jsonl is a file"):
        hpclm.train("small", data="text.jsonl", out="text.jsonl")
    for base, data in (("small", "text.jsonl"), ("debug", None)):
        with pytest.raises(
            hpclm.ConfigError, match=r"run directory \. is not empty, and has no run: it has text\.jsonl"
        ):
            hpclm.train(base, data=data, out=".", device="cpu")
    assert list(here.iterdir()) == [here / "text.jsonl"]
    Path("jobs").mkdir(mode=0o700)
    for name in ("slurm-1.out", "train.sbatch", ".nfs1"):
        Path("jobs", name).touch()
    assert hpclm.train("debug", out="jobs", device="cpu", steps=1).status == "done"
