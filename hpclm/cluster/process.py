"""Processes of this host: whether one that was written down still is the same, and who holds a lock."""

import os
import re
import signal
import socket
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

PROC = Path("/proc")
OURS = r"(.*/)?hpclm([.][a-z_.]+)?"  # a word of a command line of ours: hpclm, its path, or a module of it after -m
TOLERANCE = 60  # seconds by which a process may seem younger than the line that names it: clocks are set


def host() -> str:
    """Name of this machine, as runs write it down."""
    return socket.gethostname()


def began(pid: int) -> float | None:
    """When a process of this host began, in seconds since 1970; None when there is none, or only its exit code is left."""
    try:
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        booted = next(
            int(line.split()[1]) for line in (PROC / "stat").read_text().splitlines() if line.startswith("btime ")
        )
    except (OSError, StopIteration, ValueError):
        return None
    return None if fields[0] in "ZX" else booted + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def stopped(pid: int) -> bool:
    """Whether a process of this host was stopped by a signal (and not by a debugger)."""
    try:
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def is_ours(pid: int, written: str) -> bool:
    """Whether ``pid`` is the process of hpclm that was written down at ``written`` (as ``time.strftime`` with %z gives it).

    A number may have gone to another process since: that one is younger, or has another command line.
    """
    start = began(pid)
    if start is None:
        return False
    with suppress(ValueError):
        if start > datetime.strptime(written, "%Y-%m-%dT%H:%M:%S%z").timestamp() + TOLERANCE:
            return False
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return any(re.fullmatch(OURS, word) for word in words)


def holders(path: Path) -> list[int] | None:
    """Processes of this host that hold a lock on a file; None where that cannot be told."""
    try:
        info = path.stat()
        wanted = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
        lines = [line.split() for line in (PROC / "locks").read_text().splitlines()]
    except OSError:
        return None
    return [int(line[4]) for line in lines if len(line) > 5 and line[1] == "FLOCK" and line[5] == wanted]


def terminate(pid: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Send a signal to a process; one that has gone needs none."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def wait(pid: int, seconds: float) -> bool:
    """Whether a process has gone within ``seconds``."""
    until = time.monotonic() + seconds
    while began(pid) is not None:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
