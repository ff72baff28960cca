"""What a process does in its first second: it catches warnings, and finds out that it has no folder or may start no thread."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.runs import PATIENCE, ROOT, until

TRAIN = [sys.executable, "-m", "hpclm.train"]
HPCLM = [sys.executable, "-m", "hpclm"]
LOCAL = ["job.cluster=local", "job.gpus=2", "cluster.preflight=false"]


def catches(pid, number):
    """Whether a process has a handler for a signal."""
    with open(f"/proc/{pid}/status") as file:
        caught = next(line for line in file if line.startswith("SigCgt:"))
    return int(caught.split()[1], 16) >> (number - 1) & 1


# what Python imports by itself, before anything else: PyTorch is not imported before a file says so
DOOR = """
import os, sys, time

class Door:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            open(os.environ["TEST_DOOR"] + f"/{os.getpid()}", "w").close()
            while not os.path.exists(os.environ["TEST_DOOR"] + "/open"):
                time.sleep(0.01)

sys.meta_path.insert(0, Door())
"""


def warned(words, number, after, folder):
    """Exit code and output of a process that is signalled before it imports PyTorch, or ``after`` seconds from then."""
    door = folder / "door"
    door.mkdir()
    (door / "sitecustomize.py").write_text(DOOR)
    env = os.environ | {"TEST_DOOR": str(door), "PYTHONPATH": f"{door}:{ROOT}"}
    process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until(
        lambda: list(door.glob("[0-9]*")), "the import of PyTorch", process
    )  # by it, or by the launcher that it watches
    assert catches(process.pid, number)
    if after:
        (door / "open").touch()
        time.sleep(after)
    process.send_signal(number)
    (door / "open").touch()
    output, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, output


WARNINGS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]


@pytest.mark.parametrize("number", WARNINGS)
def test_a_warning_is_caught_from_the_first_line_on(number, tiny, tmp_path):
    code, output = warned([*TRAIN, *tiny("run", "budget.steps=1000000")], number, 0, tmp_path)
    assert code == 85 and "during the start: nothing to save, exiting" in output, output


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 0.05, 0.1, 0.2, 0.5, 1, 2, 4])
@pytest.mark.parametrize("number", WARNINGS)
@pytest.mark.parametrize("words", [[*TRAIN], [*HPCLM, "train"], [*HPCLM, "submit"]], ids=["rank", "train", "submit"])
def test_a_warning_at_any_moment_of_the_start_is_an_85(words, number, after, tiny, tmp_path):
    more = LOCAL if words[-1] == "submit" else []
    code, output = warned(
        [*words, *tiny("run", "budget.steps=1000000", "batch.micro_size=1", *more)], number, after, tmp_path
    )
    assert code == 85 and "Traceback" not in output, output


def test_a_launch_here_ends_with_85_when_its_ranks_have_hardly_started(tiny, tmp_path):
    code, output = warned([*HPCLM, "submit", *tiny("run", *LOCAL)], signal.SIGUSR1, 0, tmp_path)
    assert code == 85 and "Traceback" not in output, output


@pytest.mark.parametrize("words", [["status"], ["train", "debug"], ["config", "debug"], ["submit", "debug"]])
def test_a_current_folder_that_was_deleted_is_one_message(words, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    code = (
        f"import os, runpy, sys; os.rmdir({str(gone)!r}); sys.path.insert(0, {str(ROOT)!r}); sys.argv[1:] = {words!r}; "
    )
    code += "runpy.run_module('hpclm', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=gone, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 64 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("error: the current folder cannot be read: No such file or directory; change")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize("act", ["threading.Thread(target=print).start()", "subprocess.run(['true'])"])
def test_a_user_who_may_start_no_process_is_told_so(act):
    code = (
        "import os, resource, subprocess, threading\nfrom hpclm.node import failures\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))\n"
        "os.setgid(65534)\nos.setuid(65534)\n"  # root is exempt
        f"raise SystemExit(failures.run(lambda _: {act}, []))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert "allows no more processes or threads for this user; raise the limit (ulimit -u)" in done.stderr, done.stderr
    assert done.returncode == 1 and "Traceback" not in done.stderr
