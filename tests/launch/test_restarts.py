"""Ranks that torchrun's agent starts again, inside the same launch."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.forks import Ranks, hpclm
from tests.runs import ROOT, lines, losses

WORDS = ["budget.steps=60", "checkpoint.every=5", "batch.micro_size=1", "cluster.preflight=false"]


def ranks_of(launcher):
    """The ranks of a launcher by their number."""
    found = {}
    for child in psutil.Process(launcher.pid).children():
        if "hpclm.train" in child.cmdline():
            found[int(child.environ()["RANK"])] = child.pid
    return found


def test_a_killed_rank_is_started_again_and_the_run_learns_the_same(tiny, tmp_path):
    words, out = tiny("run", *WORDS), tmp_path / "run"
    command = [sys.executable, "-m", "hpclm", "submit", *words, "job.cluster=local", "job.gpus=2", "job.restarts=1"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HPCLM_SITE": ""}
    launcher = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + 120
        while not any('"step": 8,' in line for line in lines(out / "metrics.jsonl")):
            assert time.monotonic() < until and launcher.poll() is None
            time.sleep(0.02)
        doomed = ranks_of(launcher)[1]
        os.kill(doomed, signal.SIGKILL)
        _, said = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, said
    attempts = [json.loads(line) for line in lines(out / "attempts.jsonl")]
    assert len(attempts) == 2 and attempts[1]["from_step"] >= 5
    text = (out / "log.txt").read_text()
    assert f"(pid {doomed}) was killed" in text and "done at step 60" in text
    with Ranks(2, [out / "config.yaml", f"out={tmp_path / 'whole'}"]) as ranks:
        assert {code for code, _ in ranks.wait().values()} == {0}
    assert losses(out) == losses(tmp_path / "whole")


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
