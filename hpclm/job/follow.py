"""The lines of a log as it grows: over restarts, and when it is truncated, replaced or not there yet."""

import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

BLOCK = 1 << 18
PAUSE = 0.2  # seconds between looks at a log that has not grown
ASK = 2.0  # seconds between questions whether the run is over


def matching(lines: Iterable[bytes], pattern: str | None) -> Iterator[bytes]:
    """Lines that ``pattern`` is found in; all without one."""
    wanted = re.compile(pattern or "")
    return (line for line in lines if pattern is None or wanted.search(line.decode(errors="replace").rstrip("\r\n")))


def whole(path: Path) -> Iterator[bytes]:
    """Every line of a file."""
    with path.open("rb") as file:
        yield from file


def last(path: Path, count: int, pattern: str | None = None) -> list[bytes]:
    """The last ``count`` lines of a file that match."""
    with path.open("rb") as file:
        return _last(file, file.seek(0, os.SEEK_END), count, pattern)


def follow(path: Path, count: int, pattern: str | None, over: Callable[[], bool]) -> Iterator[bytes]:
    """The last ``count`` lines, then every line that comes, until ``over`` is true and nothing has come since.

    Like ``tail -F``: a file that is replaced or truncated is read from its beginning, one that is missing is waited for.
    """
    file: BinaryIO | None = None
    rest, asked, ending = b"", time.monotonic(), False
    try:
        with suppress(OSError):
            file = path.open("rb")
            end = _whole_lines(file)
            yield from _last(file, end, count, pattern)
            file.seek(end)
        while True:
            if file is None:
                with suppress(OSError):
                    file = path.open("rb")
            part = file.read(BLOCK) if file else b""
            if part:
                lines, newline, rest = (rest + part).rpartition(b"\n")
                yield from matching([line + b"\n" for line in lines.split(b"\n")] if newline else [], pattern)
            elif file and _replaced(file, path):
                file.close()
                file, rest = None, b""
            elif ending:
                yield from matching([rest] if rest else [], pattern)
                return
            elif time.monotonic() - asked > ASK:
                ending, asked = over(), time.monotonic()  # what was written meanwhile is read once more
            else:
                if rest and pattern is None:  # a line that is still being written
                    yield rest
                    rest = b""
                pause(PAUSE)
    finally:
        if file:
            file.close()


def pause(seconds: float) -> None:
    """Wait; BrokenPipeError as soon as nobody reads standard output any more."""
    try:
        watched = select.poll()
        watched.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError, AttributeError):
        time.sleep(seconds)
        return
    if watched.poll(seconds * 1000):
        raise BrokenPipeError


def _whole_lines(file: BinaryIO) -> int:
    """Where the last whole line of a file ends."""
    size = file.seek(0, os.SEEK_END)
    begin = max(0, size - BLOCK)
    file.seek(begin)
    return begin + file.read(size - begin).rfind(b"\n") + 1


def _replaced(file: BinaryIO, path: Path) -> bool:
    """Whether ``path`` is another file now, or shorter than what was read of it."""
    try:
        now, held = path.stat(), os.fstat(file.fileno())
    except OSError:
        return False  # still the one to read, until another takes its name
    return (now.st_dev, now.st_ino) != (held.st_dev, held.st_ino) or now.st_size < file.tell()


def _last(file: BinaryIO, end: int, count: int, pattern: str | None) -> list[bytes]:
    """The last ``count`` matching lines before byte ``end``."""
    found: list[bytes] = []
    lines = matching(_backwards(file, end), pattern)
    while len(found) < count and (line := next(lines, None)) is not None:
        found.append(line)
    return found[::-1]


def _backwards(file: BinaryIO, end: int) -> Iterator[bytes]:
    """The lines before byte ``end``, the last one first."""
    if not end:
        return
    file.seek(end - 1)
    place, rest = end - (file.read(1) == b"\n"), b""
    while place:
        size = min(BLOCK, place)
        place -= size
        file.seek(place)
        rest, *lines = (file.read(size) + rest).split(b"\n")
        yield from (line + b"\n" for line in reversed(lines))
    yield rest + b"\n"
