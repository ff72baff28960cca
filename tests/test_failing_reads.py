"""A file that exists and cannot be read because its disk fails is named, and never called wrong, missing or empty."""

import errno
import os
import subprocess
import sys

import pytest

from tests import traced
from tests.reporting import made
from tests.runs import ROOT

COMMANDS = {
    "run/config.yaml": ["config", "run"],
    "run/events.jsonl": ["report", "run", "--no-png", "-o", "page.html"],
    "run/metrics.jsonl": ["report", "run", "--no-png", "-o", "page.html"],
    "run/checkpoints": ["checkpoints", "run", "--no-verify"],
    "run/checkpoints/step-00000001/MANIFEST.json": ["checkpoints", "run", "--no-verify"],
    "runs": ["status"],
    "settings.yaml": ["config", "settings.yaml"],
    "data.idx": ["data", "inspect", "data"],
    "hosts": ["submit", "small", "data.source=synthetic", "--hostfile", "hosts"],
}


@pytest.fixture
def here(tmp_path):
    out = made.preempted(tmp_path / "run")
    (out / "checkpoints/step-00000001").mkdir(parents=True, mode=0o700)
    (out / "checkpoints").chmod(0o700)
    (out / "checkpoints/step-00000001/MANIFEST.json").write_text("{}")
    (tmp_path / "runs").mkdir()
    for name in ("settings.yaml", "data.json", "data.idx", "data.bin", "hosts"):
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.mark.skipif(not traced.usable(), reason="strace is not installed, or may not trace here")
@pytest.mark.parametrize(
    "name, error",
    [
        pytest.param(name, error, marks=[pytest.mark.whole] if error == "EIO" else [])
        for name in COMMANDS
        for error in ("ESTALE", "EIO")
    ],
)
def test_a_failing_disk_is_said_with_the_file_and_ends_with_1(name, error, here):
    fault = f"inject=openat,newfstatat,read,pread64,getdents64:error={error}"
    strace = ["strace", "-f", "-qq", "-o", os.devnull, "-P", str(here / name), "-P", name, "-e", fault]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [*strace, sys.executable, "-m", "hpclm", *COMMANDS[name]]
    done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert name in done.stderr and os.strerror(getattr(errno, error)) in done.stderr, done.stderr
    assert "move it away" not in done.stderr and "does not exist" not in done.stderr
