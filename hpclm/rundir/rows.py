"""Files of JSON lines.

A kill or a power cut may leave a last line without its end, or NUL bytes. Readers ignore such a line, and the next writer cuts it off.
Any other line that hpclm could not have written is damage: readers raise an error that names the file and the line.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from hpclm.base import files
from hpclm.base.errors import ConfigError

log = logging.getLogger(__name__)
Row = Mapping[str, Any]
Kind = Callable[[Any], Any]
"""The kind of a field: int (at least 0), float (finite), str, list (of numbers or strings), or a check. Null always fits."""
NUMBERS: Mapping[Kind, set[type]] = {int: {int}, float: {int, float}}
"""The types of numbers in a field of these kinds."""
TAIL_BYTES = 1 << 16  # how much ``last`` and ``tail`` read at the end of a file
BLOCK_BYTES = 1 << 18  # how much is read at once


def fits(value: Any, kind: Kind) -> bool:
    """Whether hpclm could have written ``value`` in a field of this kind."""
    if value is None:
        return True
    if kind is int:
        return type(value) is int and 0 <= value < 1 << 53  # programs that read JSON may round larger ones
    if kind is float:
        return type(value) in (int, float) and -1e300 < value < 1e300
    if kind is str:
        return isinstance(value, str)
    if kind is list:
        return isinstance(value, list) and None not in value and all(fits(v, str) or fits(v, float) for v in value)
    return bool(kind(value))


def sane(row: Any, fields: Mapping[str, Kind], needs: Collection[str] = ()) -> bool:
    """Whether ``row`` is an object that has all fields it ``needs``, with valid values in its ``fields``."""
    if not isinstance(row, dict) or any(row.get(name) is None for name in needs):
        return False
    return all(fits(row[name], fields[name]) for name in row.keys() & fields.keys())


def parsed(line: str | bytes, fields: Mapping[str, Kind], needs: Collection[str] = ()) -> dict[str, Any] | None:
    """The row in a line of JSON; None if it is not valid."""
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        return row if sane(row, fields, needs) else None
    return None


@dataclass(frozen=True)
class RowBlock:
    """Consecutive lines of a file, and the row in each line."""

    offset: int
    """The lines' position in the file, in bytes."""
    text: bytes
    """The lines, each with its newline."""
    rows: Sequence[dict[str, Any]]

    @property
    def end(self) -> int:
        """The position of the next line in the file."""
        return self.offset + len(self.text)

    def lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Each line with its row."""
        lines = (line + b"\n" for line in self.text.split(b"\n")[:-1])
        return zip(lines, self.rows, strict=True)


def row_blocks(
    path: Path | str, fields: Mapping[str, Kind], needs: Collection[str] = (), begin: int = 0
) -> Iterator[RowBlock]:
    """The rows of a file from the offset ``begin`` on, read in blocks. OSError if it cannot be read, ConfigError if a line is damaged."""
    for offset, text in blocks(path, begin):
        yield _row_block(path, offset, text, fields, needs)


def _row_block(
    path: Path | str, offset: int, text: bytes, fields: Mapping[str, Kind], needs: Collection[str]
) -> RowBlock:
    rows = _valid_rows(text, fields, needs)
    if rows is None:
        rows = []
        for place, line in _with_offsets(text, offset):
            row = parsed(line, fields, needs)
            if row is None:
                raise damaged(path, place)
            rows.append(row)
    return RowBlock(offset, text, rows)


def _valid_rows(text: bytes, fields: Mapping[str, Kind], needs: Collection[str]) -> list[dict[str, Any]] | None:
    """The rows if all lines are valid; None if a line is invalid, or only ``parsed`` can tell.

    Files have millions of lines. Parsing a block as one array and checking it field by field takes a third of the time.
    """
    with suppress(orjson.JSONDecodeError):
        count = text.count(b"\n")
        rows: list[Any] = orjson.loads(b"[%b]" % text.replace(b"\n", b",", count - 1))
        if len(rows) == count and _all_sane(rows, fields, needs):
            return rows
    return None


def _all_sane(rows: Sequence[Any], fields: Mapping[str, Kind], needs: Collection[str]) -> bool:
    """``sane`` for all ``rows``, checked field by field."""
    if {*map(type, rows)} != {dict} or any(None in [row.get(name) for row in rows] for name in needs):
        return False
    return all(all_fit([row[name] for row in rows if name in row], kind) for name, kind in fields.items())


def all_fit(values: Sequence[Any], kind: Kind) -> bool:
    """Whether all ``values`` are of this kind; of numbers, only the lowest and the highest are checked."""
    types = {*map(type, values)}
    if types and types <= NUMBERS.get(kind, set()):
        return fits(min(values), kind) and fits(max(values), kind)
    return all(fits(value, kind) for value in values)


def stream(path: Path | str, fields: Mapping[str, Kind], needs: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """The rows of a file. Errors: see ``row_blocks``."""
    for block in row_blocks(path, fields, needs):
        yield from block.rows


def last(path: Path | str, fields: Mapping[str, Kind], needs: Collection[str] = ()) -> list[dict[str, Any]]:
    """The rows in the last TAIL_BYTES of a file; empty if it cannot be read. ConfigError if a line is damaged."""
    read = list[dict[str, Any]]()
    with suppress(OSError):
        begin = max(0, os.stat(path).st_size - TAIL_BYTES)  # noqa: PTH116 - the path may be text
        for offset, text in blocks(path, begin):
            cut = 0
            if offset == begin > 0:  # the first line may begin earlier
                cut = text.index(b"\n") + 1
            read += _row_block(path, offset + cut, text[cut:], fields, needs).rows
    return read


def lines(path: Path | str) -> Iterator[tuple[int, bytes]]:
    """Each complete line of a file, with its offset. OSError if the file cannot be read."""
    for offset, block in blocks(path):
        yield from _with_offsets(block, offset)


def _with_offsets(block: bytes, offset: int) -> Iterator[tuple[int, bytes]]:
    """The lines of ``block``, which is at ``offset`` in a file, each with its own offset."""
    for line in block.split(b"\n")[:-1]:
        yield offset, line
        offset += len(line) + 1


def blocks(path: Path | str, begin: int = 0) -> Iterator[tuple[int, bytes]]:
    """The complete lines of a file from the offset ``begin`` on, in blocks: offset and content. OSError if it cannot be read."""
    with files.reader(path) as file, files.naming(path):
        offset = file.seek(begin)
        rest = b""
        size = min(BLOCK_BYTES, os.fstat(file.fileno()).st_size + 1)  # Python allocates the size that it is asked for
        for block in iter(lambda: file.read(size), b""):
            end = block.rfind(b"\n") + 1
            if end:
                whole = rest + block[:end]
                yield offset, whole
                offset += len(whole)
                rest = b""
            rest += block[end:]


def damaged(path: Path | str, offset: int) -> ConfigError:
    """The error for the line that begins at ``offset``."""
    number = 1
    with files.reader(path) as file:
        while block := file.read(min(BLOCK_BYTES, offset)):
            number += block.count(b"\n")
            offset -= len(block)
    return ConfigError(f"{path}, line {number}, is damaged: remove the line, or restore the file from a copy")


def finite(row: Row) -> dict[str, Any]:
    """``row`` with None for numbers that are not finite, because JSON has only finite ones."""
    odd = {name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    return {**row, **dict.fromkeys(odd)}


def append(path: Path, row: Row) -> None:
    """Add ``row`` as a line to a file, in one write, and fsync it. OSError if that fails."""
    mend(path)
    with files.naming(path), os.fdopen(files.appending(path), "wb") as file:
        is_new = not os.fstat(file.fileno()).st_size
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        files.sync(path.parent)


def mend(path: Path) -> None:
    """Cut off a last line without its end, and NUL bytes, which a kill or a power cut may leave; logs a warning then."""
    try:
        handle = files.opened(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    with files.naming(path), os.fdopen(handle, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        begin = size
        end = 0
        while begin and not end:
            last = begin
            begin = max(0, last - TAIL_BYTES)
            file.seek(begin)
            newline = file.read(last - begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
        if end < size:
            log.warning("%s: its last line is incomplete; %d bytes are cut off", path, size - end)
            file.truncate(end)


def tail(path: Path | str, size: int = TAIL_BYTES) -> str:
    """The last ``size`` bytes of a regular file, from the beginning of a line; empty without a file."""
    with suppress(OSError), files.reader(path) as file:
        begin = max(0, file.seek(0, os.SEEK_END) - size)
        file.seek(begin)
        text = file.read(size)
        if begin:  # in the middle of a line
            text = text.partition(b"\n")[2]
        return text.decode(errors="replace")
    return ""
