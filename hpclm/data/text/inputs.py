"""The text that people have: JSONL and plain text, as it is or compressed, many files at once, or a pipe.

Inputs are read in order, a block of whole lines at a time, so that memory does not grow with a file.
"""

import gzip
import io
import logging
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

from hpclm.errors import ConfigError
from hpclm.files import readable

log = logging.getLogger(__name__)
CHUNK = 1 << 19  # bytes of text in a chunk, more where one line is longer
PIECE = 1 << 13  # compressed bytes that zstandard is given at a time: what it makes of them is held in memory
WINDOW = 1 << 31  # bytes of window that zstandard may use: what `zstd --long=31` writes
MARK = b"\xef\xbb\xbf"  # at the start of UTF-8 files that Windows writes

Format = Literal["jsonl", "lines", "files"]
Packing = Literal["", "gz", "zst"]


@dataclass(frozen=True)
class Input:
    """One file, or standard input with the path "-"."""

    path: str
    format: Format
    packing: Packing
    size: int
    """Bytes on disk; 0 for standard input."""
    changed: int
    """When it was last written, in ns."""

    @property
    def name(self) -> str:
        """How messages call it."""
        return "standard input" if self.path == "-" else self.path

    @property
    def whole(self) -> bool:
        """Whether reading can only begin at its first byte."""
        return bool(self.packing) or self.format == "files" or self.path == "-"


@dataclass(frozen=True)
class Chunk:
    """Some whole lines of an input, or with format "files" all of it."""

    source: Input
    text: bytearray
    first: int
    """Number of the first line, from 1, counted from byte ``begin``."""
    begin: int
    """Byte of the input that reading began at."""
    consumed: int
    """Bytes of the file, compressed if it is, that were read for this chunk."""

    def where(self, line: int) -> str:
        """FILE:LINE of the chunk's line number ``line``, counted from 0; FILE for an input that is one document."""
        if self.source.format == "files":
            return self.source.name
        return f"{self.source.name}:{self.first + line + lines_before(self.source.path, self.begin)}"


@dataclass(frozen=True)
class Share:
    """Part ``part``, from 0, of the ``parts`` that the inputs' bytes are cut into."""

    part: int = 0
    parts: int = 1


def find(words: list[str], format: Format | None) -> list[Input]:
    """The inputs that ``words`` name: files, patterns such as 'data/*.jsonl.zst', or "-" for standard input.

    A pattern's files are sorted. ``format`` None: as each name suggests. ConfigError for what is not there.
    """
    found = []
    for word in words:
        if word == "-":
            if format is None:
                raise ConfigError("--input - has no name to guess from; give --format jsonl, lines or files")
            found.append(Input("-", format, "", 0, 0))
            continue
        paths = [word]
        if any(sign in word for sign in "*?[") and not Path(word).exists():
            matches = glob(word, recursive=True)  # noqa: PTH207 (Path.glob refuses absolute patterns)
            paths = sorted(path for path in matches if not Path(path).is_dir())
            if not paths:
                raise ConfigError(f"input {word} matches no file; looked from {Path.cwd()}")
        for path in paths:
            status = readable(path, "input").stat()
            found.append(Input(path, format or guess(path), packing(path), status.st_size, status.st_mtime_ns))
    twice = [path for path, count in Counter(Path(each.path).resolve() for each in found).items() if count > 1]
    if twice:
        log.warning("%s is given several times, and is read as often", ", ".join(map(str, twice)))
    if sum(source.path == "-" for source in found) > 1:
        raise ConfigError("--input - is given twice; standard input can be read once")
    return found


def packing(path: str | Path) -> Packing:
    """How a file's name says it is compressed."""
    suffix = Path(path).suffix[1:]
    return cast(Packing, suffix) if suffix in ("gz", "zst") else ""


def guess(path: str | Path) -> Format:
    """The format that a file's name suggests: jsonl for .jsonl and .json, else lines; .gz and .zst do not count."""
    name = Path(path)
    return "jsonl" if Path(name.stem if packing(name) else name).suffix in (".jsonl", ".json") else "lines"


def chunks(inputs: list[Input], share: Share = Share()) -> Iterator[Chunk]:
    """The share's part of the inputs in order, some lines at a time; ConfigError for a damaged compressed file.

    A document belongs to the share that its first byte lies in; compressed files and files that are one document are
    not cut, and belong to the share that they begin in.
    """
    total = sum(source.size for source in inputs)
    low, high = (total * part // share.parts for part in (share.part, share.part + 1))
    last = share.part == share.parts - 1
    start = 0
    for source in inputs:
        begin, end = max(low - start, 0), min(high - start, source.size)
        mine = low <= start and (start < high or last)  # the last share takes empty files at the end
        start += source.size
        if source.whole:
            if mine:
                yield from _whole(source)
        elif begin < end:
            yield from _lines(source, begin, end)


def lines_before(path: str, byte: int) -> int:
    """Lines that end before ``byte`` of a file."""
    count = 0
    if byte:
        with open(path, "rb") as file:
            while byte and (block := file.read(min(CHUNK, byte))):
                count += block.count(b"\n")
                byte -= len(block)
    return count


class _Reader(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _lines(source: Input, begin: int, end: int) -> Iterator[Chunk]:
    """The lines whose first byte lies in [begin, end) of a plain file."""
    with open(source.path, "rb", buffering=0) as file:
        here = begin
        if begin:
            file.seek(begin - 1)  # a line begins here if the byte before ends one
            here = begin - 1
            while block := file.read(CHUNK):
                newline = block.find(b"\n") + 1
                here += newline or len(block)
                if newline:
                    break
            file.seek(here)
        first, consumed = 1, here - begin
        begin = here
        for text in _blocks(file, end - here):
            consumed += len(text)
            lines = text.count(b"\n")
            yield Chunk(source, text if begin else _unmarked(text, first), first, begin, consumed)
            first, consumed = first + lines, 0


def _whole(source: Input) -> Iterator[Chunk]:
    """All of an input."""
    with _opened(source) as (file, raw):
        if source.format == "files":
            text = bytearray()
            while block := file.read(CHUNK):
                text += block
            yield Chunk(source, _unmarked(text, 1), 1, 0, source.size or len(text))
            return
        first, before = 1, 0
        for text in _blocks(file):
            here = raw.tell() if source.packing else before + len(text)
            lines = text.count(b"\n")
            yield Chunk(source, _unmarked(text, first), first, 0, here - before)
            first, before = first + lines, here


def _blocks(file: _Reader, limit: int | None = None) -> Iterator[bytearray]:
    """Whole lines, about CHUNK bytes of them at a time; with ``limit`` those that begin before that byte from here."""
    if limit is not None and limit <= 0:
        return
    given = 0
    lines = bytearray()  # grows in place: a line of gigabytes is held once
    while block := file.read(CHUNK):
        whole = block.rfind(b"\n") + 1
        lines += memoryview(block)[: whole or None]
        if not whole:
            continue
        if limit is not None and given + len(lines) >= limit:
            del lines[lines.find(b"\n", limit - given - 1) + 1 :]
            yield lines
            return
        given += len(lines)
        yield lines
        lines = bytearray(memoryview(block)[whole:])
    if lines:
        yield lines


def _unmarked(text: bytearray, first: int) -> bytearray:
    """``text``, which begins with line ``first``, without the mark that some UTF-8 files begin with."""
    if first == 1 and text.startswith(MARK):
        del text[: len(MARK)]
    return text


@contextmanager
def _opened(source: Input) -> Iterator[tuple[_Reader, BinaryIO]]:
    """What reads the input's text, and the file whose position says how far; ConfigError if it is damaged."""
    if source.path == "-":
        yield sys.stdin.buffer, sys.stdin.buffer
        return
    with open(source.path, "rb") as raw:
        if source.packing and not os.fstat(raw.fileno()).st_size:
            raise ConfigError(f"{source.path} is empty, which no .{source.packing} file is; copy or make it again")
        try:
            if source.packing == "gz":
                with gzip.GzipFile(fileobj=raw) as file:
                    yield cast(_Reader, file), raw
            elif source.packing == "zst":
                yield io.BufferedReader(_Zstandard(raw), CHUNK), raw
            else:
                yield raw, raw
        except (EOFError, zlib.error, gzip.BadGzipFile, _Damaged) as error:
            raise ConfigError(
                f"{source.path} is cut short, damaged, or no .{source.packing} file: {error}; copy or make it again"
            ) from None


class _Damaged(Exception):
    """zstandard refuses the file."""


class _Zstandard(io.RawIOBase):
    """All frames of a .zst file; notices when the last one is cut short, as the library's own reader does not."""

    def __init__(self, raw: BinaryIO):
        import zstandard

        self._raw = raw
        self._error = zstandard.ZstdError
        self._library = zstandard.ZstdDecompressor(max_window_size=WINDOW)
        self._frame = self._library.decompressobj()
        self._within = False
        self._rest = self._text = b""
        self._given = 0

    def readable(self) -> bool:
        """True, for io.BufferedReader."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill some of ``buffer``; 0 at the end."""
        while self._given == len(self._text):
            piece = self._rest or self._raw.read(PIECE)
            if not piece:
                if self._within:
                    raise _Damaged("it ends within a frame")
                return 0
            try:
                self._text, self._given = self._frame.decompress(piece), 0
            except self._error as error:
                raise _Damaged(error) from None
            self._within, self._rest = not self._frame.eof, self._frame.unused_data
            if not self._within:
                self._frame = self._library.decompressobj()
        found = memoryview(self._text)[self._given : self._given + len(buffer)]
        buffer[: len(found)] = found
        self._given += len(found)
        return len(found)
