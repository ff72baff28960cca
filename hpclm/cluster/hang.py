"""What to say of a run that makes no progress: who holds up the others, and where everyone is."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpclm import files
from hpclm.cluster.rollcall import Present, ranges
from hpclm.cluster.stacks import Stand


@dataclass(frozen=True)
class Sight:
    """What is known of one rank."""

    phase: str
    step: int
    seconds: float
    """Since it was last seen to get on."""
    silent: float = 0.0
    """Seconds since it was last heard, of a rank that did not answer when all were asked; 0: it did."""
    stopped: bool = False
    """A signal has stopped its process."""
    stand: Stand | None = None
    """What it does, where it could still say so."""

    @property
    def place(self) -> str:
        """Phase and step in words."""
        return f"{self.phase or 'start'}{' ' if 'step' in self.phase else ' after step '}{self.step}"


def culprits(sights: Mapping[int, Sight]) -> list[int]:
    """Ranks that hold up the others, as far as it can be told."""
    dead = [rank for rank, sight in sights.items() if sight.stopped or sight.silent]
    if dead:
        return sorted(dead)
    free = [rank for rank, sight in sights.items() if sight.stand and not sight.stand.waits]
    if len(free) < len(sights):
        if free:
            return free
        compute = [rank for rank, sight in sights.items() if sight.stand and sight.stand.waits == "backward"]
        if compute and len(compute) < len(sights):  # the others wait for certain
            return compute
    groups = list(_places(sights).values())
    groups.sort(key=len)
    if len(groups) > 1 and len(groups[-1]) > len(sights) / 2:  # most agree on where to be
        return sorted(rank for group in groups[:-1] for rank in group)
    return []


def report(sights: Mapping[int, Sight], everyone: Sequence[Present], folder: Path | None, then: str) -> str:
    """The report: a first line that names the culprits, a line for each place with the ranks that are there."""
    guilty = culprits(sights)
    worst = min((sight.seconds for sight in sights.values()), default=0.0)
    lines = [f"no progress for {worst:.0f} s: {_accusation(guilty, sights, everyone)}"]
    for text, ranks in _places(sights).items():
        if not (len(ranks) == 1 and ranks == guilty):
            lines.append(f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}: {text}")
    lines.append(f"stacks of all threads are in {folder}; {then}" if folder else then)
    return "\n".join(lines)


def write(path: Path, text: str, sights: Mapping[int, Sight], everyone: Sequence[Present]) -> None:
    """Put the report where programs read it."""
    rows = [
        {"rank": rank, "host": everyone[rank].host, "pid": everyone[rank].pid, **asdict(sight)}
        for rank, sight in sorted(sights.items())
    ]
    content = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "report": text, "culprits": culprits(sights)}
    files.write_text(path, json.dumps(content | {"ranks": rows}, indent=1) + "\n")


def share(folder: Path, rank: int, answer: Mapping[str, Any]) -> None:
    """Say to the others through a file where this rank is: rank 0, who else asks, does not answer."""
    files.write_text(folder / f"rank-{rank:05d}.json", json.dumps(answer))


def shared(folder: Path | None) -> dict[int, dict[str, Any]]:
    """What the ranks have said so."""
    found: dict[int, dict[str, Any]] = {}
    for path in folder.glob("rank-*.json") if folder else ():
        with suppress(OSError, ValueError):
            found[int(path.stem.removeprefix("rank-"))] = json.loads(path.read_text())
    return found


def speaks(folder: Path | None, rank: int) -> bool:
    """Whether this rank is the one that reports for all, without rank 0: the first that comes, mostly the lowest."""
    time.sleep(min(1.0, 0.1 * (rank - 1)))
    if folder is None:
        return rank == 1
    try:
        (folder / "reported").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return rank == 1
    return True


def _accusation(guilty: Sequence[int], sights: Mapping[int, Sight], everyone: Sequence[Present]) -> str:
    if not guilty:
        return "no rank stands out" if len(sights) > 1 else f"in {_what(sights[min(sights)])}"
    first = guilty[0]
    if len(guilty) == 1:
        who = str(everyone[first])
    else:
        hosts = sorted({everyone[rank].host for rank in guilty})
        who = f"ranks {ranges(list(guilty))} on {', '.join(hosts[:8])}{', ...' * (len(hosts) > 8)}"
    return f"{who} {'holds' if len(guilty) == 1 else 'hold'} up the others, in {_what(sights[first])}"


def _what(sight: Sight) -> str:
    """Where a rank is, in words."""
    parts = [sight.place]
    if sight.stopped:
        parts.append("stopped by a signal" + (" and woken to tell" if sight.stand else ""))
    elif sight.silent:
        parts.append(f"silent for {sight.silent:.0f} s: its process cannot answer, or its node is down")
    if sight.stand and sight.stand.waits:
        kind = "in the backward pass" if sight.stand.waits == "backward" else f"waiting in {sight.stand.waits}"
        parts.append(f"{kind} ({sight.stand.at})")
    elif sight.stand:
        parts.append(f"at {sight.stand.at}")
    return ", ".join(parts)


def _places(sights: Mapping[int, Sight]) -> dict[str, list[int]]:
    """Ranks by what can be said of them, the most common first."""
    found: dict[str, list[int]] = {}
    for rank, sight in sorted(sights.items()):
        found.setdefault(_what(sight), []).append(rank)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))
