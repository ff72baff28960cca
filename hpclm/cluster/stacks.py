"""Where this process is: the Python stacks of its threads, and in one line what its main thread does or waits for."""

import faulthandler
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

HERE = str(Path(__file__).parents[1])
OWN = "hpclm-"  # what the threads are called that look after a process; they are no part of its work
COLLECTIVES = ("/torch/distributed/distributed_c10d.py", "/hpclm/parallel/collectives.py")
UNDER = ("/torch/distributed/c10d_logger.py", "/torch/_ops.py")  # they call, or are called by, what is asked for
BACKWARD = "_engine_run_backward"  # it computes, or waits for a collective: both happen outside of Python
WAITING = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py")


@dataclass(frozen=True)
class Stand:
    """What a thread does."""

    at: str
    """Its innermost line of hpclm, and the innermost line of all where that is somebody else's."""
    waits: str = ""
    """The collective it waits in, "backward" where it may wait in one; empty: in none."""
    debugged: bool = False


def main_frame() -> FrameType | None:
    """What the main thread is doing."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def waits(frame: FrameType | None) -> str:
    """The collective that a thread waits in, "backward" where it may, or nothing."""
    for each in _outwards(frame, 12):
        name, path = each.f_code.co_name, each.f_code.co_filename
        if name == BACKWARD:
            return "backward"
        if path.endswith(COLLECTIVES):
            if name not in ("wrapper", "__torch_dispatch__") and not name.startswith("_"):
                return name
        elif not path.endswith(UNDER):
            return ""
    return ""


def reads(frame: FrameType | None) -> bool:
    """Whether a thread waits for its data."""
    return any(each.f_code.co_filename.startswith(f"{HERE}/data/") for each in _outwards(frame, 12))


def stand() -> Stand:
    """What this process does: its main thread, or the thread of its work that the main thread waits for."""
    frames = sys._current_frames()
    main = frames.pop(threading.main_thread().ident or 0, None)
    found = describe(main)
    if found.waits or main is None or not main.f_code.co_filename.endswith(WAITING):
        return found
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in frames.items():
        if not names.get(ident, OWN).startswith(OWN) and any(map(_ours, _outwards(frame))):
            return Stand(f"{describe(frame).at}, in the thread {names[ident]} that {found.at} waits for")
    return found


def describe(frame: FrameType | None) -> Stand:
    """What the thread of ``frame`` does."""
    if frame is None:
        return Stand("nowhere: the main thread has ended")
    outwards = list(_outwards(frame))
    own = next((each for each in outwards if _ours(each)), None)
    collective = waits(frame)
    text = _line(own or frame)
    if own is not None and own is not frame and not collective:
        text = f"{_line(frame)}, called from {text}"
    debugged = any(each.f_code.co_filename.endswith(("/pdb.py", "/bdb.py")) for each in outwards)
    return Stand(text, collective, debugged)


def write(path: Path, head: str) -> None:
    """Write the stacks of all threads to ``path``, under a line that says whose they are."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        print(head, file=file, flush=True)
        faulthandler.dump_traceback(file, all_threads=True)


def _outwards(frame: FrameType | None, most: int = 1000) -> Iterator[FrameType]:
    """``frame``, its caller, and so on."""
    while frame is not None and most:
        yield frame
        frame, most = frame.f_back, most - 1


def _ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(HERE)


def _line(frame: FrameType) -> str:
    """FILE:LINE in FUNCTION; files of hpclm by their place in it."""
    path = frame.f_code.co_filename
    if path.startswith(HERE):
        path = "hpclm" + path[len(HERE) :]
    return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"
