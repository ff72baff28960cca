"""Processes of this machine, as /proc tells of them."""

import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """One process of this user."""

    pid: int
    parent: int
    started: int
    """Clock ticks since the machine's start."""
    command: tuple[str, ...]
    env: dict[str, str]
    """The environment it was started with."""


def mine() -> Iterator[Process]:
    """Every process of this user that lives and can be read."""
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            if folder.stat().st_uid != os.getuid():
                continue
            state, parent, start = _stat(int(folder.name))
            command = tuple((folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1])
            if state in "ZX" or not command:  # a dead one nobody has waited for, or a thread of the kernel
                continue
            pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            env = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            yield Process(int(folder.name), parent, start, command, env)


def _stat(pid: int) -> tuple[str, int, int]:
    """State, parent and start of a process."""
    words = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return words[0], int(words[1]), int(words[19])


def machine() -> str:
    """Where a process number means one process: this machine since its start, and the container on it."""
    found = []
    with suppress(OSError):
        found.append((PROC / "sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        found.append(str((PROC / "self/ns/pid").readlink()))
    return " ".join(found) or socket.gethostname()


def started(pid: int) -> int:
    """When a process started, in clock ticks since the machine's start; 0 when it is gone."""
    with suppress(OSError, ValueError, IndexError):
        return _stat(pid)[2]
    return 0


def ancestors(pid: int) -> list[int]:
    """The parent of ``pid``, its parent, and so on."""
    found: list[int] = []
    with suppress(OSError, ValueError, IndexError):
        while (pid := _stat(pid)[1]) > 0:
            found.append(pid)
    return found


def opens(pid: int, folder: Path) -> bool:
    """Whether the process has a file open that only processes of the run in ``folder`` write: its lock, a log, its metrics."""
    own = {folder / name for name in ("lock", "log.txt", "metrics.jsonl")}
    with suppress(OSError):
        for link in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                file = link.readlink()
                if file in own or file.parent == folder / "logs":
                    return True
    return False


def end(victims: list[Process], grace: float) -> list[Process]:
    """Send TERM, and KILL to those that still live after ``grace`` seconds; gives those that would not go.

    Each is held by a handle, so that a number which now means another process is never signalled.
    """
    handles: dict[int, Process] = {}
    for victim in victims:
        with suppress(OSError):
            handle = os.pidfd_open(victim.pid)
            handles[handle] = victim
            if started(victim.pid) != victim.started:  # that number belongs to another process by now
                del handles[handle]
                os.close(handle)
    try:
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, grace)):
            living = _wait(list(handles), 0)
            for handle in living:
                with suppress(OSError):
                    signal.pidfd_send_signal(handle, number)
            if not _wait(living, seconds):
                return []
        return [handles[handle] for handle in _wait(list(handles), 0)]
    finally:
        for handle in handles:
            os.close(handle)


def _wait(handles: list[int], seconds: float) -> list[int]:
    """Those of the processes that live after ``seconds``; sooner when none does."""
    poll, until = select.poll(), time.monotonic() + seconds
    living = set(handles)
    for handle in handles:
        poll.register(handle, select.POLLIN)
    while living:
        for handle, _ in poll.poll(max(0, until - time.monotonic()) * 1000):
            living.discard(handle)
            poll.unregister(handle)
        if time.monotonic() >= until:
            break
    return sorted(living)
