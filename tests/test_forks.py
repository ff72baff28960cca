"""A command in a fork (tests/forks.py) looks and behaves like one in a new process."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests import forks, runs
from tests.forks import Hpclm, hpclm


def files_of(out):
    """The paths in a run directory; a file of TensorBoard's is named by its time and process, which differ."""
    return {re.sub(r"tfevents\..*", "tfevents", str(path.relative_to(out))) for path in out.rglob("*")}


@pytest.mark.parametrize(
    "words, code", [(["--version"], 0), (["trian"], 2), (["train", "--nope"], 2), (["status", "nowhere"], 64)]
)
def test_a_command_says_and_returns_the_same(words, code):
    fork, real = (run(*words, check=code) for run in (hpclm, runs.hpclm))
    assert (fork.stdout, fork.stderr) == (real.stdout, real.stderr)


def test_a_run_gives_the_same_losses_and_files(tiny, tmp_path):
    hpclm("train", *tiny("fork"), check=0)
    runs.hpclm("train", *tiny("real"), check=0, env=os.environ | {"OMP_NUM_THREADS": "1"})
    fork, real = tmp_path / "fork", tmp_path / "real"
    assert runs.losses(fork) == runs.losses(real)
    assert files_of(fork) == files_of(real)
    weights = "checkpoints/step-00000012/rank-00000.safetensors"
    assert (fork / weights).read_bytes() == (real / weights).read_bytes()


def test_it_has_a_command_line_and_hears_signals_and_nothing_of_it_lives_on(tiny, tmp_path):
    words = tiny("run", "budget.steps=100000", "checkpoint.every=0")
    process = Hpclm("train", *words)
    forks.steps(process, tmp_path / "run", 1)
    shown = Path(f"/proc/{process.pid}/cmdline").read_text().rstrip("\0").split("\0")
    assert shown[1:] == ["-m", "hpclm", "train", *words]
    process.send_signal(signal.SIGHUP)  # which nohup makes a test ignore
    assert process.wait() == 85
    process = Hpclm("train", *words)
    forks.steps(process, tmp_path / "run", 2)
    pid = process.pid
    del process
    runs.until(lambda: not Path(f"/proc/{pid}").exists())
