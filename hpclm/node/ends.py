"""Ranks record how they ended, each in a file, for the other ranks and the launcher."""

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpclm.base import files
from hpclm.node import slurm

Env = Mapping[str, str]
FOLDER = "HPCLM_ERRORS"
"""Variable with the folder of the ranks' files, set by the launcher."""
RESTARTED = "HPCLM_RESTARTED"
"""Variable with the reason why torchrun has restarted the ranks."""
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", slurm.NUMBERS_OF_RANK[0])
"""Variables with the rank of a process. The innermost of nested launchers comes first."""
ANNOUNCED = "ranks.json"
REPORTED = "reported"
MAX_CAUSE = 500  # characters


@dataclass(frozen=True)
class End:
    """How a rank ended."""

    rank: int
    exit_code: int
    cause: str
    """One line; empty if another rank has the cause."""
    time: float
    """In seconds since 1970."""
    symptom: bool = False
    """Whether the rank only lost its connection to another one."""
    hang: dict[str, Any] | None = None
    """Position of a rank that made no progress (``distributed.hang.RankState``); None if it did not hang."""


def folder(env: Env = os.environ) -> Path | None:
    """The folder of the ranks' files; None if the launcher has set none."""
    return Path(env[FOLDER]) if env.get(FOLDER) else None


def note(code: int, cause: str = "", env: Env = os.environ) -> None:
    """Write this rank's file with its exit code and the cause, unless the code is 0 or the file exists."""
    where = folder(env)
    if code and where:
        rank = next((slurm.number(env, name) for name in RANKS if name in env), 0)
        leave(where, End(rank, code, cause, time.time()))


def leave(where: Path, end: End) -> None:
    """Write the file of a rank into the folder ``where``, unless it exists."""
    path = _file(where, end.rank)
    with suppress(OSError):
        if not path.exists():
            make_folder(where)
            files.write_text(path, json.dumps(asdict(end) | {"cause": one_line(end.cause)}))


def one_line(cause: str) -> str:
    """The first and the last line of ``cause``: in a traceback, the failed rank and the exception."""
    lines = cause.strip().splitlines()
    text = "".join(lines)
    if len(lines) > 1:
        text = f"{lines[0]} ... {lines[-1].strip()}"
    return "".join(character if character.isprintable() else " " for character in text[:MAX_CAUSE])


def read_ends(where: Path) -> dict[int, End]:
    """The end of each rank that has a file in the folder ``where``, by rank."""
    found = {}
    for path in where.glob("rank-*.json"):
        with suppress(OSError, ValueError, TypeError):
            end = End(**json.loads(files.read_text(path)))
            if type(end.rank) is type(end.exit_code) is int and math.isfinite(end.time):
                found[end.rank] = end
    return found


def leave_trace(where: Path, rank: int) -> None:
    """Write a file that shows that ``rank`` was alive when its launcher told it to end."""
    with suppress(OSError):
        files.write_text(where / f"alive-{rank}", "")


def traces(where: Path) -> set[int]:
    """The ranks that have called ``leave_trace``."""
    return {int(path.name.partition("-")[2]) for path in where.glob("alive-*") if path.name[6:].isdecimal()}


def first(ends: Iterable[End]) -> End | None:
    """The earliest end that is not a symptom, or the first with the same exit code that has a cause; None without one."""
    causes = sorted((end for end in ends if not end.symptom), key=lambda end: end.time)
    with_text = [end for end in causes if end.cause and end.exit_code == causes[0].exit_code]
    return next(iter(with_text or causes), None)


def announce(where: Path, ranks: list[dict[str, Any]]) -> None:
    """Begin a new record: write the list of ranks, and remove the traces of an earlier start. Rank 0 calls it."""
    with suppress(OSError):
        make_folder(where)
        for path in (where / REPORTED, *where.glob("alive-*")):
            path.unlink(missing_ok=True)
        files.write_text(where / ANNOUNCED, json.dumps(ranks))


def announced(where: Path) -> list[dict[str, Any]]:
    """The ranks of the current start, in order; empty before they have met."""
    with suppress(OSError, ValueError):
        return list(json.loads(files.read_text(where / ANNOUNCED)))
    return []


def claim_report(where: Path) -> bool:
    """Whether the caller is the first of all processes to report how this start of the ranks ended."""
    with suppress(OSError):
        os.close(files.opened(where / REPORTED, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        return True
    return not where.exists()


def tidy(where: Path) -> None:
    """Remove the folder of a start if no rank has a file in it."""
    with suppress(OSError):
        if not read_ends(where):
            for path in (where / ANNOUNCED, *where.glob("alive-*")):
                path.unlink(missing_ok=True)
            where.rmdir()
            where.parent.rmdir()  # fails if another start has left a folder


def forget(where: Path, ranks: Iterable[int]) -> None:
    """Remove the files of ``ranks``, which will be restarted."""
    for rank in ranks:
        with suppress(OSError):
            _file(where, rank).unlink()


def inside_the_job(env: Env = os.environ) -> str:
    """Why torchrun restarted the ranks; empty if it did not."""
    return env.get(RESTARTED, "")


def make_folder(where: Path) -> None:
    """Make the folder OUT/logs/errors/START and its parents with mode 0700, for any umask."""
    for folder in (*reversed(where.parents[:3]), where):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _file(where: Path, rank: int) -> Path:
    return where / f"rank-{rank}.json"
