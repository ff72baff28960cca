"""hpclm.sweep, hpclm.compare and hpclm.report; a run is cancelled from Python."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import hpclm
from hpclm.rundir import runs
from tests.rundir.test_runs import make
from tests.runs import PATIENCE, until
from tests.test_several_runs import launcher

TINY = {"model": {"layers": 1, "hidden": 16, "attention": {"heads": 2}, "context": 16}, "evaluate.every": 4}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.jsonl").write_text("".join(json.dumps({"text": "Once upon a time."}) + "\n" for _ in range(200)))
    return tmp_path


def test_a_sweep_trains_a_run_for_each_value_and_the_same_call_continues_it(here, capsys):
    def call(rates, steps=8):
        return hpclm.sweep(
            "small", {"optim": {"lr": rates}}, TINY, "optim.clip=0", data="text.jsonl", steps=steps, device="cpu"
        )

    [first] = call([1e-3])
    runs = call(np.array([1e-3, 1e38, 3e-3]), 30)
    said = capsys.readouterr()
    assert said.out.count("200 documents") == 1 and "run 2 of 3  runs/small-lr-1e+38: step 2" in said.err
    assert [Path(run).name for run in runs] == ["small-lr-0.001", "small-lr-1e+38", "small-lr-0.003"]
    assert [run.status for run in runs] == ["done", "failed", "done"] and first.rows[-1]["step"] == 30
    table = hpclm.compare(runs)
    assert list(table["run"]) == ["small-lr-0.003", "small-lr-0.001", "small-lr-1e+38"]
    assert list(table["optim.lr"]) == [3e-3, 1e-3, 1e38] and list(table["status"]) == ["done", "done", "failed"]
    best = min(row["validation_loss"] for row in runs[2].rows if row.get("validation_loss"))
    assert table["validation_loss"][0] == best and table["loss"][0] == runs[2].rows[-2]["loss"]
    assert {"optim.lr", "steps", "training_loss", "tokens_per_second", "diverged", "path"} <= {*table.columns}
    assert list(hpclm.compare("small-lr-0*")["run"]) == ["small-lr-0.003", "small-lr-0.001"]
    page = hpclm.report(runs)
    assert (
        page.path == Path("report.html")
        and "3 runs compared" in page.path.read_text()
        and "<iframe" in page._repr_html_()
    )
    assert hpclm.report(first).path == Path("runs/small-lr-0.001/report.html")
    times = [(run.path / "events.jsonl").stat().st_mtime for run in runs]
    assert [run.path for run in call([1e-3, 1e38, 3e-3], 30)] == [run.path for run in runs]
    said = capsys.readouterr().err
    assert said.count("; skipped") == 2 and said.count("not started again with the same settings") == 1
    assert times == [(run.path / "events.jsonl").stat().st_mtime for run in runs]


def test_mistakes_of_a_sweep_are_found_before_anything_is_written(here):
    before = sorted(here.rglob("*"))
    for values, more, answer in (
        ({"model.attention.heads": [4, 5]}, {}, "model.attention.heads=5"),
        (
            {"optim.lr": 1e-3},
            {},
            r"optim.lr must have a list of values, not 0.001; pass settings that all runs share after",
        ),
        ({"optim.lr": []}, {}, "optim.lr has no values"),
        ({"lr": [1e-3]}, {}, "unknown setting lr: it is optim.lr here"),
        ({"optim.lr": [1e-3, 1e-3]}, {}, "two runs would be called lr-0.001"),
        ({}, {}, "the second argument must be a mapping"),
        ("optim.lr", {}, "is not key=a,b,c"),
        ({"seed": [1, 2]}, {"parallel": 0}, "parallel=0 must be at least 1"),
    ):
        with pytest.raises(hpclm.ConfigError, match=answer):
            hpclm.sweep("small", values, data="text.jsonl", **more)
    assert sorted(here.rglob("*")) == before
    for call in (hpclm.compare, hpclm.report):
        for wrong, answer in (
            ([], "runs is empty"),
            (3, "runs=3 must be runs"),
            ("no-*", "no run directory matches 'no-\\*'"),
        ):
            with pytest.raises(hpclm.ConfigError, match=answer):
                call(wrong)


def test_a_run_is_cancelled_from_python(here, capsys):
    process = launcher(make(here / "runs" / "a"))
    run = hpclm.open("a")
    assert run.cancel() is run and process.wait(PATIENCE) == 0
    process.stdout.close()
    assert f"process {process.pid}: asked to save and exit" in capsys.readouterr().out
    run.cancel()
    assert "runs/a is not running" in capsys.readouterr().out
    with pytest.raises(hpclm.ConfigError, match=r"wait=-1\.0 must be at least 0"):
        run.cancel(wait=-1)


def test_a_run_of_this_process_is_interrupted_instead(here):
    said, out = [], here / "runs" / "debug"

    def cancel():
        try:
            until(lambda: runs.is_run(out) and runs.read_run(out).step >= 3, "a run that trains")
            hpclm.open("debug").cancel()
        except hpclm.ConfigError as error:
            said.append(str(error))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match=r"runs/debug: saved at step \d+; run the same call again to continue"):
        hpclm.sweep("debug", {"name": ["debug", "never"]}, steps=100_000, device="cpu")
    thread.join()
    assert said == ["runs/debug is trained by this process; interrupt the cell or the call that trains it"]
    assert [path.name for path in Path("runs").iterdir()] == ["debug"]


@pytest.mark.whole
def test_a_sweep_in_processes_ends_with_its_call(here):
    out = here / "runs" / "debug-seed-1"
    code = "import hpclm; hpclm.sweep('debug', {'seed': [1, 2]}, steps=100000, device='cpu', parallel=1)"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    until(lambda: (out / "summary.json").exists() and hpclm.open(out).rows, "a run that trains")
    process.send_signal(2)
    said = process.communicate(timeout=PATIENCE)[1]
    assert "2 of 2 runs are not done; run the same call again to continue" in said
    assert hpclm.open(out).status == "exited" and hpclm.open(out).checkpoints
