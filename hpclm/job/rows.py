"""What a line of a run's own files must be to count: they are read while they are written, and after disks that were full.

A line that is cut short, or that holds something else than hpclm writes, is passed over.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Check = Callable[[Any], bool]
TAIL = 1 << 16  # bytes at the end of a file that are read
HIGHEST = 1 << 53  # whole numbers below it mean the same to every program that reads JSON
LONGEST = 4096  # characters of a name or a path
PIDS = 1 << 22  # Linux has no process of a higher number


def whole(value: Any) -> bool:
    """A count: a whole number from 0."""
    return type(value) is int and 0 <= value < HIGHEST


def count(value: Any) -> bool:
    """A whole number from 1."""
    return whole(value) and value > 0


def process(value: Any) -> bool:
    """A number that a process can have."""
    return count(value) and value <= PIDS


def figure(value: Any) -> bool:
    """Something measured."""
    return type(value) in (int, float) and abs(value) < 1e300


def duration(value: Any) -> bool:
    """Seconds, or something a second."""
    return figure(value) and 0 <= value < 1e15


def text(value: Any) -> bool:
    """A word or more on one line."""
    return isinstance(value, str) and len(value) <= LONGEST and value.isprintable()


def path(value: Any) -> bool:
    """What may be a path, whatever characters are in its names."""
    return isinstance(value, str) and len(value) <= LONGEST and "\0" not in value


def job(value: Any) -> bool:
    """A scheduler's number of a job."""
    return whole(value) or text(value)


def texts(value: Any) -> bool:
    """A list of them."""
    return isinstance(value, list) and all(map(text, value))


def words(value: Any) -> bool:
    """A command line, whatever is in its words."""
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def maybe(check: Check) -> Check:
    """The same, or None."""
    return lambda value: value is None or check(value)


# What the fields must be that are read; a row need not have all of them, and may have others.
STEP = {
    "step": whole,
    **dict.fromkeys(("loss", "validation_loss", "grad_norm", "lr", "loss_scale"), maybe(figure)),  # None: not finite
    **dict.fromkeys(("step_seconds", "tokens_per_second"), maybe(duration)),
    "samples": whole,
    "part": text,
}
ATTEMPT = {
    **dict.fromkeys(("time", "host", "launcher"), text),
    "from_step": maybe(whole),
    "steps": maybe(whole),
    "size": count,
    "hosts": texts,
    "pid": process,
    "job_id": maybe(job),
}
END = {"attempt": whole, "code": whole, "step": whole}
SUBMISSION = {
    **dict.fromkeys(("cluster", "job_id", "host", "time"), text),
    **dict.fromkeys(("nodes", "tasks_per_node"), whole),
    **dict.fromkeys(("log", "folder"), path),
    "script": maybe(path),
    "command": words,
}
HOLDER = {"host": text, "pid": process, "job": maybe(job)}
SLOW = {"rank": whole, "host": text, "times": duration}


def sane(row: Any, fields: Mapping[str, Check], needs: Iterable[str] = ()) -> bool:
    """Whether ``row`` is an object that has all it ``needs``, and in whose ``fields`` stands what may stand there."""
    return (
        isinstance(row, dict)
        and all(name in row for name in needs)
        and all(check(row[name]) for name, check in fields.items() if name in row)
    )


def parsed(line: str, fields: Mapping[str, Check], needs: Iterable[str] = ()) -> dict[str, Any] | None:
    """The row in a line of JSON; None where it is none."""
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        return row if sane(row, fields, needs) else None
    return None


def tail(path: Path, size: int = TAIL) -> str:
    """The last ``size`` bytes of a file, from the beginning of a line; empty where there is none."""
    if not path.is_file():
        return ""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            text = file.read(size)
    except OSError:
        return ""
    return (text if end <= size else text.partition(b"\n")[2]).decode(errors="replace")
