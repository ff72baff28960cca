"""What earlier attempts of this very job left on a machine: processes that live on, locks that nobody holds."""

import os
import re
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpclm.cluster import secrets
from hpclm.cluster.health import processes
from hpclm.cluster.health.processes import Process

GRACE = 3.0  # seconds between TERM and KILL
ABANDONED = 15 * 60  # seconds without a write after which a build that nobody holds is given up
DAEMONS = ("slurmd", "slurmstepd")


@dataclass(frozen=True)
class Lock:
    """A lock of PyTorch's build of an extension; every later process waits for it."""

    path: str
    age: float
    """Seconds since anything in its folder was written."""
    holder: int | None
    """A process of this machine that has it open: a build under way."""


def left_over(out: Path, ranks: Collection[int], env: Mapping[str, str] = os.environ) -> list[Process]:
    """Processes on this machine of earlier attempts of the run in ``out``, or of this Slurm job, and their children.

    ``ranks`` are the processes of this launch here; spared are they, their children, all that they descend from, and
    whatever started after the first of them. The caller holds the run directory's lock: another process that trains in
    it is one that should be gone.
    """
    running = {process.pid: process for process in processes.mine()}
    launch = {os.getpid(), *ranks}
    spared = launch.union(*(processes.ancestors(pid) for pid in launch))
    began = min((start for start in map(processes.started, launch) if start), default=0)

    def belongs(pid: int, to: Collection[int]) -> bool:
        """Whether ``pid``, or a process it descends from, is in ``to``."""
        while pid in running and pid not in to:
            pid = running[pid].parent
        return pid in to

    found = {
        process.pid
        for process in running.values()
        if process.started < began
        and process.pid not in spared
        and not belongs(process.pid, launch)
        and (_earlier_attempt(process, env) or _trains_in(process, out))
    }
    return [process for process in running.values() if process.pid not in spared and belongs(process.pid, found)]


def _earlier_attempt(process: Process, env: Mapping[str, str]) -> bool:
    """Whether it belongs to this Slurm job before it was last requeued."""
    job = env.get("SLURM_JOB_ID")
    if not job or process.env.get("SLURM_JOB_ID") != job or Path(process.command[0]).name.rstrip(":") in DAEMONS:
        return False
    return _count(process.env) < _count(env)


def _count(env: Mapping[str, str]) -> int:
    text = env.get("SLURM_RESTART_COUNT", "0")  # unset at the first start
    return int(text) if text.isdigit() else 0


def _trains_in(process: Process, out: Path) -> bool:
    """Whether it is a training process of the run directory ``out``, by its command or by the files it has open."""
    what, words = _program(process.command)
    if what not in ("hpclm.train", "train.py") and not (what == "hpclm" and words[:1] == ("train",)):
        return False
    with suppress(OSError):
        folder = (processes.PROC / str(process.pid) / "cwd").readlink()
        elsewhere = [word[4:] for word in words if word.startswith("out=")]
        if elsewhere:  # a copy of the run, perhaps
            return (folder / elsewhere[-1]).resolve() == out.resolve()
        if any((folder / word).resolve() == (out / "config.yaml").resolve() for word in words if word[-5:] == ".yaml"):
            return True
    return processes.opens(process.pid, out.resolve())


def _program(command: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The module or script that a Python process runs, and its arguments.

    srun, mpirun and torchrun have the same words in their commands, but run something else: they are never meant.
    """
    if not re.fullmatch(r"python[\d.]*", Path(command[0]).name):
        return "", ()
    rest = list(command[1:])
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        del rest[: 2 if rest[0] in ("-X", "-W") else 1]
    if rest[:1] == ["-m"]:
        del rest[0]
    return (Path(rest[0]).name, tuple(rest[1:])) if rest else ("", ())


def described(process: Process) -> str:
    """A process in a line."""
    return f"{process.pid}: {secrets.Redactor().command(list(process.command))[:200]}"


def locks(env: Mapping[str, str] = os.environ, home: Path | None = None) -> list[Lock]:
    """Locks in the folders where PyTorch builds extensions."""
    chosen = env.get("TORCH_EXTENSIONS_DIR")
    cache = Path(env.get("XDG_CACHE_HOME") or (home or Path(env.get("HOME") or Path.home())) / ".cache")
    paths = Path(chosen).glob("*/lock") if chosen else (cache / "torch_extensions").glob("*/*/lock")
    return [Lock(str(path.absolute()), _age(path.parent), holder(path)) for path in paths if path.exists()]


def _age(folder: Path) -> float:
    times = [folder.stat().st_mtime]
    with suppress(OSError):
        times += [path.stat().st_mtime for path in folder.iterdir()]
    return max(0.0, time.time() - max(times))


def holder(path: Path) -> int | None:
    """A process of this user on this machine that has ``path`` open."""
    wanted = str(path.resolve())
    for folder in processes.PROC.glob("[0-9]*"):
        with suppress(OSError):
            for link in (folder / "fd").iterdir():
                with suppress(OSError):
                    if str(link.readlink()) == wanted:
                        return int(folder.name)
    return None
