"""Report of a run that hangs: the position of each rank, and the ranks that block the others."""

import faulthandler
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpclm.base.errors import ExitCode
from hpclm.base.terminal import ranges
from hpclm.distributed.ranks import RankInfo, named_ranks
from hpclm.node import ends

COLLECTIVES = ("torch.distributed.", "hpclm.parallel.")
"""Modules with functions that wait for other ranks. DistributedContext notes its own collectives (``context.waits_in``)."""
AUTOGRAD = "torch.autograd"
"""Module of the backward pass, which computes or waits for a collective, both outside Python."""
LIBRARIES = ("torch.", "threading", "queue", "concurrent.", "hpclm.distributed.context")
"""Modules to skip in a stack: the useful position of a thread is their caller."""
SILENT = "it does not answer: its process is stopped or cannot run, or its node is down"


@dataclass(frozen=True)
class RankState:
    """The position of a rank, and how long it has been there."""

    phase: str = ""
    step: int = 0
    idle: float = 0.0
    """Seconds since the last progress."""
    location: str = ""
    """The line that the main thread is in."""
    waits_in: str = ""
    """The collective that the main thread waits in; "backward" if it may wait in the backward pass; empty if it does not wait."""

    def describe(self) -> str:
        """The position, for the log."""
        phase = self.phase or "start"
        position = f"{phase} {self.step}" if "step" in phase else f"{phase} after step {self.step}"
        if not self.waits_in:
            return f"{position}, at {self.location}"
        waits = "in the backward pass" if self.waits_in == "backward" else f"waiting in {self.waits_in}"
        return f"{position}, {waits} ({self.location})"


def position(waits_in: str = "") -> tuple[str, str]:
    """MODULE:LINE in FUNCTION of the main thread, and the collective that it waits in.

    The collective is ``waits_in``, noted by the context, or the one among the innermost calls.
    """
    for frame, line in traceback.walk_stack(sys._current_frames().get(threading.main_thread().ident or 0)):
        module = str(frame.f_globals.get("__name__", ""))
        name = frame.f_code.co_name
        if module.startswith(AUTOGRAD):
            waits_in = waits_in or "backward"
        elif module.startswith(COLLECTIVES):
            if not waits_in or not module.startswith("torch."):
                waits_in = name
        elif not module.startswith(LIBRARIES):
            return f"{module}:{line} in {name}", waits_in
    return "", waits_in


def write_stacks(folder: Path, me: RankInfo, state: RankState) -> None:
    """Write the Python stacks of all threads of this rank into ``folder``."""
    ends.make_folder(folder)
    with (folder / f"rank-{me.rank}.txt").open("w", encoding="utf-8") as file:
        file.write(f"{me}, {state.describe()}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def culprits(states: Mapping[int, RankState], size: int) -> list[int]:
    """The ranks, out of ``size``, that block the others; empty if unknown. ``states``: the states that ranks have left."""
    silent = sorted({*range(size)} - states.keys())
    if silent:
        return silent
    for blocking in ("", "backward"):  # if all others certainly wait, a rank in its backward pass is computing
        ranks = [rank for rank, state in states.items() if state.waits_in == blocking]
        if ranks and len(ranks) < len(states):
            return sorted(ranks)
    majority, *others = _by_position(states).values()
    if 2 * len(majority) > len(states):  # only a position of more than half of the ranks shows where a rank should be
        return sorted(rank for group in others for rank in group)
    return []


def report(states: Mapping[int, RankState], ranks: Sequence[RankInfo], folder: Path | None) -> str:
    """A line that names the culprits, then a line for each position with the ranks that are there."""
    blocking = culprits(states, len(ranks))
    if blocking:
        verb = "is" if len(blocking) == 1 else "are"
        state = states.get(blocking[0])
        position = f"in {state.describe()}" if state else SILENT
        headline = f"{named_ranks(blocking, ranks)} {verb} blocking the others, {position}"
    else:
        headline = "no rank stands out" if len(states) > 1 else f"in {states[min(states)].describe()}"
    lines = [f"no progress for {min(state.idle for state in states.values()):.0f} s: {headline}"]
    for position, members in _by_position(states).items():
        if len(members) > 1:
            lines.append(f"ranks {ranges(members)}: {position}")
        elif members != blocking:
            lines.append(f"rank {ranges(members)}: {position}")
    stacks = ""
    if folder:
        stacks = f"stacks of all threads are in {folder}; "
    code = f"exit code {ExitCode.REQUEUE:d}: the job, or the same command, resumes from the last checkpoint"
    return "\n  ".join([*lines, stacks + code])  # indented, so that no line looks like another log entry


def facts(text: str, states: Mapping[int, RankState], ranks: Sequence[RankInfo]) -> dict[str, Any]:
    """The report ``text`` and the state of every rank, for the run's record."""
    rows = [
        {**asdict(state), "rank": rank, "host": ranks[rank].host, "pid": ranks[rank].pid}
        for rank, state in sorted(states.items())
    ]
    return {"report": text, "culprits": culprits(states, len(ranks)), "ranks": rows}


def _by_position(states: Mapping[int, RankState]) -> dict[str, list[int]]:
    """Position -> the ranks that are there, the most common position first."""
    groups: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        groups.setdefault(state.describe(), []).append(rank)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))
