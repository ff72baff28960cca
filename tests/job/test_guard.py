"""The guard around one rank: whose end a kill was."""

import json
import os
import signal
import subprocess
import sys

import pytest

from hpclm.job import guard
from tests.job.launched import until
from tests.runs import ROOT


@pytest.mark.parametrize("launcher", [False, True], ids=["the rank alone", "by its launcher"])
def test_a_kill_by_the_launcher_is_not_the_ranks_own_end(tmp_path, launcher):
    program = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(100)"
    command = [sys.executable, "-m", "hpclm.job.guard", str(tmp_path / "ends"), sys.executable, "-c", program]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMPI_COMM_WORLD_RANK": "1"}
    (tmp_path / "ends").mkdir()
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
    pid = tmp_path / "pid"
    until(lambda: pid.exists() and pid.read_text(), 20, "the rank")
    os.kill(int(pid.read_text()), signal.SIGKILL)
    if launcher:
        process.kill()
    process.wait()
    found = tmp_path / "ends" / "rank-00001.json"
    until(found.exists, 20, "word of its end")
    assert json.loads(found.read_text())["itself"] is not launcher


def test_who_was_killed_by_itself_comes_before_who_gave_up_and_both_before_who_was_ended(tmp_path):
    for rank, code, itself in [(0, -9, False), (1, 93, True), (2, -9, True), (3, 1, True)]:
        row = {"rank": rank, "host": "a", "time": 10.0 - rank, "pid": 7, "code": code, "itself": itself}
        (tmp_path / f"rank-{rank:05d}.json").write_text(json.dumps(row))
    assert list(guard.ends(tmp_path)) == [2, 3, 1, 0]
