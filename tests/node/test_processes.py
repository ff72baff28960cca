import os
import re
import subprocess
import sys
import time

import pytest

from hpclm.node import processes
from tests.runs import PATIENCE, until


def written(offset=0):
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() + offset))


def waiting(word):
    """A process with ``word`` in its command line, which the kernel shows only once the program runs."""
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()", word], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    return child


def test_the_start_of_a_process_is_known_and_a_zombie_counts_as_exited():
    before = time.time()
    child = waiting("hpclm")
    # the kernel says in whole seconds when it started itself
    assert before - 1.1 <= processes.started(child.pid) <= time.time() + 1.1
    assert processes.is_ours(child.pid, written())
    child.stdin.close()
    until(lambda: not processes.started(child.pid), "the end of the process")  # a zombie counts as gone
    assert child.returncode is None and not processes.is_ours(child.pid, written())
    child.stdout.close()
    child.wait()


def test_a_reused_pid_is_not_ours():
    child, other = waiting("hpclm"), waiting("/x/hpclm/x")
    try:
        assert not processes.is_ours(child.pid, written(-3600)), "it is younger than the line that names it"
        assert not processes.is_ours(other.pid, written()), "its command line is another program's"
    finally:
        child.communicate()
        other.communicate()


def test_the_process_that_has_a_file_open_is_known(tmp_path):
    path = tmp_path / "lock"
    with path.open("w"):
        assert processes.has_open(os.getpid(), path)
    assert not processes.has_open(os.getpid(), path)


def test_waiting_for_a_process_times_out():
    assert not processes.wait(os.getpid(), 0.1)
    child = subprocess.Popen(["true"])
    assert processes.wait(child.pid, PATIENCE)
    child.wait()


@pytest.mark.parametrize("word", ["hpclm", "/x/.venv/bin/hpclm", "hpclm.train", "hpclm.launch.torchrun"])
def test_our_command_lines_are_recognised(word):
    assert re.fullmatch(processes.OURS, word)


@pytest.mark.parametrize("word", ["/home/me/hpclm/notes.txt", "hpclm = 1", "/tmp/hpclm-slurm/etc", "my-hpclm"])
def test_the_name_of_a_folder_makes_no_process_ours(word):
    assert not re.fullmatch(processes.OURS, word)
