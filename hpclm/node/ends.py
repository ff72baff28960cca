"""How ranks end: each leaves its exit code and the cause in a file, for the process that started the ranks."""

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hpclm import files
from hpclm.node import slurm

Env = Mapping[str, str]
FOLDER = "HPCLM_ERRORS"
"""Variable with the folder of the ranks' files, set by what starts the ranks."""
RESTARTED = "HPCLM_RESTARTED"
"""Variable that says why torchrun has restarted the ranks."""
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", slurm.NUMBERS_OF_RANK[0])
"""Variables with a process's rank; launchers nest, so the innermost comes first."""
CAUSE = 500  # characters of a cause that are kept


@dataclass(frozen=True)
class End:
    """How a rank ended."""

    rank: int
    exit_code: int
    cause: str
    """One line; empty where another rank says it."""
    time: float
    """In seconds since 1970."""


def note(code: int, cause: str = "", env: Env = os.environ) -> None:
    """Leave this rank's exit code and the cause, unless the code is 0 or another thread of the rank has left one."""
    folder = env.get(FOLDER)
    if not code or not folder:
        return
    rank = next((slurm.number(env, name) for name in RANKS if name in env), 0)
    lines = cause.strip().splitlines()
    cause = f"{lines[0]} ... {lines[-1].strip()}" if len(lines) > 1 else "".join(lines)
    cause = "".join(character if character.isprintable() else " " for character in cause[:CAUSE])
    path = _file(Path(folder), rank)
    with suppress(OSError):
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.write_text(path, json.dumps(asdict(End(rank, code, cause, time.time()))))


def read(folder: Path) -> dict[int, End]:
    """The ends of the ranks that have left a file in ``folder``."""
    found = {}
    for path in folder.glob("rank-*.json"):
        with suppress(OSError, ValueError, TypeError):
            end = End(**json.loads(files.read_text(path)))
            if type(end.rank) is type(end.exit_code) is int and math.isfinite(end.time):
                found[end.rank] = end
    return found


def first(ends: Iterable[End]) -> End | None:
    """The end that was left first: those after it may only be consequences. Of ranks that end alike, the first that says why."""
    ordered = sorted(ends, key=lambda end: end.time)
    told = [end for end in ordered if end.cause and end.exit_code == ordered[0].exit_code]
    return next(iter(told or ordered), None)


def forget(folder: Path, ranks: Iterable[int]) -> None:
    """Remove the files of ``ranks``, which are started again."""
    for rank in ranks:
        with suppress(OSError):
            _file(folder, rank).unlink()


def inside_the_job(env: Env = os.environ) -> str:
    """Why torchrun restarted the ranks; empty if it did not."""
    return env.get(RESTARTED, "")


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"
