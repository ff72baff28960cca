"""Processes that earlier attempts of a run left on a machine."""

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from hpclm.distributed import bootstrap
from hpclm.node import processes, python, secrets
from hpclm.node.processes import Process

GRACE = 3.0  # seconds between TERM and KILL
DAEMONS = ("slurmd", "slurmstepd")


def left_over(out: Path, ranks: Collection[int], env: Mapping[str, str] = os.environ) -> list[Process]:
    """Processes on this machine of earlier attempts of the run in ``out``, or of this Slurm job, with their children.

    ``ranks`` are the PIDs of this attempt here. They, their children and ancestors are spared, and so is every process that
    started after the first of them. The caller holds the lock of the run directory, so any other process that trains there
    is left over.
    """
    running = processes.of_this_user()
    attempt = {os.getpid(), *ranks}
    spared = attempt.union(*(processes.ancestors(pid) for pid in attempt))
    began = min((start for pid in attempt if (start := processes.started(pid))), default=0)

    def descends(pid: int, group: Collection[int]) -> bool:
        """Whether ``pid`` or one of its ancestors is in ``group``."""
        while pid in running and pid not in group:
            pid = running[pid].parent
        return pid in group

    found = {
        each.pid
        for each in running.values()
        if each.started < began
        and each.pid not in spared
        and not descends(each.pid, attempt)
        and (_is_of_earlier_attempt(each, env) or _trains_in(each, out))
    }
    return [each for each in running.values() if each.pid not in spared and descends(each.pid, found)]


def _is_of_earlier_attempt(process: Process, env: Mapping[str, str]) -> bool:
    """Whether it was started by this Slurm job before its last requeue."""
    job = env.get("SLURM_JOB_ID")
    if not job or process.env.get("SLURM_JOB_ID") != job or Path(process.command[0]).name.rstrip(":") in DAEMONS:
        return False
    return int(bootstrap.job(process.env)["restart"]) < int(bootstrap.job(env)["restart"])


def _trains_in(process: Process, out: Path) -> bool:
    """Whether it is a training process of the run directory ``out``, by its command or by the files it has open."""
    program, words = _program(process.command)
    if program not in ("hpclm.train", "train.py") and not (program == "hpclm" and words[:1] == ["train"]):
        return False
    with suppress(OSError):
        folder = (processes.PROC / str(process.pid) / "cwd").readlink()
        elsewhere = [word[4:] for word in words if word.startswith("out=")]
        if elsewhere:  # possibly a copy of the run
            return (folder / elsewhere[-1]).resolve() == out.resolve()
        if any((folder / word).resolve() == (out / "config.yaml").resolve() for word in words if word[-5:] == ".yaml"):
            return True
    folder = out.resolve()
    ours = {folder / name for name in ("lock", "log.txt", "metrics.jsonl")}  # only processes of the run write these
    return any(file in ours or file.parent == folder / "logs" for file in processes.open_files(process.handle))


def _program(command: list[str]) -> tuple[str, list[str]]:
    """The module or script that a Python process runs, and its arguments.

    The command lines of srun, mpirun and torchrun contain the same words, but they are not Python running hpclm.
    """
    if not re.fullmatch(r"python[\d.]*", Path(command[0]).name):
        return "", []
    rest = command[1:]
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        del rest[: 2 if rest[0] in ("-X", "-W") else 1]
    if rest[:1] == ["-m"]:
        del rest[0]
    elif rest[:2] == ["-c", python.CODE]:
        del rest[:2]
    return (Path(rest[0]).name, rest[1:]) if rest else ("", [])


def described(process: Process) -> str:
    """A process in one line."""
    return f"{process.pid}: {secrets.Redactor().command(process.command)[:200]}"
