"""hpclm as a Python library: what a notebook does."""

import ast
import faulthandler
import re
import signal
import subprocess
import sys
import threading

import pytest

import hpclm
from hpclm import cli
from tests.runs import ROOT


def test_a_run_from_settings_to_text_in_python(tiny, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "Once upon a time there was a number."}\n' * 50)
    prepare = ["preprocess", "--input", str(tmp_path / "text.jsonl"), "--output-prefix", str(tmp_path / "mine")]
    assert cli.main([*prepare, "--tokenizer", "bytes", "--append-eod"]) == 0
    words = [
        word for word in tiny("run", "evaluate.every=6", "model.vocab_size=257") if word != "data.source=synthetic"
    ]
    settings = hpclm.settings(*words, f"data.prefix={tmp_path}/mine_text_document", "data.split=8,2,0")
    run = hpclm.train(settings)
    assert run == tmp_path / "run"
    rows = hpclm.metrics(run)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13))
    assert [row["step"] for row in rows if "validation_loss" in row] == [6, 12]
    assert rows == sorted(rows, key=lambda row: row["step"])
    text = hpclm.generate(run, "Once upon", tokens=5)
    both = hpclm.generate(run, ["Once upon", "a time"], tokens=5)
    assert isinstance(text, str) and both[0] == text and len(both) == 2


def test_the_ten_lines_of_the_documentation_do_what_it_says(tmp_path, monkeypatch, capsys):
    [block] = re.findall(r"```python\n(from hpclm import.*?)```", (ROOT / "docs/python.md").read_text(), re.S)
    assert len(block.splitlines()) <= 10
    (tmp_path / "text.jsonl").write_text('{"text": "Once upon a time there was a number."}\n' * 100)
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    [shell] = re.findall(r"^!hpclm (.*)$", block, re.M)
    assert cli.main(shell.split()) == 0
    less = ["budget.steps=4", "evaluate.every=2", "evaluate.batches=1", "engine.device=cpu", "batch.global_size=2"]
    less += ["batch.micro_size=2", "model.layers=2", "model.hidden=32", "model.context=32", "data.split=8,2,0"]
    smaller = re.sub(r'"out=runs/first"', lambda found: ", ".join(map(repr, ["out=runs/first", *less])), block)
    capsys.readouterr()
    exec(re.sub(r"^!.*$", "", smaller, flags=re.M), {})
    measured, text = capsys.readouterr().out.split("\n", 1)
    assert [step for step, _ in ast.literal_eval(measured)] == [2, 4] and len(text) > 10


def test_training_in_python_leaves_signals_as_they_were_and_continues_the_run(tiny):
    numbers = signal.valid_signals()
    before = [signal.getsignal(number) for number in numbers]
    run = hpclm.train(hpclm.settings(*tiny("run", "stop_at=6")))
    with pytest.raises(hpclm.ConfigError, match=r"model\.layers was 2 and is now 3"):
        hpclm.train(hpclm.settings(*tiny("run", "model.layers=3")))
    assert [signal.getsignal(number) for number in numbers] == before
    assert not faulthandler.unregister(signal.SIGQUIT)  # nothing of ours answers it any more
    hpclm.train(hpclm.settings(*tiny()))
    assert [row["step"] for row in hpclm.metrics(run)] == list(range(1, 13))


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
        with pytest.raises(KeyboardInterrupt, match="has saved; train with the same settings to continue"):
            hpclm.train(settings)
    finally:
        given_up.set()
        thread.join()
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_mistakes_are_errors_with_every_problem(tmp_path):
    with pytest.raises(hpclm.ConfigError) as caught:
        hpclm.settings("debug", "model.layers=x", "optim.lrr=1")
    assert len(caught.value.problems) == 2
    with pytest.raises(hpclm.ConfigError, match="is not a run directory"):
        hpclm.metrics(tmp_path)
    with pytest.raises(hpclm.ConfigError, match="is not a run directory"):
        hpclm.generate(tmp_path, "Once upon")
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


def test_importing_hpclm_loads_nothing_and_train_can_be_called_whatever_was_imported_before():
    code = (
        "import sys; before = set(sys.modules); import hpclm; new = set(sys.modules) - before\n"
        "print(sorted(name for name in new if name.partition('.')[0] in ('hpclm', 'torch', 'numpy', 'yaml')))\n"
        "print(set(hpclm.__all__) <= set(dir(hpclm)))\n"
        "import hpclm.train, hpclm.submit; print(callable(hpclm.train))\n"
        "from hpclm import train, settings; print(callable(train), settings('debug').name, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines() == ["['hpclm']", "True", "True", "True debug False"], done.stderr
