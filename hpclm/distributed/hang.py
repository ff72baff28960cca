"""A run that hangs: what each rank was doing, which ranks block the others, and the report."""

import faulthandler
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpclm.distributed.ranks import RankInfo, named
from hpclm.errors import ExitCode
from hpclm.node import ends
from hpclm.terminal import ranges

COLLECTIVES = ("torch.distributed.", "hpclm.parallel.")
"""Modules in which a thread waits for other ranks; operations of the context are noted by ``context.waits_in``."""
AUTOGRAD = "torch.autograd"
"""The backward pass computes, or waits for a collective, both outside Python."""
LIBRARIES = ("torch.", "threading", "queue", "concurrent.", "hpclm.distributed.context")
"""Modules that say little about where a thread is: their caller does."""
SILENT = "it does not answer: its process is stopped or cannot run, or its node is down"


@dataclass(frozen=True)
class RankState:
    """What a rank is doing."""

    phase: str = ""
    step: int = 0
    idle: float = 0.0
    """Seconds since it last made progress."""
    location: str = ""
    """The line that the main thread is in."""
    waits_in: str = ""
    """The collective it waits in; "backward" if it may wait in one; empty if in none."""

    def describe(self) -> str:
        """What the rank does, for the log."""
        after = " " if "step" in self.phase else " after step "
        doing = f"{self.phase or 'start'}{after}{self.step}"
        if not self.waits_in:
            return f"{doing}, at {self.location}"
        waits = "in the backward pass" if self.waits_in == "backward" else f"waiting in {self.waits_in}"
        return f"{doing}, {waits} ({self.location})"


def position(waits_in: str = "") -> tuple[str, str]:
    """MODULE:LINE in FUNCTION of the main thread, and the collective that it waits in: ``waits_in``, which it has noted, or one
    that its innermost calls are."""
    for frame, line in traceback.walk_stack(sys._current_frames().get(threading.main_thread().ident or 0)):
        module, name = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        if module.startswith(AUTOGRAD):
            waits_in = waits_in or "backward"
        elif module.startswith(COLLECTIVES):
            waits_in = waits_in if waits_in and module.startswith("torch.") else name
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
    """The ranks that block the others, as far as is known. ``states``: of those of ``size`` ranks that could say what they do."""
    if silent := sorted({*range(size)} - states.keys()):
        return silent
    for blocking in ("", "backward"):  # if others certainly wait, a backward pass computes
        ranks = [rank for rank, state in states.items() if state.waits_in == blocking]
        if ranks and len(ranks) < len(states):
            return sorted(ranks)
    majority, *others = _by_activity(states).values()
    # only what more than half of the ranks do shows what a rank should do
    return sorted(rank for group in others for rank in group) if 2 * len(majority) > len(states) else []


def report(states: Mapping[int, RankState], ranks: Sequence[RankInfo], folder: Path | None) -> str:
    """A line that names the culprits, then a line for each activity and the ranks that are in it."""
    blocking = culprits(states, len(ranks))
    if blocking:
        verb = "is" if len(blocking) == 1 else "are"
        state = states.get(blocking[0])
        doing = f"in {state.describe()}" if state else SILENT
        headline = f"{named(blocking, ranks)} {verb} blocking the others, {doing}"
    else:
        headline = "no rank stands out" if len(states) > 1 else f"in {states[min(states)].describe()}"
    lines = [f"no progress for {min(state.idle for state in states.values()):.0f} s: {headline}"]
    for activity, members in _by_activity(states).items():
        if members != blocking or len(members) > 1:
            lines.append(f"rank{'s' * (len(members) > 1)} {ranges(members)}: {activity}")
    stacks = f"stacks of all threads are in {folder}; " if folder else ""
    code = f"exit code {ExitCode.REQUEUE:d}: the job, or the same command, resumes from the last checkpoint"
    return "\n  ".join([*lines, stacks + code])  # none looks like another entry of the log


def facts(text: str, states: Mapping[int, RankState], ranks: Sequence[RankInfo]) -> dict[str, Any]:
    """The report ``text`` for the run's record, with which rank waits in what."""
    rows = [
        {**asdict(state), "rank": rank, "host": ranks[rank].host, "pid": ranks[rank].pid}
        for rank, state in sorted(states.items())
    ]
    return {"report": text, "culprits": culprits(states, len(ranks)), "ranks": rows}


def _by_activity(states: Mapping[int, RankState]) -> dict[str, list[int]]:
    """What ranks do -> those that do it, the most common first."""
    groups: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        groups.setdefault(state.describe(), []).append(rank)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))
