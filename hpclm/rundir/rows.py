"""Files of JSON lines, as a run has several: read while they are written, and after disks that were full.

A line that is truncated, or that hpclm could not have written, is skipped. Which fields a file has, its own module says.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpclm import files

Row = Mapping[str, Any]
Kind = Callable[[Any], Any]
"""Of a field: int (at least 0), float (finite), str, list (of numbers or strings), or a check. Null is always possible."""
TAIL_BYTES = 1 << 16  # bytes at the end of a file that are read
BLOCK_BYTES = 1 << 20  # bytes that are read at once
MAX_LINE_BYTES = 1 << 22  # bytes of a row
MAX_FILE_BYTES = 1 << 32  # bytes of a file of rows: some ten million steps
MAX_TEXT_LENGTH = 4096  # characters of a name or a path


def fits(value: Any, kind: Kind) -> bool:
    """Whether hpclm could have written this value in a field of this kind."""
    if value is None:
        return True
    if kind is int:
        return type(value) is int and 0 <= value < 1 << 53  # which means the same to every program that reads JSON
    if kind is float:
        return type(value) in (int, float) and -1e300 < value < 1e300
    if kind is str:
        return isinstance(value, str) and len(value) <= MAX_TEXT_LENGTH
    if kind is list:
        return isinstance(value, list) and None not in value and all(fits(v, str) or fits(v, float) for v in value)
    return bool(kind(value))


def sane(row: Any, fields: Mapping[str, Kind], needs: Iterable[str] = ()) -> bool:
    """Whether ``row`` is an object that has all fields it ``needs``, with valid values in its ``fields``."""
    if not isinstance(row, dict) or any(row.get(name) is None for name in needs):
        return False
    return all(fits(row[name], fields[name]) for name in row.keys() & fields.keys())


def parsed(line: str, fields: Mapping[str, Kind], needs: Iterable[str] = ()) -> dict[str, Any] | None:
    """The row in a line of JSON; None if it is not valid."""
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        return row if sane(row, fields, needs) else None
    return None


def parsed_lines(text: str, fields: Mapping[str, Kind], needs: Iterable[str] = ()) -> list[Row]:
    """The valid rows in the lines of a text."""
    return [row for line in text.splitlines() if (row := parsed(line, fields, needs))]


def stream(
    path: Path | str, fields: Mapping[str, Kind], needs: Iterable[str] = (), max_bytes: int = MAX_FILE_BYTES
) -> Iterator[dict[str, Any]]:
    """The valid rows of a file, of which a block at a time is read; OSError if it cannot be, or has more than ``max_bytes`` bytes."""
    for _, lines in blocks(path, max_bytes=max_bytes):
        for line in lines.split(b"\n"):
            if (row := parsed(line.decode(errors="replace"), fields, needs)) is not None:
                yield row


def blocks(path: Path | str, begin: int = 0, max_bytes: int = MAX_FILE_BYTES) -> Iterator[tuple[int, bytes]]:
    """The lines of a file from the offset ``begin`` on, some at a time: their offset and content.

    A line that is longer than MAX_LINE_BYTES, which no row is, comes as an empty one. Only the last may lack its line break.
    OSError if the file cannot be read, or has more than ``max_bytes`` bytes.
    """
    with files.reader(path) as file, files.naming(path):
        files.check_size(file, path, max_bytes)
        offset, rest, long = file.seek(begin), b"", False
        while block := file.read(BLOCK_BYTES):
            hole = 0 if block.strip(b"\0") else files.hole_at(file)
            if hole > MAX_LINE_BYTES:  # is not read: it may be gigabytes
                if not long:
                    yield offset, b"\n"
                offset, rest, long = file.seek(hole, os.SEEK_CUR), b"", True
                continue
            if long:
                end = block.find(b"\n") + 1
                offset += end or len(block)
                block, long = block[end:] if end else b"", not end
            block = rest + block
            end = block.rfind(b"\n") + 1
            if end:
                yield offset, block[:end]
            offset, rest = offset + end, block[end:]
            if len(rest) > MAX_LINE_BYTES:
                yield offset, b"\n"
                offset, rest, long = offset + len(rest), b"", True
        if rest:
            yield offset, rest


def finite(row: Row) -> dict[str, Any]:
    """``row`` with None for numbers that are not finite, which JSON has not."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


def append(path: Path, row: Row) -> None:
    """Add a line to a file of JSON objects, in one write; on a new line even if the last one was truncated by a power cut."""
    handle = files.opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    try:
        with files.naming(path):
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            os.write(handle, b"\n" * torn + json.dumps(row).encode() + b"\n")
    finally:
        os.close(handle)


def tail(path: Path | str, size: int = TAIL_BYTES) -> str:
    """The last ``size`` bytes of a regular file, from the beginning of a line; empty without a file."""
    with suppress(OSError), files.reader(path) as file:
        begin = max(0, file.seek(0, os.SEEK_END) - size)
        file.seek(begin)
        text = file.read(size)
        return (text.partition(b"\n")[2] if begin else text).decode(errors="replace")
    return ""
