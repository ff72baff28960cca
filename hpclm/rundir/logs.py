"""Print and follow logs, which may be large, replaced or without line breaks."""

import os
import re
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from hpclm import files

BLOCK = 1 << 18  # bytes that are read at once while a log is followed
LONGEST = 1 << 20  # bytes of a line; a file need not have lines
LARGEST = 1 << 28  # bytes at the end of a log in which its last lines are looked for
PAUSE = 0.2  # seconds between reads of a log that has not grown
ASK = 2.0  # seconds between checks whether the run is over


def matching(lines: Iterable[bytes], pattern: str | None) -> Iterator[bytes]:
    """Lines that ``pattern`` is found in; all without one."""
    regex = re.compile(pattern or "")
    return (line for line in lines if pattern is None or regex.search(line.decode(errors="replace").rstrip("\r\n")))


def whole(path: Path) -> Iterator[bytes]:
    """Every line of a file; very long ones in pieces."""
    with files.reader(path) as file:
        yield from _lines(file)


def last(path: Path, count: int, pattern: str | None = None) -> list[bytes]:
    """The last ``count`` lines of a file that match."""
    with files.reader(path) as file:
        lines, rest = _end(file, count, pattern)
        return [*lines, *matching([rest + b"\n"] if rest else [], pattern)][-count:] if count else []


def follow(path: Path, count: int, pattern: str | None, over: Callable[[], bool]) -> Iterator[bytes]:
    """The last ``count`` lines, then every new line, until ``over`` is true and nothing was written since.

    Like ``tail -F``: a file that is replaced or truncated is read from its beginning, and a missing one is waited for.
    """
    file: BinaryIO | None = None
    rest, asked, ending = b"", time.monotonic(), False
    try:
        with suppress(OSError):
            file = files.reader(path)
            lines, rest = _end(file, count, pattern)
            yield from lines
        while True:
            if file is None:
                with suppress(OSError):
                    file = files.reader(path)
            part = file.read(BLOCK) if file else b""
            if part:
                complete, newline, rest = (rest + part).rpartition(b"\n")
                yield from matching([line + b"\n" for line in complete.split(b"\n")] if newline else [], pattern)
                if len(rest) > LONGEST:
                    yield from matching([rest], pattern)
                    rest = b""
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
    """Wait; BrokenPipeError as soon as standard output is closed."""
    try:
        watched = select.poll()
        watched.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError, AttributeError):
        time.sleep(seconds)
        return
    if watched.poll(seconds * 1000):
        raise BrokenPipeError


def _lines(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.readline(LONGEST), b"")


def _end(file: BinaryIO, count: int, pattern: str | None) -> tuple[deque[bytes], bytes]:
    """The last ``count`` complete lines that match, and the beginning of a line after them; ``file`` is read to its end."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - LARGEST))
    rest = b""

    def complete() -> Iterator[bytes]:
        nonlocal rest
        for line in _lines(file):
            if line.endswith(b"\n") or len(line) == LONGEST:
                yield line
            else:
                rest = line

    return deque(matching(complete(), pattern), maxlen=count), rest


def _replaced(file: BinaryIO, path: Path) -> bool:
    """Whether ``path`` is another file now, or shorter than what was read of it."""
    try:
        now, held = path.stat(), os.fstat(file.fileno())
    except OSError:
        return False  # still the one to read, until another takes its name
    return (now.st_dev, now.st_ino) != (held.st_dev, held.st_ino) or now.st_size < file.tell()
