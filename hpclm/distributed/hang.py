"""What each rank does when the run hangs, which ranks block the others, and the report on it."""

import faulthandler
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from hpclm import files
from hpclm.distributed.failure import named
from hpclm.distributed.rendezvous import RankInfo
from hpclm.terminal import ranges

COLLECTIVES = ("torch.distributed.", "hpclm.parallel.")
"""Packages in which a thread waits for other ranks."""
AUTOGRAD = "torch.autograd"
"""The backward pass computes, or waits for a collective, both outside Python."""
WAITING = ("threading", "queue", "concurrent.")
"""Packages in which a thread waits for another thread."""
HELPERS = "hpclm-"
"""Prefix of the names of threads that do no training work."""


@dataclass(frozen=True)
class RankState:
    """What is known of one rank."""

    phase: str
    step: int
    idle: float
    """Seconds since it last made progress."""
    location: str = ""
    """The innermost line of hpclm, after the innermost line of all if that is not hpclm's."""
    waits_in: str = ""
    """The collective it waits in; "backward" if it may wait in one; empty if in none."""
    silent: float = 0.0
    """Seconds since its last heartbeat; 0 for a rank that answered when all were asked."""
    stopped: bool = False
    """Whether a signal has stopped its process."""

    def describe(self) -> str:
        """Where the rank is, for the log."""
        parts = [f"{self.phase or 'start'}{' ' if 'step' in self.phase else ' after step '}{self.step}"]
        if self.stopped:
            parts.append("stopped by a signal")
        elif self.silent:
            parts.append(f"no heartbeat for {self.silent:.0f} s: its process cannot answer, or its node is down")
        if self.location and not (self.silent and not self.stopped):
            waits = "in the backward pass" if self.waits_in == "backward" else f"waiting in {self.waits_in}"
            parts.append(f"{waits} ({self.location})" if self.waits_in else f"at {self.location}")
        return ", ".join(parts)


def position(operation: str = "") -> tuple[str, str]:
    """Location and ``waits_in`` of this process: its main thread, or the training thread that the main thread waits for.

    ``operation``: the operation of ``context`` that the main thread is in.
    """
    frames = sys._current_frames()
    main = frames.pop(threading.main_thread().ident or 0, None)
    if main is None:
        return "nowhere: the main thread has ended", ""
    waits = operation or _collective(main)
    location = _location(main, bool(waits))
    if not waits and _module(main).startswith(WAITING):
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in frames.items():
            if not names.get(ident, HELPERS).startswith(HELPERS) and any(map(_ours, _outwards(frame))):
                return f"{_location(frame, False)}, in the thread {names[ident]} that {location} waits for", ""
    return location, waits


def debugged() -> bool:
    """Whether the main thread is in Python's debugger."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    return any(_module(frame) in ("pdb", "bdb") for frame in _outwards(main))


def write_stacks(path: Path, head: str) -> None:
    """Write the Python stacks of all threads to ``path``, below the line ``head``."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write(f"{head}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def culprits(states: Mapping[int, RankState]) -> list[int]:
    """The ranks that block the others, as far as is known."""
    dead = [rank for rank, state in states.items() if state.stopped or state.silent]
    if dead:
        return sorted(dead)
    for blocking in ("", "backward"):  # if others certainly wait, a backward pass computes
        ranks = [rank for rank, state in states.items() if state.waits_in == blocking]
        if ranks and len(ranks) < len(states):
            return sorted(ranks)
    groups = sorted(_by_place(states).values(), key=len)
    if len(groups) > 1 and len(groups[-1]) > len(states) / 2:  # most are in the same place
        return sorted(rank for group in groups[:-1] for rank in group)
    return []


def report(states: Mapping[int, RankState], ranks: Sequence[RankInfo], folder: Path | None, ending: str) -> str:
    """A line that names the culprits, then a line for each place and the ranks there."""
    blocking = culprits(states)
    if blocking:
        verb = "is" if len(blocking) == 1 else "are"
        headline = f"{named(blocking, ranks)} {verb} blocking the others, in {states[blocking[0]].describe()}"
    else:
        headline = "no rank stands out" if len(states) > 1 else f"in {states[min(states)].describe()}"
    lines = [f"no progress for {min(state.idle for state in states.values()):.0f} s: {headline}"]
    for place, there in _by_place(states).items():
        if not (len(there) == 1 and there == blocking):
            lines.append(f"rank{'s' * (len(there) > 1)} {ranges(there)}: {place}")
    lines.append(f"stacks of all threads are in {folder}; {ending}" if folder else ending)
    return "\n".join(lines)


def write(path: Path, text: str, states: Mapping[int, RankState], ranks: Sequence[RankInfo]) -> None:
    """Write the report as JSON: which rank waits in what."""
    rows = [
        {"rank": rank, "host": ranks[rank].host, "pid": ranks[rank].pid, **asdict(state)}
        for rank, state in sorted(states.items())
    ]
    content = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "report": text, "culprits": culprits(states)}
    files.write_text(path, json.dumps(content | {"ranks": rows}, indent=1) + "\n")


def _by_place(states: Mapping[int, RankState]) -> dict[str, list[int]]:
    """Place -> the ranks there, the most common place first."""
    places: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        places.setdefault(state.describe(), []).append(rank)
    return dict(sorted(places.items(), key=lambda item: -len(item[1])))


def _collective(frame: FrameType) -> str:
    """The collective that a thread waits in, judged by the packages of its innermost calls; "backward" if it may wait."""
    for caller in _outwards(frame):
        module = _module(caller)
        if module.startswith(AUTOGRAD):
            return "backward"
        if module.startswith(COLLECTIVES):
            return caller.f_code.co_name
        if not module.startswith("torch."):
            return ""
    return ""


def _location(frame: FrameType, waits: bool) -> str:
    own = next(filter(_ours, _outwards(frame)), None)
    if own is None or own is frame:
        return _line(frame)
    return _line(own) if waits else f"{_line(frame)}, called from {_line(own)}"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """``frame``, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _ours(frame: FrameType) -> bool:
    return _module(frame).startswith("hpclm.")


def _line(frame: FrameType) -> str:
    """FILE:LINE in FUNCTION; files of hpclm by their path in the package."""
    path = frame.f_code.co_filename
    if _ours(frame):
        path = "hpclm" + path.rpartition("/hpclm")[2]
    return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"
