"""Print untrusted text safely: without control characters, which could control the terminal."""

import codecs
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TextIO

HIDDEN = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and newline
    r"\u2028-\u202e\u2066-\u2069"  # line separators and bidirectional controls
    r"\ud800-\udfff"  # surrogates: bytes that are not UTF-8, and half characters
)
_HIDDEN = re.compile(f"[{HIDDEN}]")
_HIDDEN_IN_LINE = re.compile(f"[{HIDDEN}\n]")

BARS = "▁▂▃▄▅▆▇█"


def plain(text: str) -> str:
    """``text`` with control characters escaped (``\\x1b``), except tabs and newlines."""
    return _HIDDEN.sub(_escaped, text)


def line(text: object) -> str:
    """``text`` on one line: as ``plain``, with newlines escaped too."""
    return _HIDDEN_IN_LINE.sub(_escaped, str(text))


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Decode chunks of a file incrementally, and encode them as ``plain`` UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    for chunk in chain(chunks, [None]):
        text = decoder.decode(chunk or b"", final=chunk is None)
        yield plain(text.replace("\r\n", "\n")).encode()


def width(text: str) -> int:
    """The columns that ``text`` takes: wide characters, such as Chinese ones, take two."""
    if text.isascii():
        return len(text)
    import wcwidth  # loading it would take a fifth of a command's start

    return wcwidth.width(text)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, in aligned columns."""
    widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(_padded, row, widths)).rstrip() for row in rows]


def _padded(cell: str, columns: int) -> str:
    return cell + " " * (columns - width(cell))


def shortened(text: str, max_width: int) -> str:
    """``text`` on at most ``max_width`` columns, cut with an ellipsis."""
    if width(text) <= max_width:
        return text
    import wcwidth

    return f"{wcwidth.clip(text, 0, max_width - 1).rstrip()}…"


def ranges(numbers: Iterable[int]) -> str:
    """[1, 3, 4, 5] -> ``1, 3-5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, dict.fromkeys((part[0], part[-1])))) for part in parts)


def many(count: int, what: str) -> str:
    """``1 document``, ``2,000 documents``, ``3 processes``."""
    if count != 1:
        what += "es" if what.endswith("s") else "s"
    return f"{count:,} {what}"


def say(text: str = "", end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """``print`` for ``plain`` text."""
    print(plain(text), end=end, file=file, flush=flush)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code == 0x0A:
        return r"\n"
    if 0xDC80 <= code <= 0xDCFF:  # surrogateescape
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value, from the lowest to the highest."""
    low = min(values, default=0.0)
    high = max(values, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


@contextmanager
def quit_key() -> Iterator[Callable[[float], bool]]:
    """A function that waits some seconds, and returns whether q was pressed. In the block, the terminal does not echo keys."""
    if not sys.stdin.isatty():
        yield lambda seconds: bool(select.select([], [], [], seconds)[0])  # only waits
        return
    keyboard = sys.stdin.fileno()

    def pressed(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while select.select([keyboard], [], [], max(0.0, until - time.monotonic()))[0]:
            keys = os.read(keyboard, 1024)
            if not keys or b"q" in keys:  # without keys, the terminal is gone
                return True
        return False

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
