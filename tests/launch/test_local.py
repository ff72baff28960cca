"""The launcher on this machine, with small programs in the place of training processes."""

import os
import pty
import random
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path

import pytest

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.launch import local
from hpclm.node import gpus
from tests.events import of_kind
from tests.launch import launched
from tests.launch.launched import job_log, left, ready, save, signals, warned
from tests.runs import PATIENCE, ROOT, shown_on, until


def start(out, count, *acts, **more):
    return launched.start("local", out, f"job.gpus={count}", *acts, **more)


def run(out, count, *acts):
    return launched.launched("local", out, f"job.gpus={count}", *acts)


def test_every_rank_learns_who_it_is_and_process_count_threads_are_its_own(tmp_path):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HPCLM_LAUNCHER", "OMP_NUM_THREADS", "MASTER_ADDR")
    code, told, errors = run(tmp_path, 2, *(f"env={name}" for name in names))
    assert code == 0, errors
    shown = {line.split()[2] for line in told.splitlines()}
    threads = os.environ.get("OMP_NUM_THREADS") or max(1, len(os.sched_getaffinity(0)) // 2)
    assert shown == {
        *("RANK=0", "RANK=1", "LOCAL_RANK=0", "LOCAL_RANK=1"),
        *("WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2", "HPCLM_LAUNCHER=local"),
        *(f"OMP_NUM_THREADS={threads}", "MASTER_ADDR=127.0.0.1"),
    }


def test_more_processes_than_gpus_are_refused_and_a_cpu_takes_as_many_as_are_asked_for():
    settings = config.load(None, ["job.nodes=2", "job.gpus=4"])
    with pytest.raises(ConfigError, match=r"job.nodes=2 x job.gpus=4 = 8 processes, but this machine has 2 GPUs"):
        local.process_count(settings, 2)
    assert local.process_count(settings, 8) == 8 and local.process_count(settings, 0) == 8
    assert "no GPU here: job.nodes=2 x job.gpus=4 = 8 processes" in local.placement(settings, 8, 0, 2)
    assert "2 CPU cores, 1 for each" in local.placement(settings, 8, 0, 2)
    assert "8 of 16 GPUs stay idle" in local.placement(settings, 8, 16, 2)
    forced = config.load(None, ["job.gpus=4", "engine.device=cpu"])
    assert "engine.device=cpu: " in local.placement(forced, 4, 0, 8)


def test_gpus_are_only_asked_for_where_a_device_file_is(tmp_path):
    assert gpus.count({}, tmp_path) == 0
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert gpus.count(dict(os.environ, CUDA_VISIBLE_DEVICES=""), tmp_path) == 0  # PyTorch was asked


def test_what_ranks_print_is_shown_and_logged(tmp_path):
    code, told, errors = run(tmp_path, 3, "print=0:from zero", "error=0:zero's error", "print=2:from two", "exit=2:7")
    assert code == 7 and sorted(told.splitlines()) == ["from two", "from zero"] and "zero's error\n" in errors
    log = job_log(tmp_path)
    assert "from zero" in log and "zero's error" in log and "3 processes of this machine" in log
    [job] = of_kind(tmp_path, "submitted")
    assert (job["cluster"], job["nodes"], job["tasks_per_node"], job["folder"]) == ("local", 1, 3, str(ROOT))
    assert job["log"] == str(tmp_path / f"logs/job-local-{job['job_id']}.log")
    [end] = of_kind(tmp_path, "ended")
    assert end["code"] == 7
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path):
    process = start(tmp_path, 1, "ready", "sleep=1", "print=late", "error=later")
    ready(tmp_path, 1)
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=PATIENCE) == 0
    log = job_log(tmp_path)  # two pipes' lines may come in either order, and their ends after both
    assert log.count("late") == 2 and "later" in log


def test_a_terminal_stays_one_for_the_first_rank(tmp_path):
    code = (
        "import sys, time\n"
        "from tqdm import tqdm\n"
        "assert sys.stderr.isatty() and sys.stdout.isatty()\n"
        "for i in tqdm(range(20), file=sys.stderr, mininterval=0, ncols=70):\n"
        "    if i == 9: tqdm.write('a line', file=sys.stderr)\n"
    )
    (tmp_path / "progress.py").write_text(code)
    launcher = (
        "import sys\nfrom hpclm import config\nfrom hpclm.launch import local\nfrom hpclm.launch.foreground import Launch\n"
        "run = config.load(None, ['out=' + sys.argv[2]])\n"
        "sys.exit(local.run(Launch(run, instead=[sys.executable, sys.argv[1]])))\n"
    )
    mine, theirs = pty.openpty()
    ioctl(mine, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    words = [sys.executable, "-c", launcher, str(tmp_path / "progress.py"), str(tmp_path)]
    process = subprocess.Popen(words, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = shown_on(mine)
    assert process.wait(timeout=PATIENCE) == 0
    assert shown.count(b"\r") > 20 and b"a line\r\n" in shown and b"20/20" in shown


@pytest.mark.parametrize(
    "acts, code, told",
    [
        (["exit=0"], 0, ""),
        (["exit=1:85"], 85, ""),
        pytest.param(["exit=85"], 85, "", marks=pytest.mark.whole),
        pytest.param(["exit=2:93", "obey"], 93, "", marks=pytest.mark.whole),
        (["kill=1:9", "obey"], 137, "was killed by SIGKILL; perhaps out of memory"),
        pytest.param(
            ["kill=1:11", "obey"], 139, "was killed by SIGSEGV: a crash inside a library", marks=pytest.mark.whole
        ),
        (["sleep=0:0.5", "exit=0:1", "obey"], 1, ""),
        (["exit=64"], 64, ""),
    ],
)
def test_the_exit_code_is_the_first_failing_ranks(tmp_path, acts, code, told):
    found, _, errors = run(tmp_path, 4, *acts)
    assert found == code and told in errors, errors
    assert told in job_log(tmp_path) and not left(tmp_path)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGINT,
        pytest.param(signal.SIGUSR1, marks=pytest.mark.whole),
        signal.SIGUSR2,
        signal.SIGHUP,
    ],
)
def test_a_warning_reaches_every_rank_once_and_all_may_save(tmp_path, number):
    process = start(tmp_path, 3, "ready", "children", "warned")
    ready(tmp_path, 3)
    for _ in range(1 if number == signal.SIGINT else 3):
        process.send_signal(number)
        time.sleep(0.1)
    warned(tmp_path, 3)
    save(tmp_path)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 85 and not left(tmp_path)
    name = "SIGTERM" if number == signal.SIGHUP else signal.Signals(number).name
    for rank in range(3):  # torchrun sends SIGTERM to those that take longer than the first
        received = (tmp_path / f"signals-{rank}").read_text().split()
        assert received[0] == name and received[1:] in ([], ["SIGTERM"])


def imports_torch(pid):
    with suppress(FileNotFoundError):
        return b"libtorch" in Path(f"/proc/{pid}/maps").read_bytes()
    return False


def test_ctrl_c_before_any_rank_has_started_ends_the_launcher_without_a_traceback(tmp_path):
    process = start(tmp_path, 2, "obey")
    told = next(line for line in process.stderr if "2 processes of this machine" in line)
    until(lambda: any(map(imports_torch, left(tmp_path))), "the import of PyTorch", process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 85 and "SIGINT during the start: nothing to save" in errors, told + errors
    assert "Traceback" not in errors and not left(tmp_path)


def test_ctrl_c_on_a_terminal_reaches_the_ranks_once_and_a_second_ends_them(tmp_path):
    mine, theirs = pty.openpty()
    words = launched.words("local", tmp_path, "job.gpus=3", "ready", "children", "warned")
    code = "import os, fcntl, termios, sys; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    ready(tmp_path, 3)
    os.write(mine, b"\x03")
    warned(tmp_path, 3)
    process.send_signal(signal.SIGUSR1)  # which comes after whatever else the Ctrl-C sends
    until(lambda: all("SIGUSR1" in received for received in signals(tmp_path, 3)), "the next signal", process)
    assert signals(tmp_path, 3) == [["SIGINT", "SIGUSR1"]] * 3
    os.write(mine, b"\x03")
    assert process.wait(timeout=PATIENCE) == 130 and not left(tmp_path)
    os.close(mine)


def test_a_killed_rank_ends_all_with_their_children(tmp_path):
    """The children are in the background, in new sessions and daemons with no trace of their origin, and ignore
    every signal they can."""
    process = start(tmp_path, 3, "children", "ready", "obey")
    ranks = ready(tmp_path, 3)
    until(lambda: len(left(tmp_path)) == 16, what="the start of all children")  # 2 launchers, 2 tee, 3 + 3 x 3
    os.kill(random.Random(time.time_ns()).choice(ranks), signal.SIGKILL)
    until(lambda: not left(tmp_path), "the end of all processes")
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 137, errors


def test_what_ranks_leave_running_is_ended_with_them(tmp_path):
    code, _, _ = run(tmp_path, 2, "children", "exit=0")
    assert code == 0 and not left(tmp_path)
