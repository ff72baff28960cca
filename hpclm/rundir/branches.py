"""The tree of branches: the run that a branch goes on from (its trunk), and a list of runs as a tree."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hpclm.base import files
from hpclm.rundir import events
from hpclm.rundir.rows import Row


@dataclass(frozen=True)
class Trunk:
    """The run that a branch goes on from."""

    out: Path
    """Its absolute path when the branch was made."""
    step: int
    """The step of the checkpoint that the branch goes on from."""

    def described(self, listed: Mapping[str, str] = MappingProxyType({})) -> str:
        """``RUN at step N``. ``listed``: the names of runs that the reader sees, by their resolved paths."""
        text = f"{listed.get(resolved(self.out), files.shown(self.out))} at step {self.step}"
        try:
            self.out.stat()
        except FileNotFoundError:
            text += ", which is no longer there"
        except (OSError, ValueError):  # it cannot be seen from here
            pass
        return text


def resolved(path: Path) -> str:
    """The path without links; ``path`` itself if it cannot be followed from here."""
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):
        return str(path)


def trunk_of(happened: Iterable[Row]) -> Trunk | None:
    """The trunk of a run with these events; None if the run is not a branch."""
    made = events.of_kind(happened, "branched")
    return Trunk(Path(made[0]["trunk"]), made[0]["step"]) if made else None


def tree(runs: Sequence[tuple[Path, Trunk | None]]) -> list[tuple[int, int]]:
    """The order in which each branch follows its trunk, if that is among the ``runs``: index and depth of each run.

    ``runs``: path and trunk of each. Otherwise their order is kept.
    """
    places = {resolved(out): place for place, (out, _) in enumerate(runs)}

    def line(place: int | None) -> list[int]:
        """The places of the run's ancestors, the oldest first, and of the run."""
        found: list[int] = []
        while (
            place is not None and place not in found
        ):  # a removed trunk may have given its path to a branch of its branch
            found.insert(0, place)
            trunk = runs[place][1]
            place = places.get(resolved(trunk.out)) if trunk else None
        return found

    return [(ancestors[-1], len(ancestors) - 1) for ancestors in sorted(map(line, range(len(runs))))]
