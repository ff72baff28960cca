"""Input files of preprocessing: JSONL or plain text, compressed or not, Parquet, or a pipe.

They are read in order, in chunks of whole lines, so memory use does not depend on the size of a file, but on its longest line.
"""

import gzip
import io
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from hpclm import extras
from hpclm.datasets import parquet
from hpclm.errors import ConfigError
from hpclm.files import readable, reader

CHUNK = 1 << 19  # bytes of text in a chunk, unless a single line is longer
LONGEST = 256  # MB of a line, unless --longest-line says otherwise
MB = 10**6
PIECE = 1 << 11  # compressed bytes passed to zstandard at a time; all of their text, up to 64 MiB, is held in memory
WINDOW = 1 << 31  # bytes of zstandard's largest window, for files of `zstd --long=31`
BOM = b"\xef\xbb\xbf"  # byte order mark of UTF-8

Format = Literal["jsonl", "lines", "files"]
Compression = Literal["", "gz", "zst", "parquet"]
LIBRARIES = {"zst": "zstandard", "parquet": "pyarrow"}


@dataclass(frozen=True)
class Input:
    """One file, or standard input with the path "-"."""

    path: str
    format: Format
    compression: Compression
    size: int
    """Bytes on disk; 0 for standard input."""
    changed: int
    """Modification time in ns."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        return "standard input" if self.path == "-" else self.path

    @property
    def unsplittable(self) -> bool:
        """Whether it can only be read from the start."""
        return bool(self.compression) or self.format == "files" or self.path == "-"


@dataclass(frozen=True)
class InputChunk:
    """Whole lines of an input, or all of it with format "files"."""

    source: Input
    text: bytearray
    first: int
    """Number of the first line, counting from 1 at byte ``begin``."""
    begin: int
    """Byte of the input at which reading began."""
    consumed: int
    """Bytes of the file, as stored, that were read for this chunk."""

    def location(self, line: int) -> str:
        """FILE:LINE of line number ``line`` (from 0) of the chunk; FILE if the input is a single document."""
        if self.source.format == "files":
            return self.source.name
        return f"{self.source.name}:{self.first + line + lines_before(self.source.path, self.begin)}"


@dataclass(frozen=True)
class Share:
    """Part ``part`` (from 0) of ``parts`` parts of the inputs, divided by bytes."""

    part: int = 0
    parts: int = 1


def find(names: list[str], format: Format | None) -> list[Input]:
    """The inputs ``names``: files, patterns such as 'data/*.jsonl.zst' (their files are sorted), "-" for standard input.

    ``format`` None: guessed from each name. ConfigError for files that do not exist.
    """
    inputs = []
    for name in names:
        if name == "-":
            if format is None:
                raise ConfigError("--input - needs --format jsonl, lines or files")
            inputs.append(Input("-", format, "", 0, 0))
            continue
        for path in _matches(name):
            status = readable(path, "input").stat()
            source = Input(path, format or guess(path), compression(path), status.st_size, status.st_mtime_ns)
            library = LIBRARIES.get(source.compression)
            if library and (problem := extras.missing(f"reading {path}", library)):
                raise ConfigError(problem)
            if source.compression == "parquet" and source.format != "jsonl":
                raise ConfigError(f"{path}: the rows of a Parquet file are read as --format jsonl")
            inputs.append(source)
    if names.count("-") > 1:
        raise ConfigError("--input - is given twice; standard input can be read once")
    return inputs


def _matches(name: str) -> list[str]:
    """``name``, or the files that it matches as a pattern."""
    if not any(sign in name for sign in "*?[") or Path(name).exists():
        return [name]
    paths = glob(name, recursive=True)  # noqa: PTH207 (Path.glob refuses absolute patterns)
    files = sorted(path for path in paths if not Path(path).is_dir())
    if not files:
        raise ConfigError(f"input {name} matches no file; looked from {Path.cwd()}")
    return files


def compression(path: str | Path) -> Compression:
    """The compression of a file, by its name."""
    suffix = Path(path).suffix[1:]
    return cast(Compression, suffix) if suffix in ("gz", *LIBRARIES) else ""


def guess(path: str | Path) -> Format:
    """The format of a file, by its name without .gz or .zst: jsonl for .jsonl, .json and .parquet, otherwise lines."""
    name = Path(path)
    packed = compression(name) not in ("", "parquet")
    return "jsonl" if Path(name.stem if packed else name).suffix in (".jsonl", ".json", ".parquet") else "lines"


def chunks(inputs: list[Input], share: Share = Share(), longest: int = LONGEST * MB) -> Iterator[InputChunk]:
    """The chunks of a share of the inputs, in order; ConfigError for a corrupt compressed file.

    ConfigError also for a line, or with format "files" a file, of more than ``longest`` bytes of text, at least CHUNK.
    A document belongs to the share that contains its first byte. Compressed files, and files that are single documents, are not
    split: they belong to the share in which they begin.
    """
    total = sum(source.size for source in inputs)
    low, high = (total * part // share.parts for part in (share.part, share.part + 1))
    last = share.part == share.parts - 1
    start = 0
    for source in inputs:
        begin, end = max(low - start, 0), min(high - start, source.size)
        mine = low <= start and (start < high or last)  # the last share takes empty files at the end
        start += source.size
        if source.unsplittable:
            found = _whole(source, longest) if mine else iter(())
        else:
            found = _lines(source, begin, end, longest) if begin < end else iter(())
        for chunk in found:
            if len(chunk.text) > longest and (source.format == "files" or chunk.text.find(b"\n", 0, longest + 1) < 0):
                what = "a single document with --format files" if source.format == "files" else "a single line"
                raise ConfigError(
                    f"{chunk.location(0)} has more than {longest / MB:g} MB of text without an end: it would be {what}. If that "
                    "is meant, give --longest-line MB; it is held in memory several times"
                )
            yield chunk


def lines_before(path: str, byte: int) -> int:
    """Number of lines that end before ``byte`` of a file."""
    count = 0
    if byte:
        with reader(path) as file:
            while byte and (block := file.read(min(CHUNK, byte))):
                count += block.count(b"\n")
                byte -= len(block)
    return count


def _lines(source: Input, begin: int, end: int, longest: int) -> Iterator[InputChunk]:
    """The lines of an uncompressed file whose first byte is in [begin, end)."""
    with reader(source.path) as file:
        here = begin
        if begin:
            file.seek(begin - 1)  # a line begins here if the previous byte is a newline
            here = begin - 1
            while block := file.read(CHUNK):
                newline = block.find(b"\n") + 1
                here += newline or len(block)
                if newline:
                    break
            file.seek(here)
        first, consumed = 1, here - begin
        begin = here
        for text in _blocks(file, longest, end - here):
            consumed += len(text)
            lines = text.count(b"\n")
            yield InputChunk(source, text if begin else _without_bom(text, first), first, begin, consumed)
            first, consumed = first + lines, 0


def _whole(source: Input, longest: int) -> Iterator[InputChunk]:
    with _opened(source) as (file, raw):
        if source.format == "files":
            text = bytearray()
            while len(text) <= longest and (block := file.read(CHUNK)):
                text += block
            yield InputChunk(source, _without_bom(text, 1), 1, 0, source.size or len(text))
            return
        first, before = 1, 0
        for text in _blocks(file, longest):
            here = max(before, raw.tell()) if source.compression else before + len(text)
            lines = text.count(b"\n")
            yield InputChunk(source, _without_bom(text, first), first, 0, here - before)
            first, before = first + lines, here


def _blocks(file: BinaryIO, longest: int, limit: int | None = None) -> Iterator[bytearray]:
    """Whole lines, about CHUNK bytes at a time; with ``limit`` those that begin within so many bytes.

    A line of more than ``longest`` bytes is not read to its end.
    """
    if limit is not None and limit <= 0:
        return
    given = 0
    lines = bytearray()  # grows in place, so that a line of gigabytes is in memory only once
    while block := file.read(CHUNK):
        whole = block.rfind(b"\n") + 1
        lines += memoryview(block)[: whole or None]
        if not whole:
            if len(lines) > longest:
                yield lines
                return
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


def _without_bom(text: bytearray, first: int) -> bytearray:
    """``text`` without a byte order mark; it begins with line ``first``."""
    if first == 1 and text.startswith(BOM):
        del text[: len(BOM)]
    return text


@contextmanager
def _opened(source: Input) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """A reader of the decompressed text, and the file itself, for its position; ConfigError if it is corrupt."""
    if source.path == "-":
        yield sys.stdin.buffer, sys.stdin.buffer
        return
    with reader(source.path) as raw:
        if source.compression and not os.fstat(raw.fileno()).st_size:
            raise ConfigError(
                f"{source.path} is empty, so it is not a valid .{source.compression} file; copy or create it again"
            )
        try:
            if source.compression == "gz":
                with gzip.GzipFile(fileobj=raw) as file:
                    yield cast(BinaryIO, file), raw
            elif source.compression == "zst":
                yield io.BufferedReader(_Pieces(_decompressed(raw)), CHUNK), raw
            elif source.compression == "parquet":
                yield io.BufferedReader(_Pieces(parquet.json_lines(raw, source.path)), CHUNK), raw
            else:
                yield raw, raw
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(
                f"{source.path} is truncated, corrupt, or not a .{source.compression} file: {error}; copy or create it again"
            ) from None


class _Pieces(io.RawIOBase):
    """A file made of pieces of bytes."""

    def __init__(self, pieces: Iterator[bytes]):
        self._pieces, self._rest = pieces, memoryview(b"")

    def readable(self) -> bool:
        """True, for io.BufferedReader."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill some of ``buffer``; 0 at the end."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _decompressed(raw: BinaryIO) -> Iterator[bytes]:
    """The text of all frames of a .zst file; EOFError if it is corrupt, or, unlike in the library's own reader, truncated."""
    import zstandard

    library = zstandard.ZstdDecompressor(max_window_size=WINDOW)
    frame, within = library.decompressobj(), False
    while piece := raw.read(PIECE):
        while piece:
            try:
                yield frame.decompress(piece)
            except zstandard.ZstdError as error:
                raise EOFError(error) from None
            within, piece = not frame.eof, frame.unused_data
            if not within:
                frame = library.decompressobj()
    if within:
        raise EOFError("it ends within a frame")
