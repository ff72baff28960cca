"""Ranks that end before a phase of the data are started again by whoever started them, until a signal says otherwise."""

import os
import signal

import numpy as np
import pytest

import hpclm
from hpclm.checkpoint import directory
from hpclm.preprocess.writer import Writer
from tests import forks
from tests.events import began, of_kind
from tests.launch import launched
from tests.launch.launched import ready
from tests.runs import PATIENCE, losses
from tests.test_preemption import Job

LAUNCHERS = pytest.mark.parametrize(
    "how, size", [("local", "job.gpus=2"), pytest.param("mpi", "job.gpus=2", marks=[pytest.mark.mpi, pytest.mark.slow])]
)


def starts(out):
    """How often each of two ranks was started."""
    return [(out / f"starts-{rank}").stat().st_size for rank in (0, 1)]


@LAUNCHERS
def test_they_are_started_again_for_each_phase_and_leave_nothing_that_explains_another_end(how, size, tmp_path):
    code, told, errors = launched.launched(how, tmp_path, size, "phase=2", "env=HPCLM_ERRORS", "exit=3")
    assert code == 3 and starts(tmp_path) == [3, 3], errors
    ends = of_kind(tmp_path, "ended")
    assert [event.get("state") for event in ends] == ["phase", "phase", None] and ends[-1]["code"] == 3
    assert {line.rpartition("-")[2] for line in told.splitlines() if "HPCLM_ERRORS" in line} == {"3"}


@LAUNCHERS
def test_after_a_signal_the_ranks_are_not_started_again(how, size, tmp_path):
    process = launched.start(how, tmp_path, size, "ready", "hear", "phase=5")
    ready(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 85 and starts(tmp_path) == [1, 1], errors


@pytest.fixture(scope="module")
def phases(tmp_path_factory):
    """The settings of a run of 12 steps on a dataset, with a longer context after step 4 and a larger batch after step 8."""
    prefix = tmp_path_factory.mktemp("data") / "a"
    draw = np.random.default_rng(0)
    with Writer(prefix, np.uint16) as writer:
        writer.note = {"tokenizer": {"kind": "bytes", "files": {}, "size": 257, "eod": 256}}
        for size in draw.integers(5, 30, 300):
            writer.add_document(np.append(draw.integers(0, 250, size), 256))
    return [
        *("data.source=indexed", "data.order=per_dataset", f"data.train=[{prefix}]", "model.vocab_size=300"),
        *("model.positions=rope", "model.context=16", "batch.global_size=4", "budget.steps=12", "evaluate.every=0"),
        *("checkpoint.every=100", "cluster.preflight=false", "engine.device=cpu"),
        "data.phases=[{from: 256, model.context: 32}, {from: 768, batch.global_size: 8}]",
    ]


SMALL = ["debug", "model.layers=1", "model.hidden=16", "model.attention.heads=2", "batch.micro_size=2"]
ENDS = [("phase", 4), ("phase", 8), ("done", 12)]


def ends(out):
    """State and step of each attempt's end, as the ranks recorded it."""
    return [(event["state"], event["step"]) for event in of_kind(out, "ended") if event.get("state")]


def test_the_same_command_continues_a_process_that_was_started_by_hand(phases, tmp_path):
    for code in (85, 85, 0):
        forks.hpclm("train", *SMALL, *phases, f"out={tmp_path}/run", check=code)
    assert ends(tmp_path / "run") == ENDS
    said = forks.hpclm("status", tmp_path / "run", check=0).stdout
    assert "attempts    3 (2 ended at a phase), the last from step 8" in said


def warned_while_it_saves():
    """Warn this process while it saves for the first time."""
    publish = directory.publish

    def warned(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        publish(*args)

    directory.publish = warned


def test_a_signal_that_comes_while_the_ranks_save_for_a_phase_ends_the_run(phases, tmp_path):
    forks.hpclm("train", *SMALL, *phases, f"out={tmp_path}/run", check=85, before=warned_while_it_saves)
    assert ends(tmp_path / "run") == [("exited", 4)]
    forks.hpclm("train", tmp_path / "run", check=85)
    assert ends(tmp_path / "run") == [("exited", 4), ("phase", 8)]


def test_a_branch_keeps_the_phases_that_have_been_read_and_may_have_others_later(phases, tmp_path):
    for code in (85, 85, 0):
        forks.hpclm("train", *SMALL, *phases, f"out={tmp_path}/run", check=code)

    def branch(name, step, later, check=0):
        words = [tmp_path / "run", tmp_path / name, "--at", step, f"data.phases=[{later}]"]
        return forks.hpclm("branch", *words, check=check).stderr

    longer = "{from: 256, model.context: 32}"
    shown = "data.phases[0] has been read: model.context was 32 and is now"
    assert f"{shown} 64" in branch("b", 8, "{from: 256, model.context: 64}", check=64)
    assert f"{shown} null" in branch("b", 8, "", check=64)
    early = f"{longer}, {{from: 600, optim.lr: 1e-4, optim.min_lr: 0}}"
    assert "a phase from 600 tokens on cannot begin any more" in branch("b", 8, early, check=64)
    assert not (tmp_path / "b").exists()
    branch("b", 8, f"{longer}, {{from: 900, optim.lr: 1e-3, optim.min_lr: 0}}")
    branch("c", 4, "{from: 256, model.context: 64}")
    for name in ("b", "c"):
        forks.hpclm("train", tmp_path / name, check=0)
        assert ends(tmp_path / name) == [("done", 12)]


def test_python_trains_to_the_end_as_a_process_by_hand_would(phases, tmp_path):
    for code in (85, 85, 0):
        forks.hpclm("train", *SMALL, *phases, f"out={tmp_path}/a", check=code)
    run = hpclm.train("debug", *SMALL[1:], *phases, out=tmp_path / "b")
    assert run.status == "done" and ends(tmp_path / "b") == ENDS and losses(tmp_path / "b") == losses(tmp_path / "a")
    assert f"{os.getpid()}" == f"{began(tmp_path / 'b')[-1]['pid']}"


def test_a_debug_run_goes_through_its_phases_or_does_without_them_where_the_data_are_missing(phases, tmp_path):
    said = forks.hpclm("submit", "--debug", *SMALL, *phases, f"out={tmp_path}/a", check=0).stderr
    assert ends(tmp_path / "a-debug") == [("phase", 4), ("stopped", 5)] and "no mistake found" in said
    forks.hpclm("submit", "--debug", *SMALL, *phases, "data.train=[missing]", f"out={tmp_path}/b", check=0)
    assert ends(tmp_path / "b-debug") == [("stopped", 5)]


@pytest.mark.slow
def test_a_sweep_trains_each_run_to_the_end(phases, tmp_path):
    done = forks.hpclm("train", "--sweep", "seed=1,2", *SMALL, *phases, f"out={tmp_path}/s", check=0)
    assert [ends(tmp_path / f"s-{seed}") for seed in ("seed-1", "seed-2")] == [ENDS, ENDS]
    assert done.stderr.count("exited, phase ") == 4 and done.stderr.count("done at step 12") == 2


@pytest.mark.slow
@pytest.mark.parametrize("where", ["local", pytest.param("mpirun", marks=pytest.mark.mpi)])
def test_submit_on_this_machine_trains_to_the_end_without_a_restart_of_torchruns(where, phases, tmp_path):
    restarts = ["job.restarts=1"] if where == "local" else []
    words = ["--cluster", where, "--gpus", "2", *SMALL, *phases, *restarts, f"out={tmp_path}/run"]
    forks.hpclm("submit", *words, check=0)
    assert ends(tmp_path / "run") == ENDS and not (tmp_path / "run/logs/errors").exists()
    assert [attempt.get("after") or "" for attempt in began(tmp_path / "run")] == [
        "",
        "phase 1 begins after step 4 (256 tokens) with model.context=32",
        "phase 2 begins after step 8 (768 tokens) with batch.global_size=8",
    ]


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.parametrize("template", ["srun", "torchrun", "mpirun"])
def test_a_job_goes_through_its_phases_in_one_allocation(template, phases, cluster, tmp_path):
    restarts = ["job.restarts=1"] if template == "torchrun" else []
    job = Job(cluster, tmp_path / "run", 2, 2, *phases, "batch.micro_size=1", f"job.template={template}", *restarts)
    job.finish()
    assert int(cluster.show(job.id)["Restarts"]) == 0 and ends(job.out) == ENDS
    assert job.log().count("the ranks are started again for the next phase, in the same job") == 2
    assert "why the last one ended" not in job.log()


@pytest.mark.slurm
@pytest.mark.slow
def test_a_preempted_job_goes_on_with_its_phases(phases, cluster, tmp_path):
    words = [*phases, "batch.micro_size=1", "budget.steps=60", "data.phases=[{from: 1280, model.context: 32}]"]
    job = Job(cluster, tmp_path / "run", 2, 1, *words)
    job.wait_for_step(5, 0)
    cluster.run(["scancel", "--signal=USR1", job.id])
    job.finish()
    assert int(cluster.show(job.id)["Restarts"]) == 1
    assert [state for state, _ in ends(job.out)] == ["exited", "phase", "done"]
    assert job.log().count("why the last one ended") == 1
