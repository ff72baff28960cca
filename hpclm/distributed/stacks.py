"""Where this process is: the Python stacks of its threads, and one line on what its main thread does or waits for."""

import faulthandler
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

HERE = str(Path(__file__).parents[1])
HELPERS = "hpclm-"  # prefix of the names of helper threads, which do no training work
COLLECTIVES = (
    "/torch/distributed/distributed_c10d.py",
    "/hpclm/parallel/collectives.py",
)
UNDER = ("/torch/distributed/c10d_logger.py", "/torch/_ops.py")  # frames around the collectives
BACKWARD = "_engine_run_backward"  # computes, or waits for a collective, both outside Python
WAITING = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py")


@dataclass(frozen=True)
class Position:
    """What a thread is doing."""

    location: str
    """The innermost line of hpclm, after the innermost line of all if that is not hpclm's."""
    collective: str = ""
    """The collective it waits in; "backward" if it may wait in one; empty if in none."""
    debugged: bool = False
    """Whether it is in a debugger."""


def main_frame() -> FrameType | None:
    """The frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def collective(frame: FrameType | None) -> str:
    """The collective that a thread waits in; "backward" if it may; empty if in none."""
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


def reads_data(frame: FrameType | None) -> bool:
    """Whether a thread reads data, or waits for it."""
    return any(each.f_code.co_filename.startswith(f"{HERE}/data/") for each in _outwards(frame, 12))


def position() -> Position:
    """What this process does: its main thread, or the training thread that the main thread waits for."""
    frames = sys._current_frames()
    main = frames.pop(threading.main_thread().ident or 0, None)
    found = describe(main)
    if found.collective or main is None or not main.f_code.co_filename.endswith(WAITING):
        return found
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in frames.items():
        if not names.get(ident, HELPERS).startswith(HELPERS) and any(map(_ours, _outwards(frame))):
            return Position(f"{describe(frame).location}, in the thread {names[ident]} that {found.location} waits for")
    return found


def describe(frame: FrameType | None) -> Position:
    """What the thread of ``frame`` does."""
    if frame is None:
        return Position("nowhere: the main thread has ended")
    outwards = list(_outwards(frame))
    own = next((each for each in outwards if _ours(each)), None)
    waiting = collective(frame)
    text = _line(own or frame)
    if own is not None and own is not frame and not waiting:
        text = f"{_line(frame)}, called from {text}"
    debugged = any(each.f_code.co_filename.endswith(("/pdb.py", "/bdb.py")) for each in outwards)
    return Position(text, waiting, debugged)


def write(path: Path, head: str) -> None:
    """Write the stacks of all threads to ``path``, below the line ``head``."""
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
    """FILE:LINE in FUNCTION; files of hpclm by their relative path."""
    path = frame.f_code.co_filename
    if path.startswith(HERE):
        path = "hpclm" + path[len(HERE) :]
    return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"
