import fcntl
import os
import re
import subprocess
import sys
import time

import pytest

from hpclm.cluster import process


def written(offset=0):
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() + offset))


def test_a_process_began_when_it_was_started_and_is_gone_when_it_has_ended():
    child = subprocess.Popen([sys.executable, "-c", "input()", "hpclm"], stdin=subprocess.PIPE)
    assert abs(process.began(child.pid) - time.time()) < 5
    assert process.is_ours(child.pid, written())
    child.stdin.close()
    while process.began(child.pid):  # a zombie counts as gone
        time.sleep(0.01)
    assert child.returncode is None and not process.is_ours(child.pid, written())
    child.wait()


def test_a_number_that_went_to_another_process_is_not_ours():
    child = subprocess.Popen([sys.executable, "-c", "input()", "hpclm"], stdin=subprocess.PIPE)
    other = subprocess.Popen([sys.executable, "-c", "input()", "/x/hpclm/x"], stdin=subprocess.PIPE)
    try:
        assert not process.is_ours(child.pid, written(-3600)), "it is younger than the line that names it"
        assert not process.is_ours(other.pid, written()), "its command line is another program's"
    finally:
        child.communicate()
        other.communicate()


def test_who_holds_a_lock_is_seen_without_taking_it(tmp_path):
    path = tmp_path / "lock"
    assert process.holders(path) is None
    with path.open("w") as file:
        assert process.holders(path) == []
        fcntl.flock(file, fcntl.LOCK_EX)
        assert process.holders(path) == [os.getpid()]
    assert process.holders(path) == []


def test_waiting_for_a_process_has_an_end():
    assert not process.wait(os.getpid(), 0.1)
    child = subprocess.Popen(["true"])
    assert process.wait(child.pid, 10)
    child.wait()


@pytest.mark.parametrize("word", ["hpclm", "/x/.venv/bin/hpclm", "hpclm.train", "hpclm.job.elastic"])
def test_our_own_command_lines_are_known(word):
    assert re.fullmatch(process.OURS, word)


@pytest.mark.parametrize("word", ["/home/me/hpclm/notes.txt", "hpclm = 1", "/tmp/hpclm-slurm/etc", "my-hpclm"])
def test_a_folder_s_name_makes_no_process_ours(word):
    assert not re.fullmatch(process.OURS, word)
