"""kill -9 of a launcher at any moment of its start: soon, nothing of it runs any more, though none of it would end by itself."""

import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.launch.launched import job_log, left, start
from tests.runs import ROOT, until

WITH_MPI = pytest.param(
    "mpirun", marks=[pytest.mark.mpi, pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed")]
)


def seconds_left(words, out, after, from_rank):
    """How long anything runs after a launcher was killed ``after`` seconds from its start, or from a rank's."""
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if from_rank:
        until(lambda: len(left(out)) > 4, "the start of a rank")
    time.sleep(after)
    process.kill()
    process.wait()
    began = time.monotonic()
    until(lambda: not left(out), f"the end of all processes, {after:.2f} s after {'a rank' if from_rank else 'it'}")
    return time.monotonic() - began


def kills(tiny, tmp_path, launcher, moments):
    """The same for each of ``moments``, two at a time; each a launch of two ranks that would train for days."""

    def one(numbered):
        number, (after, from_rank) = numbered
        words = tiny(
            f"run-{number}", "budget.steps=100000000", "batch.micro_size=1", "log.sinks=[tests.sinks.own:Written]"
        )
        words += [f"job.cluster={launcher}", "job.gpus=2", "cluster.preflight=false"]
        command = [sys.executable, "-m", "hpclm", "submit", *words]
        return seconds_left(command, tmp_path / f"run-{number}", after, from_rank)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, enumerate(moments)))


@pytest.mark.parametrize("launcher", ["local", WITH_MPI])
def test_nothing_outlives_a_launcher_that_is_killed_while_its_ranks_start(launcher, tiny, tmp_path):
    kills(tiny, tmp_path, launcher, [(0.2, True), (1.5, True)])


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", WITH_MPI])
def test_nothing_outlives_a_launcher_that_is_killed_at_any_moment(launcher, tiny, tmp_path):
    draw = random.Random(time.time_ns())
    moments = [(draw.uniform(0, 10), number % 2 == 0) for number in range(100)]
    found = kills(tiny, tmp_path, launcher, moments)
    print("seconds until all had ended:", " ".join(f"{each:.1f}" for each in sorted(found)))


def test_whatever_is_started_ends_with_the_launcher_and_the_log_says_so(tmp_path):
    """Ranks that never look after their launcher, and children of theirs in new sessions that ignore every signal."""
    process = start("local", tmp_path, "job.gpus=2", "child", "ready", "sleep")
    until(lambda: len(left(tmp_path)) == 8, what="the start of all children")
    process.kill()
    process.communicate()
    until(lambda: not left(tmp_path), "the end of all processes")
    until(lambda: "E the launcher was killed; what it had started has ended too" in job_log(tmp_path), "the log")
