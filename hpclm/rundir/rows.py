"""The fields of the JSON lines in a run's files: read while they are written, and after disks that were full.

A line that is truncated, or that hpclm could not have written, is skipped.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpclm import files

Row = Mapping[str, Any]
Check = Callable[[Any], bool]
TAIL = 1 << 16  # bytes at the end of a file that are read
HIGHEST = 1 << 53  # whole numbers below it mean the same to every program that reads JSON
LONGEST = 4096  # characters of a name or a path
LOST = "metrics.lost.jsonl"  # lines of metrics.jsonl whose steps a later attempt did again
PIDS = 1 << 22  # Linux has no process of a higher number


def _integer(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value < high


def _number(low: float, high: float) -> Check:
    return lambda value: type(value) in (int, float) and low <= value < high


whole = _integer(0, HIGHEST)
count = _integer(1, HIGHEST)
process = _integer(1, PIDS + 1)
figure = _number(-1e300, 1e300)
duration = _number(0, 1e15)
"""Seconds, or a rate per second."""


def text(value: Any) -> bool:
    """A word or more on one line."""
    return isinstance(value, str) and len(value) <= LONGEST and value.isprintable()


def path(value: Any) -> bool:
    """A possible path, with any characters in its names."""
    return isinstance(value, str) and len(value) <= LONGEST and "\0" not in value


def job(value: Any) -> bool:
    """A job ID."""
    return whole(value) or text(value)


def listed(check: Check) -> Check:
    """A list of such values."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def maybe(check: Check) -> Check:
    """The same, or None."""
    return lambda value: value is None or check(value)


def scores(value: Any) -> bool:
    """Scores at tasks: task -> metric -> number, or None where it is not finite."""
    return isinstance(value, dict) and all(
        isinstance(row, dict) and all(map(maybe(figure), row.values())) for row in value.values()
    )


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` with None for numbers that are not finite, which JSON has not."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


texts = listed(text)
# The fields that are read. A row may lack some of them, and may have others.
STEP = {
    "step": whole,
    **dict.fromkeys(("loss", "validation_loss", "grad_norm", "lr", "loss_scale"), maybe(figure)),  # None: not finite
    **dict.fromkeys(("step_seconds", "tokens_per_second"), maybe(duration)),
    "samples": whole,
    "time": duration,
    "spiking_since": whole,
    "part": text,
    "tasks": scores,
}
ATTEMPT = {
    **dict.fromkeys(("time", "host", "launcher", "after"), text),
    "from_step": maybe(whole),
    "steps": maybe(whole),
    **dict.fromkeys(("size", "nodes"), count),
    "hosts": texts,
    "pid": process,
    "job_id": maybe(job),
    "restart": whole,
    "config": path,
    "back_to": whole,
    "began": duration,
    **dict.fromkeys(("git", "code"), maybe(text)),
}
END = {"attempt": whole, "code": whole, "step": whole, "ending": text, "time": text}
SUBMISSION = {
    **dict.fromkeys(("cluster", "job_id", "host", "time"), text),
    **dict.fromkeys(("nodes", "tasks_per_node"), whole),
    **dict.fromkeys(("log", "folder"), path),
    "script": maybe(path),
    "steps": maybe(whole),
    "command": listed(lambda word: isinstance(word, str)),
}
HOLDER = {"host": text, "pid": process, "job": maybe(job), "generation": count, "start": whole, "token": text}
SLOW = {"rank": whole, "host": text, "times": duration}


def sane(row: Any, fields: Mapping[str, Check], needs: Iterable[str] = ()) -> bool:
    """Whether ``row`` is an object that has all fields it ``needs``, with valid values in its ``fields``."""
    if not isinstance(row, dict) or not row.keys() >= set(needs):
        return False
    return all(fields[name](row[name]) for name in row.keys() & fields.keys())


def parsed(line: str, fields: Mapping[str, Check], needs: Iterable[str] = ()) -> dict[str, Any] | None:
    """The row in a line of JSON; None if it is not valid."""
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        return row if sane(row, fields, needs) else None
    return None


def parsed_lines(text: str, fields: Mapping[str, Check], needs: Iterable[str] = ()) -> list[Row]:
    """The valid rows in the lines of a text."""
    return [row for line in text.splitlines() if (row := parsed(line, fields, needs))]


def append(path: Path, row: Row) -> None:
    """Add a line to a file of JSON objects, in one write; on a new line even if the last one was truncated by a power cut."""
    handle = files.opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        os.write(handle, b"\n" * torn + json.dumps(row).encode() + b"\n")
    finally:
        os.close(handle)


def tail(path: Path | str, size: int = TAIL) -> str:
    """The last ``size`` bytes of a regular file, from the beginning of a line; empty without a file."""
    try:
        handle = files.opened(path)
        try:
            end = os.fstat(handle).st_size
            begin = max(0, end - size)
            text = os.pread(handle, end - begin, begin)
        finally:
            os.close(handle)
    except OSError:
        return ""
    return (text.partition(b"\n")[2] if begin else text).decode(errors="replace")
