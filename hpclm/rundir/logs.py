"""Print and follow logs, which may be large, replaced or without line breaks."""

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from hpclm import files

NULS = re.compile(rb"\x00{32,}")
"""What is left out of a log: a power cut may leave gigabytes of them."""
LONGEST = 1 << 20  # bytes of a line; a file need not have lines
LARGEST = 1 << 28  # bytes at the end of a log in which its last lines are looked for
PAUSE = 0.2  # seconds between reads of a log that has not grown
ASK = 2.0  # seconds between checks whether the run is over


def matching(lines: Iterable[bytes], pattern: str | None) -> Iterator[bytes]:
    """Lines that ``pattern`` matches somewhere; all without one."""
    regex = re.compile(pattern or "")
    return (line for line in lines if pattern is None or regex.search(line.decode(errors="replace").rstrip("\r\n")))


def whole(path: Path) -> Iterator[bytes]:
    """Every line of a file; very long ones in pieces."""
    with files.reader(path) as file:
        yield from _lines(file)


def last(path: Path, count: int, pattern: str | None = None) -> list[bytes]:
    """The last ``count`` lines of a file that match."""
    with files.reader(path) as file:
        return [line.removesuffix(b"\n") + b"\n" for line in _last(file, count, pattern)]


def follow(path: Path, count: int, pattern: str | None, over: Callable[[], bool]) -> Iterator[bytes]:
    """The last ``count`` lines, then every new line, until ``over`` is true and nothing was written since.

    Like ``tail -F``: a file that is replaced or truncated is read from its beginning, and a missing one is waited for.
    """
    file: BinaryIO | None = None
    rest, asked, ending = b"", time.monotonic(), False
    try:
        with suppress(OSError):
            file = files.reader(path)
            lines = _last(file, count, pattern)
            if lines and not lines[-1].endswith(b"\n"):
                rest = lines.pop()
            yield from lines
        while True:
            if file is None:
                with suppress(OSError):
                    file = files.reader(path)
            if file and (part := file.readline(LONGEST)):
                rest += part
                if rest.endswith(b"\n") or len(rest) >= LONGEST:
                    yield from matching([_new_line(rest, file)], pattern)
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
                time.sleep(PAUSE)
    finally:
        if file:
            file.close()


def _lines(file: BinaryIO) -> Iterator[bytes]:
    nuls = 0
    while line := file.readline(LONGEST):
        text = line.lstrip(b"\0")
        if not text:
            nuls += len(line) + _skip_hole(file)
            continue
        if nuls:
            line, nuls = _left_out(nuls + len(line) - len(text)) + text, 0
        if not line.endswith(b"\n"):  # of a long line, which goes on
            nuls = len(line) - len(line.rstrip(b"\0"))
            line = line[: len(line) - nuls]
        yield NULS.sub(lambda run: _left_out(len(run[0])), line)
    if nuls:
        yield _left_out(nuls) + b"\n"


def _new_line(line: bytes, file: BinaryIO) -> bytes:
    """A line that was just read at the end of a growing file, with its run of NUL bytes replaced by their count."""
    if not line.strip(b"\0"):
        return _left_out(len(line) + _skip_hole(file)) + b"\n"
    return NULS.sub(lambda run: _left_out(len(run[0])), line)


def _skip_hole(file: BinaryIO) -> int:
    hole = files.hole_at(file)
    file.seek(hole, os.SEEK_CUR)
    return hole


def _left_out(count: int) -> bytes:
    return f"[{count:,} NUL bytes are left out]".encode()


def _last(file: BinaryIO, count: int, pattern: str | None) -> deque[bytes]:
    """The last ``count`` lines that match; ``file`` is read to its end."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - LARGEST))
    return deque(matching(_lines(file), pattern), maxlen=count)


def _replaced(file: BinaryIO, path: Path) -> bool:
    """Whether ``path`` is another file now, or shorter than what was read of it."""
    try:
        now, held = path.stat(), os.fstat(file.fileno())
    except OSError:
        return False  # still the one to read, until another takes its name
    return (now.st_dev, now.st_ino) != (held.st_dev, held.st_ino) or now.st_size < file.tell()
