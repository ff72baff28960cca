"""kill -9 of a launcher, of its child, or of both at any moment of the start: soon nothing of the launch runs any more.

None of it would end by itself: the runs are long, and ranks would wait for one another for hours.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import psutil
import pytest

from tests.launch.launched import job_log, left, start
from tests.runs import ROOT, free_port, until

SETTINGS = [
    *("budget.steps=100000000", "batch.global_size=12", "batch.micro_size=1", "log.sinks=[tests.sinks.own:Written]"),
    *("cluster.preflight=false", "cluster.start_seconds=100000", "cluster.hang_minutes=0"),
]
WITH_MPI = [pytest.mark.mpi, pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed")]
LAUNCHERS = ["local", "torchrun", pytest.param("mpirun", marks=WITH_MPI), pytest.param("plain mpirun", marks=WITH_MPI)]

BOTH = [("launcher",), ("child",), ("child", "launcher"), ("launcher", "child")]
VICTIMS = {"local": BOTH, "mpirun": BOTH, "torchrun": BOTH[:1], "plain mpirun": BOTH[:1]}
"""What is killed, in which order; torchrun and mpirun without hpclm around them have no child."""


@dataclass(frozen=True)
class Trial:
    """A launch, and which of its processes are killed when."""

    launcher: str
    ranks: int
    victims: tuple[str, ...]
    """launcher, or child: the process that it forks to start the ranks."""
    after: float = 0.0
    """Seconds after the start."""
    from_rank: bool = True
    """Of a rank, not of the launcher."""
    gap: float = 0.0
    """Seconds between two kills."""


def command(trial, words):
    """What starts the ranks."""
    python = [sys.executable, "-m"]
    if trial.launcher == "torchrun":
        port = f"--master-port={free_port()}"
        return [*python, "torch.distributed.run", f"--nproc-per-node={trial.ranks}", port, "-m", "hpclm.train", *words]
    if trial.launcher == "plain mpirun":
        root = ["--allow-run-as-root"] * (os.geteuid() == 0)
        return ["mpirun", *root, "--oversubscribe", "-n", str(trial.ranks), *python, "hpclm.train", *words]
    return [*python, "hpclm", "submit", *words, f"job.cluster={trial.launcher}", f"job.gpus={trial.ranks}"]


def ranks_of(out):
    """The ranks that run, and what they have started."""
    ranks = []
    for pid in left(out):
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            environment = process.environ()
            ranks += [process] if "LOCAL_RANK" in environment or "OMPI_COMM_WORLD_RANK" in environment else []
    return ranks


def victims_of(trial, launcher):
    """The processes to kill, in order; a child that has not been forked yet is none."""
    with suppress(psutil.Error):
        line = psutil.Process(launcher.pid).cmdline()
        children = [child for child in psutil.Process(launcher.pid).children() if child.cmdline() == line]
        pids = {"launcher": [psutil.Process(launcher.pid)], "child": children}
        return [process for name in trial.victims for process in pids[name]]
    return [launcher]


def seconds_left(trial, words, out):
    """How long anything of a launch runs after its victims were killed."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "HPCLM_SITE": ""}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
    launcher = subprocess.Popen(command(trial, words), cwd=ROOT, env=env, **quiet)
    if trial.from_rank:
        until(lambda: ranks_of(out), "the start of a rank", launcher)
    time.sleep(trial.after)
    victims = victims_of(trial, launcher)
    for number, process in enumerate(victims):
        time.sleep(trial.gap * bool(number))
        with suppress(psutil.NoSuchProcess):
            process.kill()
    if not victims:  # the child had not been forked yet
        launcher.kill()
    launcher.wait()
    began = time.monotonic()
    try:
        until(lambda: not left(out), f"the end of all processes of {trial}")
    finally:
        for pid in left(out):  # a test that fails leaves nothing running
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return time.monotonic() - began


def seconds_left_after(trials, tiny, tmp_path):
    """The same for all trials, two at a time."""

    def one(numbered):
        number, trial = numbered
        return seconds_left(trial, tiny(f"run-{number}", *SETTINGS), tmp_path / f"run-{number}")

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, enumerate(trials)))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_nothing_outlives_a_launcher_that_is_killed_while_its_ranks_start(launcher, tiny, tmp_path):
    both = VICTIMS[launcher][-1]
    seconds_left_after([Trial(launcher, 1, both), Trial(launcher, 2, both)], tiny, tmp_path)


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_nothing_outlives_a_launcher_that_is_killed_at_any_moment(launcher, tiny, tmp_path):
    draw, trials = random.Random(time.time_ns()), []
    for number in range(int(os.environ.get("TEST_KILLS", "50"))):
        victims, gap = draw.choice(VICTIMS[launcher]), draw.choice((0.0, 0.0, draw.uniform(0, 1)))
        trials.append(Trial(launcher, draw.choice((1, 2, 3)), victims, draw.uniform(0, 10), number % 2 == 0, gap))
    seconds = sorted(zip(seconds_left_after(trials, tiny, tmp_path), trials, strict=True), key=lambda pair: -pair[0])
    print(f"seconds until all of {len(trials)} launches by {launcher} had ended; the slowest: {seconds[0][1]}")
    print(" ".join(f"{each:.1f}" for each, _ in seconds))


def test_whatever_is_started_ends_with_the_launcher_and_the_log_says_so(tmp_path):
    """Ranks that never look after their launcher, and children of theirs in new sessions that ignore every signal."""
    process = start("local", tmp_path, "job.gpus=2", "child", "ready", "sleep")
    until(lambda: len(left(tmp_path)) == 8, what="the start of all children")
    process.kill()
    process.communicate()
    until(lambda: not left(tmp_path), "the end of all processes")
    until(lambda: "E the launcher was killed; its processes were ended too" in job_log(tmp_path), "the log")
