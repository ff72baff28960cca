"""The report on a hang: which rank is blocking the others, and where every rank is."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpclm import files
from hpclm.distributed.failure import named
from hpclm.distributed.rendezvous import RankInfo
from hpclm.distributed.stacks import Position
from hpclm.terminal import ranges


@dataclass(frozen=True)
class RankState:
    """What is known of one rank."""

    phase: str
    step: int
    seconds: float
    """Since it last made progress."""
    silent: float = 0.0
    """Seconds since its last heartbeat; 0 for a rank that answered when all were asked."""
    stopped: bool = False
    """Whether a signal has stopped its process."""
    position: Position | None = None
    """What it is doing, if it could still report that."""

    @property
    def place(self) -> str:
        """Phase and step in words."""
        return f"{self.phase or 'start'}{' ' if 'step' in self.phase else ' after step '}{self.step}"

    def describe(self) -> str:
        """Where the rank is, in words."""
        parts = [self.place]
        if self.stopped:
            parts.append("stopped by a signal")
        elif self.silent:
            parts.append(f"no heartbeat for {self.silent:.0f} s: its process cannot answer, or its node is down")
        if self.position and self.position.collective:
            waits = self.position.collective
            kind = "in the backward pass" if waits == "backward" else f"waiting in {waits}"
            parts.append(f"{kind} ({self.position.location})")
        elif self.position:
            parts.append(f"at {self.position.location}")
        return ", ".join(parts)


States = Mapping[int, RankState]


def culprits(states: States) -> list[int]:
    """The ranks that block the others, as far as is known."""
    dead = [rank for rank, state in states.items() if state.stopped or state.silent]
    if dead:
        return sorted(dead)
    free = [rank for rank, state in states.items() if state.position and not state.position.collective]
    if len(free) < len(states):
        if free:
            return free
        computing = [rank for rank, s in states.items() if s.position and s.position.collective == "backward"]
        if computing and len(computing) < len(states):  # the others certainly wait
            return computing
    groups = sorted(_places(states).values(), key=len)
    if len(groups) > 1 and len(groups[-1]) > len(states) / 2:  # most are in the same place
        return sorted(rank for group in groups[:-1] for rank in group)
    return []


def report(states: States, ranks: Sequence[RankInfo], folder: Path | None, then: str) -> str:
    """A line that names the culprits, then a line for each place and the ranks there."""
    guilty = culprits(states)
    shortest = min((state.seconds for state in states.values()), default=0.0)
    lines = [f"no progress for {shortest:.0f} s: {_headline(guilty, states, ranks)}"]
    for text, there in _places(states).items():
        if not (len(there) == 1 and there == guilty):
            lines.append(f"rank{'s' * (len(there) > 1)} {ranges(there)}: {text}")
    lines.append(f"stacks of all threads are in {folder}; {then}" if folder else then)
    return "\n".join(lines)


def write(path: Path, text: str, states: States, ranks: Sequence[RankInfo]) -> None:
    """Write the report as JSON."""
    rows = [
        {"rank": rank, "host": ranks[rank].host, "pid": ranks[rank].pid, **asdict(state)}
        for rank, state in sorted(states.items())
    ]
    content = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "report": text, "culprits": culprits(states)}
    files.write_text(path, json.dumps(content | {"ranks": rows}, indent=1) + "\n")


def _headline(guilty: Sequence[int], states: States, ranks: Sequence[RankInfo]) -> str:
    if not guilty:
        return "no rank stands out" if len(states) > 1 else f"in {states[min(states)].describe()}"
    verb = "is" if len(guilty) == 1 else "are"
    return f"{named(guilty, ranks)} {verb} blocking the others, in {states[guilty[0]].describe()}"


def _places(states: States) -> dict[str, list[int]]:
    """Place -> the ranks there, the most common place first."""
    found: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        found.setdefault(state.describe(), []).append(rank)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))
