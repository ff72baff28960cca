"""Ranks that torchrun starts again, inside the same launch."""

import os
import signal
from types import SimpleNamespace

import psutil
import pytest

from hpclm.launch import torchrun
from hpclm.node import ends
from hpclm.node.ends import End
from tests.events import began
from tests.forks import Hpclm, Ranks, hpclm
from tests.runs import has_step, losses, until

WORDS = ["budget.steps=60", "checkpoint.every=5", "batch.micro_size=1", "cluster.preflight=false"]


def ranks_of(launcher):
    """The ranks of a launcher by their number."""
    found = {}
    for child in psutil.Process(launcher.pid).children(recursive=True):
        if "hpclm.train" in child.cmdline():
            found[int(child.environ()["RANK"])] = child.pid
    return found


@pytest.fixture
def launch(tiny, tmp_path):
    """`hpclm submit` of two ranks here with one restart, until a checkpoint is there; ended after the test."""
    words = [*tiny("run", *WORDS), "job.cluster=local", "job.gpus=2", "job.restarts=1"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HPCLM_SITE": ""}
    with Hpclm("submit", *words, env=env) as launcher:
        until(lambda: has_step(tmp_path / "run", 8), "step 8", launcher)
        yield launcher


def test_a_killed_rank_is_started_again_and_the_run_learns_the_same(launch, tmp_path):
    out, doomed = tmp_path / "run", ranks_of(launch)[1]
    os.kill(doomed, signal.SIGKILL)
    _, said = launch.communicate()
    assert launch.returncode == 0, said
    attempts = began(out)
    assert len(attempts) == 2 and attempts[1]["from_step"] >= 5
    text = (out / "log.txt").read_text()
    assert f"(pid {doomed}) left no message: killed" in text and "done at step 60" in text
    assert (
        attempts[1]["after"].startswith("restart 1 of 1: rank 1 on ")
        and "left no message: killed" in attempts[1]["after"]
    )
    with Ranks(2, [out / "config.yaml", f"out={tmp_path / 'whole'}"]) as ranks:
        assert {code for code, _ in ranks.wait().values()} == {0}
    assert losses(out) == losses(tmp_path / "whole")


def test_ranks_that_end_on_purpose_are_not_started_again(launch, tmp_path):
    launch.terminate()
    _, said = launch.communicate()
    assert launch.returncode == 85, said
    assert len(began(tmp_path / "run")) == 1


@pytest.mark.parametrize(
    "codes, left, received, code",
    [
        ([85, 85], {0: False, 1: False}, [], 85),
        ([85, -9], {0: False}, [], 85),  # a hung rank was killed
        ([-9, 85], {}, [], 137),  # out of memory at the start; torchrun ended the other
        ([-9, 1], {1: True}, [], 137),
        ([-11, -9], {}, [], 139),
        ([-6, 1], {1: False}, [], 1),  # a library aborts because a peer is gone
        ([3, 85], {}, [], 3),
        ([-12, 85], {1: False}, [12], 85),  # warned before it could catch the signal
        ([-12, -12], {}, [12], 85),
        ([-15], {}, [], 143),
    ],
)
def test_the_exit_code_is_the_cause(codes, left, received, code, tmp_path):
    """``left``: the ranks that have left a file, and whether they only lost a connection."""
    for rank, symptom in left.items():
        ends.leave(tmp_path, End(rank, codes[rank], "why", 1.0, symptom))
    failures = {rank: SimpleNamespace(exitcode=number, pid=7, timestamp=9) for rank, number in enumerate(codes)}
    assert torchrun.exit_code(torchrun.first_failures(failures), tmp_path, received) == code


@pytest.mark.parametrize(
    "words, message",
    [
        (["job.cluster=slurm"], "job.restarts=1 needs job.template=torchrun, not srun"),
        (["job.cluster=mpirun"], "mpirun cannot restart ranks"),
    ],
)
def test_restarts_are_refused_where_nothing_would_start_the_ranks_again(words, message, tiny):
    done = hpclm("submit", *tiny("run"), "job.restarts=1", *words, "--dry-run", check=64)
    assert message in done.stderr
