"""Processes that earlier attempts of a run left on this machine."""

import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

from hpclm.node import processes, secrets

TRAINS = re.compile(r"\bhpclm([.]| )train( |$)|\btrain\.py( |$)")


def left_over(out: Path, ranks: Collection[int]) -> list[psutil.Process]:
    """Processes on this machine of earlier attempts of the run in ``out``, with their children.

    ``ranks`` are the PIDs of this attempt here. They and their ancestors are spared, and so is every process that started after
    the first of them. The caller holds the lock of the run directory, so any other process that trains there is left over.
    """
    attempt = [psutil.Process(pid) for pid in ranks if processes.started(pid)]
    began = min((process.create_time() for process in attempt), default=0)
    spared = {ancestor for process in attempt for ancestor in process.parents()}
    old: set[psutil.Process] = set()
    for process in processes.of_this_user():
        with suppress(psutil.Error, OSError):
            if process.create_time() < began and process not in spared and _trains_in(process, out.resolve()):
                old |= {process, *process.children(recursive=True)}
    return sorted(old, key=lambda process: process.pid)


def _trains_in(process: psutil.Process, out: Path) -> bool:
    """Whether Python trains there: it has a log or the lock of the run directory ``out`` open for writing.

    srun, mpirun and torchrun, whose command lines contain the same words, are another program or an ancestor of the ranks.
    """
    command = process.cmdline()
    if not Path(command[0]).name.startswith("python") or not TRAINS.search(" ".join(command)):
        return False
    opened = [Path(file.path) for file in process.open_files() if file.mode != "r"]
    written = {out / name for name in ("lock", "log.txt", "metrics.jsonl")}
    return any(path in written or path.parent == out / "logs" for path in opened)


def described(process: psutil.Process) -> str:
    """A process in one line."""
    with suppress(psutil.Error):
        return f"{process.pid}: {secrets.Redactor().command(process.cmdline())[:200]}"
    return str(process.pid)
