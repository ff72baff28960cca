"""attempts.jsonl, a line for each attempt at a run, and ends.jsonl, one for each attempt that exited cleanly; nothing else opens them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpclm.errors import unread
from hpclm.rundir import rows
from hpclm.rundir.rows import Kind, Row, fits

NAME, ENDS = "attempts.jsonl", "ends.jsonl"
WAY_OUT = "move it away, or choose another out"


def is_job_id(value: Any) -> bool:
    """Whether ``value`` may be the ID of a job."""
    return fits(value, int) or fits(value, str)


ATTEMPT: dict[str, Kind] = {
    **dict.fromkeys(("time", "host", "machine", "launcher", "after", "config", "git", "code"), str),
    **dict.fromkeys(("from_step", "steps", "size", "nodes", "pid", "restart", "back_to", "micro_size"), int),
    "hosts": list,
    "job_id": is_job_id,
    "began": float,
}
"""The fields of an attempt that are read. A row may lack some of them, and may have others."""
END: dict[str, Kind] = {
    **dict.fromkeys(("attempt", "code", "step", "trained", "restart"), int),
    **dict.fromkeys(("ending", "time"), str),
    "job_id": is_job_id,
}
"""The fields of an end. ``trained`` is in the rows of a job's supervisor only: 1 if that start of the job began to train."""


def append(out: Path, attempt: Row) -> None:
    """Add the line of an attempt that begins."""
    rows.append(out / NAME, attempt)


def append_end(out: Path, end: Row) -> None:
    """Add the line of an attempt that ends cleanly; OSError if it cannot be written."""
    rows.append(out / ENDS, end)


def check_attempts_readable(out: Path) -> None:
    """ConfigError, or HpclmError for the disk, if ``read`` or ``read_ends`` cannot read its file."""
    read(out)
    read_ends(out)


def read(out: Path) -> list[dict[str, Any]]:
    """The attempts at the run in ``out``, oldest first; none where there is no file.
    ConfigError if it cannot be read, HpclmError for the disk: its attempts must not be forgotten."""
    return _read(out / NAME, ATTEMPT)


def read_ends(out: Path) -> list[dict[str, Any]]:
    """How attempts ended; otherwise as ``read``."""
    return _read(out / ENDS, END)


def _read(path: Path, fields: Mapping[str, Kind]) -> list[dict[str, Any]]:
    try:
        return list(rows.stream(path, fields))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unread(error, path, WAY_OUT) from None


def stream(out: Path) -> Iterator[dict[str, Any]]:
    """The attempts that have a time, oldest first; OSError if the file cannot be read."""
    return rows.stream(out / NAME, ATTEMPT, ["time"])


def stream_ends(out: Path) -> Iterator[dict[str, Any]]:
    """How attempts ended; OSError if the file cannot be read."""
    return rows.stream(out / ENDS, END, ["code"])


def last(out: Path) -> Row:
    """The last attempt, quickly; empty without one, or if the file cannot be read."""
    return next(reversed(rows.last(f"{out}/{NAME}", ATTEMPT)), {})


def last_end(out: Path) -> Row:
    """How the last attempt that exited cleanly ended, quickly; empty without one, or if the file cannot be read."""
    return next((end for end in reversed(rows.last(f"{out}/{ENDS}", END)) if end.get("ending") is not None), {})
