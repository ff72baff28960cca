"""Processes of this machine: find and end them, and check that a PID still belongs to the recorded process.

Also run programs that may be missing, hang or fail, each with a time limit.
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from hpclm.base.errors import HpclmError
from hpclm.node.parent import signal_at_death_of_parent

OURS = r"(.*/)?hpclm([.][a-z_.]+)?"  # the argument that marks hpclm's command lines: hpclm, its path, or the module after -m
TOLERANCE = 60  # seconds: a process may seem this much younger than its record, because clocks are adjusted
PR_SET_CHILD_SUBREAPER = 36
Env = Mapping[str, str]


def started(pid: int) -> float | None:
    """When a process started, in seconds since 1970; None if it does not exist or is a zombie."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return float(process.create_time())
    return None


def is_ours(pid: int, recorded: str) -> bool:
    """Whether ``pid`` still belongs to the process of hpclm that was recorded at the time ``recorded`` (``time.strftime`` with %z).

    Another process with the same PID would be younger, or have another command line.
    """
    start = started(pid)
    if start is None:
        return False
    with suppress(ValueError):
        if start > datetime.strptime(recorded, "%Y-%m-%dT%H:%M:%S%z").timestamp() + TOLERANCE:
            return False
    with suppress(psutil.Error):
        return any(re.fullmatch(OURS, word) for word in psutil.Process(pid).cmdline())
    return False


def has_open(pid: int, path: Path) -> bool:
    """Whether a process on this machine has a file open."""
    with suppress(psutil.Error, OSError):
        return any(Path(file.path) == path for file in psutil.Process(pid).open_files())
    return False


def send_signal(pid: int, number: int = signal.SIGTERM) -> None:
    """Send a signal to a process, if it still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_until(condition: Callable[[], object], seconds: float, pause: float = 0.05) -> bool:
    """Wait until ``condition()`` is true, at most ``seconds``; returns whether it was. It is called every ``pause`` seconds."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(pause)
    return True


def wait(pid: int, seconds: float) -> bool:
    """Wait until a process has exited, at most ``seconds``; returns whether it has."""
    return wait_until(lambda: started(pid) is None, seconds)


def terminate_children(grace: float) -> None:
    """Send this process's children TERM, and KILL after ``grace`` seconds."""
    children = psutil.Process().children()
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in children:
            with suppress(psutil.Error):
                child.send_signal(number)
        wait_until(lambda: not any(started(child.pid) for child in children), grace)


def children_with(variable: str) -> list[int]:
    """The PIDs of this process's children with ``variable`` in their environment."""
    children = []
    for child in psutil.Process().children():
        with suppress(psutil.Error, OSError):
            if variable in child.environ():
                children.append(child.pid)
    return children


def kill_children() -> None:
    """Kill all descendants of this process until none are left."""
    killed: set[psutil.Process] = set()
    for _ in range(20):
        new = {*psutil.Process().children(recursive=True)} - killed
        if not new:
            return
        for child in new:
            with suppress(psutil.Error):
                child.kill()
        killed |= new


def adopt_orphans() -> None:
    """Become the parent of descendants when their own parent exits, so that ``kill_children`` finds them (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def when_orphaned(parent: int, act: Callable[[], object]) -> None:
    """Call ``act`` as soon as this process's parent, process ``parent``, has ended (Linux); uses SIGALRM."""
    signal.signal(signal.SIGALRM, lambda *_: act())
    signal_at_death_of_parent(signal.SIGALRM)
    if os.getppid() != parent:
        act()


def memory_kills() -> int:
    """The number of processes that the kernel's OOM killer has killed in this job or control group (cgroup v2)."""
    with suppress(OSError, ValueError, IndexError):
        group = Path(Path("/proc/self/cgroup").read_text().partition("::")[2].strip())
        job = next((parent for parent in group.parents if parent.name.startswith("job_")), group)
        events = Path(f"/sys/fs/cgroup{job}/memory.events").read_text().split()
        return int(events[events.index("oom_kill") + 1])
    return 0


class NoAnswerError(HpclmError):
    """A program is not installed, does not answer in time, or its answer cannot be parsed."""


class MissingProgramError(NoAnswerError):
    """A program is not installed."""


def ask(
    words: Sequence[str], seconds: float, env: Env = os.environ, text: str = "", keep: Sequence[int] = ()
) -> tuple[int, str, str]:
    """Run a program that reads ``text``; returns its exit code, output and errors. NoAnswerError if it takes over ``seconds``.

    ``keep``: descriptors that the program inherits.
    """
    return finish(start(words, env, keep), seconds, text)


def killed_by(number: int) -> str:
    """The signal that killed a process, and the likely cause, for messages."""
    text = f"killed by signal {number}"
    with suppress(ValueError):
        text = f"killed by {signal.Signals(number).name}"
    if number == signal.SIGKILL:
        text += "; perhaps out of memory, or kill -9"
    elif number == signal.SIGBUS:
        text += ": a crash inside a library, a full /dev/shm, or a file that was cut while it was read"
    elif number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL):
        text += ": a crash inside a library"
    return text


def start(words: Sequence[str], env: Env = os.environ, keep: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a program, for ``finish``; NoAnswerError if it is missing."""
    program = shutil.which(words[0], path=env.get("PATH")) or words[0]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    try:
        return subprocess.Popen([program, *words[1:]], env=dict(env), start_new_session=True, pass_fds=keep, **pipes)
    except OSError as error:
        raise MissingProgramError(f"{words[0]}: {error.strerror}; is it installed here?") from None


def finish(process: subprocess.Popen[bytes], seconds: float, text: str = "") -> tuple[int, str, str]:
    """Wait for a program that ``start`` has started; returns the same as ``ask``."""
    try:
        output, errors = process.communicate(text.encode(), timeout=max(0, seconds))
        return process.returncode, output.decode(errors="replace"), errors.decode(errors="replace")
    except subprocess.TimeoutExpired as late:
        raise NoAnswerError(f"{Path(late.cmd[0]).name} did not answer within {seconds:g} s") from None
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
