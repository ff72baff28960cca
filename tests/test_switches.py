"""Orders by files, to a run of two processes, at any time."""

import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpclm import cli
from hpclm.checkpoint import directory
from hpclm.rundir.summary import RunSummary
from tests.forks import Ranks
from tests.rundir.test_runs import checkpoint, make
from tests.runs import PATIENCE, ROOT, figures, until
from tests.test_status import attempt, rows

RUN = ["budget.steps=1000000", "optim.schedule=constant", "checkpoint.every=0", "checkpoint.keep_last=1000"]
RUN += ["cluster.preflight=false"]


def saved(out):
    return sorted(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("orders", [3, pytest.param(40, marks=[pytest.mark.whole, pytest.mark.slow])])
def test_every_order_is_followed_once_by_both_and_its_file_is_gone(orders, tiny, tmp_path):
    out, draw = tmp_path / "run", random.Random(orders)
    with Ranks(2, tiny("run", *RUN)) as ranks:
        ranks.wait_for(out, 1)
        for number in range(1, orders + 1):
            time.sleep(draw.uniform(0, 0.5))
            (out / "save-now").touch()
            until(lambda: not (out / "save-now").exists())
            until(lambda number=number: len(saved(out)) >= number)
        time.sleep(draw.uniform(0, 0.5))
        (out / "stop").touch()
        assert {code for code, _ in ranks.wait().values()} == {0}
    assert len(saved(out)) == orders + 1 and saved(out)[-1] == figures(out, "step", "loss")[-1][0]
    assert not (out / "stop").exists()
    for step in saved(out):
        directory.verified(out / f"checkpoints/step-{step:08d}")


@pytest.mark.whole
@pytest.mark.slow
def test_both_orders_while_a_run_starts_are_followed_as_soon_as_it_can(tiny, tmp_path):
    out, draw = tmp_path / "run", random.Random(1)
    out.mkdir(mode=0o700)
    before = 0
    for _ in range(5):
        with Ranks(2, tiny("run", *RUN)) as ranks:
            time.sleep(draw.uniform(0, 5))
            for name in draw.sample(["save-now", "stop"], 2):
                (out / name).touch()
            assert {code for code, _ in ranks.wait().values()} == {0}
        assert not (out / "stop").exists()
        reached = max((step for step, _ in figures(out, "step", "loss")), default=0)
        assert before <= reached and (not reached or saved(out)[-1] == reached)
        before = reached


def asked(tmp_path, verb, *more, runs):
    """``hpclm request RUN VERB`` of a run that trains, while its process is killed; how that ended."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", "hpclm"])
    host = os.uname().nodename
    run = make(tmp_path / "a", [attempt(host=host, pid=process.pid)], runs, lock=f'{{"host": "{host}", "pid": 1}}')
    verb = subprocess.Popen(
        [sys.executable, "-m", "hpclm", "request", str(run), verb, "--wait", "3600"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    until(lambda: any((run / name).exists() for name in ("save-now", "stop")))
    for act in more:
        act(run)
    process.kill()
    process.wait()
    said, _ = verb.communicate(timeout=PATIENCE)
    assert not (run / "save-now").exists() and not (run / "stop").exists()
    return verb.returncode, said


@pytest.mark.parametrize("request_name, file", [("save", "save-now"), ("stop", "stop")])
def test_a_request_to_runs_that_are_not_training_gives_64_and_writes_nothing(request_name, file, tmp_path, capsys):
    make(tmp_path / "new")
    make(tmp_path / "ended", [attempt()], rows(5), ("exited", "SIGTERM: saved at step 5, exiting", 85))
    (tmp_path / "gone").mkdir()
    make(tmp_path / "far", [attempt()], rows(5), lock='{"host": "elsewhere", "pid": 12}')
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for word, told in {
        "new": "new is not training: new\n",
        "ended": "is not training: exited, SIGTERM: saved at step 5, exiting\n",
        "far": f"is not training: unknown; if it is training elsewhere, ask it with: touch {tmp_path}/far/{file}\n",
        "gone": "gone is not a run directory",
    }.items():
        assert cli.main(["request", "--runs", str(tmp_path), word, request_name]) == 64
        assert told in capsys.readouterr().err
    assert cli.main(["request", "--runs", str(tmp_path), "new", "ended", "f*", request_name]) == 64
    assert capsys.readouterr().err.count("is not training") == 3
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_request_to_another_user_s_run_which_would_not_follow_it_is_refused(tmp_path, capsys):
    os.chown(make(tmp_path / "a", [attempt()], rows(5)), 12345, 12345)
    assert cli.main(["request", str(tmp_path / "a"), "stop"]) == 64
    assert "belongs to user number 12345: a run follows only its owner's requests" in capsys.readouterr().err


def test_several_runs_are_asked_before_any_is_waited_for(tmp_path, capsys):
    for name in ("a", "b"):
        make(tmp_path / name, [attempt()], rows(5), lock='{"host": "elsewhere", "pid": 12}', lock_beat="1 1")
    files = [tmp_path / name / "stop" for name in ("a", "b")]

    def comply():
        until(lambda: all(file.exists() for file in files))
        for file in files:
            file.unlink()

    with ThreadPoolExecutor() as pool:
        complied = pool.submit(comply)
        assert cli.main(["request", "--runs", str(tmp_path), "*", "stop"]) == 0
        complied.result()
    assert capsys.readouterr().out.count("saved and ended; continue with: hpclm resume") == 2


def test_a_request_to_a_run_that_dies_is_withdrawn_at_once(tmp_path):
    code, said = asked(tmp_path, "save", runs=rows(5))
    assert code == 1 and "has ended meanwhile: ended" in said
    assert "it was at step 5, and nothing is saved. The request was withdrawn" in said


def test_a_run_that_ends_with_all_saved_has_followed(tmp_path):
    def leave(run):
        checkpoint(run / "checkpoints" / "step-00000005")
        RunSummary(run).end("exited", "SIGTERM: saved at step 5, exiting", 85)

    code, said = asked(tmp_path, "save", leave, runs=rows(5))
    assert code == 0 and "exited, SIGTERM: saved at step 5, exiting; saved at step 5" in said
