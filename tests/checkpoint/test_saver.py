"""When a run saves, seen from the outside: real runs, their folders and their logs."""

import json
import os
import signal

import pytest
import torch

from hpclm.base.errors import DivergedError
from hpclm.checkpoint import CheckpointStore, Progress, Retention
from hpclm.checkpoint.directory import checked, steps
from hpclm.config import CheckpointConfig, from_cli
from hpclm.engine import Shard
from hpclm.node.job import OwnJob
from hpclm.rundir.control_files import ControlFiles
from hpclm.training import records
from hpclm.training.control import ControlState
from hpclm.training.saver import Saver
from tests import forks
from tests.events import note
from tests.forks import Hpclm, hpclm
from tests.runs import PATIENCE, lines, losses, until

LONG = ["budget.steps=100000", "optim.schedule=constant", "checkpoint.every=0"]


class State:
    """An engine as a store sees it."""

    def tensors(self):
        return iter([Shard.whole("model.a", torch.ones(1000))])

    def scalars(self):
        return {}


def names(out):
    return [int(path.name[5:]) for path in steps(out / "checkpoints")]


def begun(words, out, step=3):
    """A run that trains, past ``step``."""
    process = Hpclm("train", *words)
    forks.steps(process, out, step)
    return process


@pytest.mark.parametrize("background", ["true", "false"])
def test_background_and_blocking_saves_write_the_same_bytes(tiny, tmp_path, background):
    hpclm("train", *tiny("one", "checkpoint.background=true"), check=0)
    hpclm("train", *tiny(background, f"checkpoint.background={background}"), check=0)
    for step in names(tmp_path / "one"):
        first, second = (
            (tmp_path / run / f"checkpoints/step-{step:08d}/rank-00000.safetensors").read_bytes()
            for run in ("one", background)
        )
        assert first == second


def test_what_is_kept(tiny, tmp_path):
    words = tiny("run", "budget.steps=24", "checkpoint.every=2", "checkpoint.keep_last=2", "checkpoint.keep_every=8")
    hpclm("train", *words, "checkpoint.keep_best=1", "evaluate.every=6", check=0)
    measured = {s.name: checked(s).validation for s in steps(tmp_path / "run/checkpoints")}
    rows = [json.loads(line) for line in lines(tmp_path / "run/metrics.jsonl")]
    found = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    best = min(found, key=lambda step: found[step])
    assert names(tmp_path / "run") == sorted({8, 16, 22, 24, best})
    assert measured[f"step-{best:08d}"] == found[best]


@pytest.mark.parametrize(
    "settings, step, state, why",
    [
        (["checkpoint.every=5"], 7, ControlState({"SIGTERM": 1.0}), "SIGTERM"),
        (["checkpoint.every=5"], 7, ControlState(stop="stop"), "stop"),
        (["checkpoint.every=5"], 7, ControlState(out_of_time=True), "exit_minutes"),
        (["checkpoint.every=5"], 7, ControlState(), None),  # the end of a run
        (["checkpoint.every=5"], 10, ControlState({"SIGTERM": 1.0}), None),  # due anyway
        (["checkpoint.every=0", "checkpoint.minutes=9"], 7, ControlState(stop="stop", minutes=1.0), "stop"),
        (["checkpoint.every=0", "checkpoint.minutes=9"], 7, ControlState(stop="stop", minutes=9.0), None),
        (["checkpoint.every=0"], 7, ControlState({"SIGTERM": 1.0}), None),  # the only saves there are
    ],
)
def test_a_checkpoint_says_whether_it_was_made_because_the_run_was_told_to_leave(settings, step, state, why, tmp_path):
    store = CheckpointStore(tmp_path, Retention(), {})
    Saver(store, from_cli(["configs/debug.yaml", *settings], None).checkpoint).exit(
        State(), Progress(step), None, state
    )
    assert [checked(path).why for path in steps(tmp_path)] == [why]


@pytest.mark.parametrize(
    "since, left",
    [
        ({"SIGTERM": 10.0}, 20.0),
        ({"SIGUSR2": 70.0, "SIGTERM": 5.0}, 25.0),
        ({"SIGUSR2": 110.0, "SIGTERM": 5.0}, 10.0),
        ({"SIGTERM": 5.0, "SIGUSR1": 1.0}, 25.0),
        ({"SIGTERM": 5.0, "SIGINT": 9.0}, 25.0),  # a Ctrl-C takes no time away, and gives none
        ({"SIGINT": 9.0}, None),
        ({}, None),
    ],
)
def test_of_several_signals_the_earliest_end_counts(since, left, tmp_path):
    saver = Saver(CheckpointStore(tmp_path, Retention(), {}), CheckpointConfig(), 120.0)
    assert saver.seconds_left(ControlState(since)) == left


def test_the_verb_says_that_a_checkpoint_was_made_because_of_a_warning(tiny, tmp_path):
    process = begun(tiny("run", *LONG[:2], "checkpoint.every=1000000"), tmp_path / "run")
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 85, errors
    [told] = hpclm("checkpoints", tmp_path / "run", check=0).stdout.splitlines()
    assert told.endswith("saved on SIGUSR1")


def test_a_run_saves_by_the_clock_too(tiny, tmp_path):
    words = tiny("run", *LONG, "checkpoint.minutes=0.02", "checkpoint.keep_last=100")
    with begun(words, tmp_path / "run") as process:
        until(lambda: len(names(tmp_path / "run")) >= 3, "the third save", process)
    done = hpclm("train", *words, "exit_minutes=0.02", check=0)
    assert "(exit_minutes); the same command resumes it" in done.stderr


def test_a_run_leaves_at_every_multiple_of_exit_interval_and_goes_on(tiny, tmp_path):
    hpclm("train", *tiny("whole", "budget.steps=10"), check=0)
    words = tiny("run", "budget.steps=10", "exit_interval=4")
    for step in (4, 8):
        assert f"stopped at step {step} (exit_interval)" in hpclm("train", *words, check=0).stderr
    assert "done at step 10" in hpclm("train", *words, check=0).stderr
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_stop_goes_before_a_signal_that_comes_with_it(tiny, tmp_path):
    process = begun(tiny("run", *LONG), tmp_path / "run")
    (tmp_path / "run/stop").touch()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and "(hpclm request RUN stop)" in errors and not (tmp_path / "run/stop").exists()


def test_requests_to_save_and_to_stop(tiny, tmp_path):
    out = tmp_path / "run"
    process = begun(tiny("run", *LONG), out)
    assert "saving" in hpclm("request", out, "save", check=0).stdout
    until(lambda: len(names(out)) == 1)
    assert "saved and ended" in hpclm("request", out, "stop", check=0).stdout
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and "(hpclm request RUN stop); the same command resumes it" in errors
    assert len(names(out)) == 2 and not (out / "stop").exists()
    assert "stopped" in hpclm("status", out).stdout
    assert "is not training: stopped" in hpclm("request", out, "stop", check=64).stderr


def test_an_order_is_a_file_of_the_owner_and_no_link(tmp_path):
    (tmp_path / "elsewhere").touch()
    (tmp_path / "stop").symlink_to("elsewhere")
    assert not ControlFiles(tmp_path).requested("stop")
    (tmp_path / "stop").unlink()
    (tmp_path / "stop").touch()
    switches = ControlFiles(tmp_path)
    assert switches.requested("stop") and not switches.requested("save-now")
    if os.getuid() == 0:
        os.chown(tmp_path / "stop", 12345, 12345)
        assert not ControlFiles(tmp_path).requested("stop")
    switches.remove("stop")
    assert not switches.requested("stop") and not (tmp_path / "stop").exists()


@pytest.mark.parametrize("grace, saves", [(60, True), (0.5, False)])
def test_a_save_that_would_not_be_done_in_time_is_not_begun(tmp_path, caplog, grace, saves):
    store = CheckpointStore(tmp_path, Retention(), {})
    saver = Saver(store, CheckpointConfig(grace_seconds=grace))
    saver.save(State(), Progress(1), None, ControlState())
    saver.wait()
    saver._longest = 1.0  # as if the disk were slow
    saver.exit(State(), Progress(2), None, ControlState({"SIGTERM": 0.1}))
    assert [path.name for path in steps(tmp_path)][-1] == f"step-0000000{2 if saves else 1}"
    assert ("exiting without saving; steps 2 to 2 will be repeated" in caplog.text) != saves


def test_a_warning_while_a_save_is_on_its_way_waits_for_it(tiny, tmp_path):
    out = tmp_path / "run"
    process = begun(tiny("run", *LONG[:2], "checkpoint.every=1"), out)
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 85, errors
    last = json.loads(lines(out / "metrics.jsonl")[-1])["step"]
    assert names(out)[-1] == last
    assert not list((out / "checkpoints").glob(".*"))


def test_weights_of_another_run_begin_a_new_one(tiny, tmp_path):
    hpclm("train", *tiny("old"), check=0)
    hpclm(
        "train", *tiny("new", f"checkpoint.init_from={tmp_path / 'old'}", "optim.lr=1e-9", "optim.min_lr=1e-9"), check=0
    )
    old, new = (losses(tmp_path / name) for name in ("old", "new"))
    first, last = float.fromhex(new[1]), float.fromhex(old[12])
    assert abs(first - last) < 0.15 < float.fromhex(old[1]) - first
    state = json.loads((tmp_path / "new/checkpoints/step-00000004/MANIFEST.json").read_text())
    assert state["scalars"]["optimizer_steps"] == 4 and state["progress"]["samples"] == 32
    again = hpclm("train", *tiny("new", f"checkpoint.init_from={tmp_path / 'gone'}", "budget.steps=13"), check=0)
    assert "resumes from step 12" in again.stderr  # its own checkpoints go first


def test_weights_of_another_model_are_refused(tiny, tmp_path):
    hpclm("train", *tiny("old", "budget.steps=4"), check=0)
    done = hpclm("train", *tiny("new", f"checkpoint.init_from={tmp_path / 'old'}", "model.attention.heads=2"), check=64)
    assert "model.attention.heads was 4 and is now 2" in done.stderr
    assert "neither a run directory" in hpclm("train", *tiny("x", f"checkpoint.init_from={tmp_path}"), check=64).stderr


def test_the_verb_lists_and_verifies(tiny, tmp_path):
    hpclm("train", *tiny("run"), check=0)
    told = hpclm("checkpoints", tmp_path / "run", check=0).stdout.splitlines()
    assert [line.split()[:2] for line in told] == [[f"step-0000{n:04d}", "good"] for n in (4, 8, 12)]
    victim = tmp_path / "run/checkpoints/step-00000008/rank-00000.safetensors"
    content = bytearray(victim.read_bytes())
    content[-5] ^= 4
    victim.write_bytes(content)
    told = [json.loads(line) for line in hpclm("checkpoints", tmp_path / "run", "--json", check=0).stdout.splitlines()]
    assert [row["state"] for row in told] == ["good", "bad", "good"]
    assert told[1]["reason"] == "rank-00000.safetensors differs from what was saved (its hash is wrong)"
    quick = hpclm("checkpoints", tmp_path / "run", "--no-verify", check=0).stdout
    assert quick.count(" complete ") == 3
    assert "is not a run directory" in hpclm("checkpoints", tmp_path, check=64).stderr


def test_a_job_that_starts_again_and_again_without_a_checkpoint_is_stopped(tmp_path):
    job = OwnJob("Slurm", "7")

    def attempts(*rows):
        (tmp_path / "events.jsonl").write_text("")
        for number, step in rows:
            note(tmp_path, "began", job_id=number, from_step=step)

    attempts(("7", 0), ("7", 10), ("7", 10))
    records.check_progress(tmp_path, 10, job)
    attempts(("7", 0), ("7", 10), ("7", 10), ("7", 10))
    with pytest.raises(DivergedError, match="has started 3 times from step 10"):
        records.check_progress(tmp_path, 10, job)
    records.check_progress(tmp_path, 20, job)
    attempts(("7", 0), ("6", 10), ("7", 10), ("7", 10))  # a person has started it anew
    records.check_progress(tmp_path, 10, job)
    attempts(("7", 10), ("7", 10))
    note(tmp_path, "ended", code=85, state="exited")
    note(tmp_path, "began", job_id="7", from_step=10)
    records.check_progress(
        tmp_path, 10, job
    )  # one exited cleanly, and was started again by hand in the same allocation


# restart, step, whether it exited cleanly; then the restart that asks, and whether the job ends
STARTS = {
    "killed": ([(0, 0, False), (1, 0, False), (2, 0, False)], 3, True),
    "warned before the first step": ([(0, 0, True), (1, 0, True), (2, 0, True)], 3, True),
    "in either way": ([(0, 0, True), (1, 0, False), (2, 0, True)], 3, True),
    "two of them": ([(0, 0, True), (1, 0, True)], 2, False),
    "some left no row": ([(0, 0, True)], 3, True),
    "one left no row": ([(0, 0, False), (2, 0, True)], 3, True),
    "after a checkpoint": ([(0, 0, True), (1, 5, True), (2, 5, True)], 3, False),
    "three after a checkpoint": ([(0, 0, True), (1, 5, True), (2, 5, False), (3, 5, True)], 4, True),
    "by hand in one allocation": ([(0, 0, True)] * 4, 0, False),
    "killed in one allocation": ([(0, 0, False)] * 3, 0, True),
}


@pytest.mark.parametrize("starts, restart, ends", STARTS.values(), ids=STARTS)
def test_starts_that_reach_no_checkpoint_count_however_they_end(starts, restart, ends, tmp_path):
    job = OwnJob("Slurm", "7", restart)
    for number, step, clean in starts:
        note(tmp_path, "began", job_id="7", restart=number, from_step=step)
        if clean:
            note(tmp_path, "ended", code=85, state="exited")
    step = starts[-1][1]
    if ends:
        with pytest.raises(DivergedError, match=r"job 7 has started [34] times from step"):
            records.check_progress(tmp_path, step, job)
    else:
        records.check_progress(tmp_path, step, job)
