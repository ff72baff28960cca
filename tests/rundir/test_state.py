"""The status of a run, in words: from its files, from what its scheduler says, and from the processes of this host."""

import os
import time

import pytest

from hpclm.node.job import Job
from hpclm.rundir import runs
from hpclm.rundir.lease import Lease
from hpclm.rundir.state import job_words, span, state_of
from tests.checkpoint import state
from tests.events import note
from tests.rundir.test_runs import make
from tests.test_status import attempt, rows


def job(name, **more):
    return Job(
        **{
            **dict(id="7", name=name, elapsed="1:00", left="2:00", start="N/A", nodes=1, nodelist="n1", reason="None"),
            **more,
        }
    )


def of(out, *jobs):
    return state_of(runs.read_run(out), {each.id: each for each in jobs})


def row(age=0.0, **more):
    return {**rows(5)[-1], "time": time.time() - age, **more}


@pytest.mark.parametrize(
    "seconds, text",
    [
        *((0, "0 s"), (119, "119 s"), (120, "2 min"), (3599, "59 min"), (3600, "1 h 00 min"), (7500, "2 h 05 min")),
        *((172799, "47 h 59 min"), (172800, "2 d 0 h"), (3 * 86400 + 4 * 3600, "3 d 4 h")),
    ],
)
def test_a_time_is_told_in_its_two_largest_units(seconds, text):
    assert span(seconds) == text


@pytest.mark.parametrize(
    "state, text",
    [
        (job("PENDING", reason="Priority"), "job 7 PENDING (Priority)"),
        (
            job("PENDING", reason="Resources", start="2026-01-01T00:00:00"),
            "job 7 PENDING (Resources), expected to start 2026-01-01T00:00:00",
        ),
        (job("RUNNING"), "job 7 RUNNING for 1:00 on n1, 2:00 left"),
        (job("RUNNING", left="UNLIMITED"), "job 7 RUNNING for 1:00 on n1"),
        (job("RUNNING", left="364-23:59:00"), "job 7 RUNNING for 1:00 on n1"),
        (job("FAILED"), "job 7 FAILED"),
    ],
)
def test_a_job_is_told_in_a_line(state, text):
    assert job_words(state) == text


def test_a_run_is_where_its_process_is_or_where_its_files_say(tmp_path):
    out = make(tmp_path / "a", [attempt()], rows(5))
    with Lease(out):
        assert (of(out).name, of(out).where()) == ("running", f"process {os.getpid()} on this host")
        assert of(out).left == 15 * 2.0
    assert (of(out).where(), of(out).left) == ("", None)
    far = make(tmp_path / "b", [attempt()], rows(5), lock='{"host": "elsewhere", "pid": 12, "job": "7"}')
    assert (of(far).name, of(far).where()) == ("unknown", "job 7, process 12 on elsewhere, according to its files")


def test_an_attempt_that_is_older_than_its_job_has_not_started_in_it(tmp_path):
    out = make(tmp_path, [attempt(job_id="7", time="2026-01-01T12:00:00")], rows(5))
    assert of(out, job("RUNNING", start="2026-01-01T11:59:00")).name == "running"
    assert of(out, job("RUNNING", start="2026-01-01T12:00:02")).name == "running"  # clocks of two machines
    assert of(out, job("RUNNING", start="2026-01-01T12:00:03")).name == "starting"
    assert of(out, job("COMPLETING", start="2026-01-01T11:59:00")).name == "completing"
    assert of(out, job("PENDING")).name == "waiting"


@pytest.mark.parametrize("reason, told", [("None", ""), ("NonZeroExitCode", ""), ("TimeLimit", " (TimeLimit)")])
def test_a_run_that_could_not_say_how_it_ended_has_the_end_of_its_job(reason, told, tmp_path):
    out = make(tmp_path, [attempt(job_id="7")], rows(5))
    found = of(out, job("TIMEOUT", reason=reason))
    assert (found.name, found.ending) == (
        "ended",
        f"ended without a message: killed, or its node failed; job 7 TIMEOUT{told}",
    )


@pytest.mark.parametrize(
    "age, seconds, warns", [(60, 2.0, False), (180, 2.0, True), (300, 30.0, False), (3600, 30.0, True)]
)
def test_a_run_that_trains_without_a_step_for_two_minutes_and_twenty_steps_is_warned_of(age, seconds, warns, tmp_path):
    out = make(tmp_path / "a", [attempt()], [row(age, step_seconds=seconds)])
    with Lease(out):
        found = [*of(out).warnings()]
    told = f"no step for {span(age)}, and a step takes {seconds:.2f} s: hpclm logs {out}"
    assert found == [told] * warns


def test_what_the_user_should_look_at_is_told_with_its_numbers(tmp_path):
    slow = [{"rank": rank, "host": f"n{rank}", "times": 1.5} for rank in range(10)]
    out = make(tmp_path / "a", [attempt()], [row(spiking_since=4)])
    note(out, "slow", ranks=slow)
    spike = "loss spike since step 4"
    with Lease(out):
        first = ", ".join(f"rank {rank} on n{rank} (1.5x the median)" for rank in range(8))
        assert [*of(out).warnings()] == [f"slower than the others: {first} and 2 more", spike]
    made = state.saved(out / "checkpoints", [2, 3, 4])
    (made.folder / "step-00000004").rename(made.folder / ".bad-step-00000004")
    bad = f"1 bad checkpoint set aside in {out}/checkpoints"
    assert [*of(out).warnings()] == [f"{spike}: hpclm checkpoints {out}", bad]
    (made.folder / "step-00000003").rename(made.folder / ".bad-step-00000003")
    assert [*of(out).warnings()][1] == bad.replace("1 bad checkpoint", "2 bad checkpoints")


@pytest.mark.parametrize(
    "ended, asked",
    [
        (("done", "done at step 5", 0), ""),
        (("failed", "x is wrong", 1), "no answer"),
        (("stopped", "stopped at step 5", 0), "no answer"),
    ],
)
def test_a_scheduler_that_does_not_answer_matters_to_no_run_that_is_done(ended, asked, tmp_path):
    found = state_of(runs.read_run(make(tmp_path, [attempt(job_id="7")], rows(5), ended)), None, "no answer")
    assert (found.name, found.asked) == (ended[0], asked)


@pytest.mark.parametrize(
    "cluster, is_job", [("slurm", True), ("my.mod:Pbs", True), ("local", False), ("mpirun", False)]
)
def test_a_launch_in_the_foreground_is_no_job(cluster, is_job):
    assert runs.is_job({"cluster": cluster}) == is_job
