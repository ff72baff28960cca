"""Input files of preprocessing: JSONL or plain text, compressed or not, Parquet, Arrow, or a pipe.

Files are read in order, in chunks of whole lines, so memory use depends on the longest line, not on file size. A file that is a single
document is read in pieces if the tokenizer gives the pieces the same tokens as the whole.
"""

import codecs
import gzip
import io
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from hpclm.base.errors import ConfigError
from hpclm.base.files import readable, reader
from hpclm.preprocess import folders, tables
from hpclm.preprocess.kinds import BOM, Format, PlainFormat, Storage, decompressed, kind_of

CHUNK = 1 << 19  # bytes of text in a chunk, unless a single line is longer
BESIDE = 1 << 11  # bytes examined on both sides of a cut
CONTEXT = 1 << 8  # bytes before a piece of a document that are tokenized with it
TRIED = 8  # number of places of each kind to try, from the end of a piece
CUTS = tuple(
    re.compile(pattern)
    for pattern in (
        rb"(?<=\S)\n(?=\S)",  # after a line
        rb"(?<=\S)(?=\s)",  # after a word
        rb"(?:\xe3\x80\x82|\xef\xbc[\x81\x8c\x9b\x9f])",  # after 。！，；？
    )
)
"""Places where a document may be divided, best first."""
MAX_LINE_MB = 256  # MB of a line; --longest-line overrides it
MB = 10**6
FORMAT = "documents: JSON objects, lines or whole files; default: jsonl for .jsonl, .ndjson, .json and tables; files for .txt and other text"
LONGEST_LINE = f"refuse a longer line, or a text that cannot be tokenized in shorter pieces; default: {MAX_LINE_MB} MB"
STORED_AS = {"gz": ".gz", "zst": ".zst"}
MayCut = Callable[[bytes, bytes], bool]
"""Whether a document may be divided between two parts."""


@dataclass(frozen=True)
class Input:
    """One file, or standard input with the path "-"."""

    path: str
    format: Format
    storage: Storage
    size: int
    """Bytes on disk; 0 for standard input."""
    changed: int
    """Modification time in ns."""
    columns: tuple[str, ...] = ()
    """Columns of a table to read; missing columns are skipped unless all are. Empty: all columns."""
    rows_of: str = ""
    """The name of the Python value that was written to this file, a row per line; empty for a user's file."""

    @property
    def name(self) -> str:
        """The input's name in messages."""
        if self.rows_of:
            return self.rows_of
        return "standard input" if self.path == "-" else self.path

    @property
    def unsplittable(self) -> bool:
        """Whether the input can only be read from the start."""
        return bool(self.storage) or self.format == "files" or self.path == "-"


@dataclass(frozen=True)
class InputChunk:
    """Consecutive lines of an input, or with format "files" a piece of its document."""

    source: Input
    lines: list[bytes]
    """Lines including their newlines."""
    first: int
    """Number of the first line; 1 is the line at byte ``begin``."""
    begin: int
    """Byte of the input where reading began."""
    consumed: int
    """Bytes of the stored file that were read for this chunk."""
    context: bytes = b""
    """The end of the previous piece; empty at the beginning of a document."""
    closes: bool = True
    """Whether the last document ends with this chunk."""

    @property
    def is_piece(self) -> bool:
        """Whether this is only a part of a document."""
        return bool(self.context) or not self.closes

    def location(self, line: int) -> str:
        """FILE:LINE of line ``line`` (from 0) of the chunk; FILE if the input is a single document."""
        if self.source.format == "files":
            return self.source.name
        number = self.first + line + lines_before(self.source.path, self.begin)
        return f"{self.source.name}, row {number}" if self.source.rows_of else f"{self.source.name}:{number}"


@dataclass(frozen=True)
class Share:
    """Part ``part`` (from 0) of ``parts`` parts of the inputs, divided by bytes."""

    part: int = 0
    parts: int = 1


def find(
    names: list[str], format: Format | None, columns: Sequence[str] = (), plain: PlainFormat = "files"
) -> list[Input]:
    """The inputs ``names``: files, folders, patterns such as 'data/*.jsonl.zst' (sorted), "-" for standard input.

    ``format`` None: each file's own, by its name and content. ``plain``: the format of text that is neither JSON lines nor a table.
    ``columns``: see Input. ConfigError for files that do not exist, are not text, or are named twice.
    """
    inputs = []
    for name in names:
        if name == "-":
            if format is None:
                raise ConfigError("--input - needs --format jsonl, lines or files")
            inputs.append(Input("-", format, "", 0, 0))
            continue
        for path in _matches(name, format):
            status = readable(path, "input").stat()
            kind = kind_of(path, format, plain)
            selected = tuple(columns) if kind.storage == "table" else ()
            inputs.append(Input(path, kind.format, kind.storage, status.st_size, status.st_mtime_ns, selected))
    refuse_repeated(inputs)
    return inputs


def refuse_repeated(inputs: Iterable[Input]) -> None:
    """ConfigError if two ``inputs`` are the same file, even through links: a document could be in both training and evaluation data."""
    paths = [source.path for source in inputs]
    if paths.count("-") > 1:
        raise ConfigError("--input - is given twice; standard input can be read once")
    names = dict[tuple[int, int], str]()
    for path in paths:
        if path == "-":
            continue
        status = Path(path).stat()
        file = (status.st_dev, status.st_ino)
        if file in names:
            other = "" if names[file] == path else f", also as {names[file]}"
            raise ConfigError(f"{path} is an input twice{other}; its documents would occur twice. Give it once")
        names[file] = path


def _matches(name: str, format: Format | None) -> list[str]:
    """``name`` itself, or the files that match it as a pattern, or the files in it."""
    if Path(name).is_dir():
        return folders.files_in(Path(name), any_text=format in ("lines", "files"))
    if not any(sign in name for sign in "*?[") or Path(name).exists():
        return [name]
    paths = glob(name, recursive=True)  # noqa: PTH207 - Path.glob refuses absolute patterns
    files = sorted(path for path in paths if not Path(path).is_dir())
    if not files:
        raise ConfigError(f"input {name} matches no file; looked from {Path.cwd()}")
    return files


def chunks(
    inputs: list[Input], share: Share = Share(), longest: int = MAX_LINE_MB * MB, may_cut: MayCut | None = None
) -> Iterator[InputChunk]:
    """The chunks of a share of the inputs, in order; ConfigError for a corrupt compressed file.

    ``may_cut``: decides where a file that is a single document may be divided into pieces; None: nowhere. ConfigError for a line or piece
    of more than ``longest`` bytes of text.

    A document belongs to the share with its first byte. Compressed files, and files that are single documents, belong as a whole to the
    share with their first byte.
    """
    total = sum(source.size for source in inputs)
    low, high = (total * part // share.parts for part in (share.part, share.part + 1))
    last = share.part == share.parts - 1
    start = 0
    for source in inputs:
        begin = max(low - start, 0)
        end = min(high - start, source.size)
        mine = low <= start and (start < high or last)  # the last share takes empty files at the end
        start += source.size
        if not source.unsplittable:
            if begin < end:
                yield from _chunks(source, begin, end, longest)
        elif mine and source.format == "files":
            yield from _pieces(source, longest, None if source.path == "-" else may_cut)
        elif mine:
            yield from _chunks(source, 0, None, longest)


def _chunks(source: Input, begin: int, end: int | None, longest: int) -> Iterator[InputChunk]:
    """Chunks of the lines that begin in the bytes [``begin``, ``end``); None: up to the end."""
    with _opened(source) as (file, raw):
        if begin:
            begin = _line_start(file, begin)
        here = begin
        number = 1
        lines = list[bytes]()
        size = 0
        before = begin

        def chunk() -> InputChunk:
            return InputChunk(source, lines, number, begin, (raw.tell() if raw else here) - before)

        while (end is None or here < end) and (line := file.readline(longest + 1)):
            if len(line) > longest and not line.endswith(b"\n"):
                raise ConfigError(_too_long(chunk().location(len(lines)), "a single line", longest))
            here += len(line)
            size += len(line)
            lines.append(line if here > len(line) else line.removeprefix(BOM))
            if size >= CHUNK:
                yield chunk()
                number += len(lines)
                before = raw.tell() if raw else here
                lines = []
                size = 0
        if lines:
            yield chunk()


def _pieces(source: Input, longest: int, may_cut: MayCut | None) -> Iterator[InputChunk]:
    """A file that is one document, in pieces that end where ``may_cut`` allows it."""
    with _opened(source) as (file, raw):
        text = bytearray()
        context = b""
        begin = 0
        read = 0
        before = 0

        def piece(size: int, closes: bool) -> InputChunk:
            nonlocal context, begin, before
            part = bytes(text[:size])
            consumed = (raw.tell() if raw else read) - before
            chunk = InputChunk(source, [part], 1, begin, consumed, context, closes)
            del text[:size]
            context = part[-CONTEXT:]
            begin += size
            before += consumed
            return chunk

        while block := file.read(CHUNK):
            text += block if read else block.removeprefix(BOM)
            read += len(block)
            cut = _cut(text, may_cut) if may_cut and len(text) > CHUNK + BESIDE else None
            if cut:
                wrong = None if context else _not_utf8(source)
                if wrong:
                    begin, text[:] = wrong
                    break
                yield piece(cut, False)
            if len(text) > longest:
                raise ConfigError(
                    _too_long(source.name, "a single document (--format lines makes each line a document)", longest)
                )
        yield piece(len(text), True)


def _cut(text: bytearray, may_cut: MayCut) -> int | None:
    """Position near the end of ``text`` where it may be divided, or None."""
    end = len(text) - BESIDE
    begin = max(0, end - (BESIDE << 3))
    near = bytes(text[begin:])
    for kind in CUTS:
        places = [begin + match.end() for match in kind.finditer(near, 0, end - begin)]
        for place in reversed(places[-TRIED:]):
            if may_cut(bytes(text[max(0, place - BESIDE) : place]), bytes(text[place : place + BESIDE])):
                return place
    return None


def _not_utf8(source: Input) -> tuple[int, bytes] | None:
    """The position and bytes of the piece that ends with the first byte that is not UTF-8; None for valid text. Found before any tokens
    of the file are written."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    with _opened(source) as (file, _):
        while True:
            block = file.read(CHUNK)
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                part = bytes(error.object)
                return read + len(block) - len(part), part[: error.end]
            read += len(block)
            if not block:
                return None


def _too_long(place: str, what: str, longest: int) -> str:
    return (
        f"{place} has more than {longest / MB:g} MB of text without an end: it would be {what}. If that is intended, give "
        "--longest-line MB; memory then holds it several times"
    )


def _line_start(file: BinaryIO, byte: int) -> int:
    """Seek to the first line that begins at ``byte`` or later: a line begins there if the previous byte is a newline."""
    here = file.seek(byte - 1)
    while piece := file.readline(CHUNK):
        here += len(piece)
        if piece.endswith(b"\n"):
            break
    return here


def lines_before(path: str, byte: int) -> int:
    """Number of lines that end before ``byte`` of a file."""
    count = 0
    if byte:
        with reader(path) as file:
            while byte and (block := file.read(min(CHUNK, byte))):
                count += block.count(b"\n")
                byte -= len(block)
    return count


@contextmanager
def _opened(source: Input) -> Iterator[tuple[BinaryIO, BinaryIO | None]]:
    """A reader of the decompressed text, and the file itself if it is seekable; ConfigError if it is corrupt."""
    if source.path == "-":
        yield sys.stdin.buffer, None
        return
    with reader(source.path) as raw:
        suffix = STORED_AS.get(source.storage, Path(source.path).suffix)
        if source.storage and not os.fstat(raw.fileno()).st_size:
            raise ConfigError(f"{source.path} is empty, so it is not a valid {suffix} file; copy or create it again")
        try:
            if source.storage == "gz":
                with gzip.GzipFile(fileobj=raw) as file:
                    yield cast(BinaryIO, file), raw
            elif source.storage == "zst":
                yield io.BufferedReader(_Pieces(decompressed(raw)), CHUNK), raw
            elif source.storage == "table":
                yield io.BufferedReader(_Pieces(tables.json_lines(raw, source.path, source.columns)), CHUNK), raw
            elif source.storage == "array":
                yield io.BufferedReader(_Pieces(_rows_of_array(raw, source.path)), CHUNK), raw
            else:
                yield raw, raw
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(
                f"{source.path} is truncated, corrupt, or not a {suffix} file: {error}; copy or create it again"
            ) from None


def _rows_of_array(file: BinaryIO, path: str) -> Iterator[bytes]:
    """The elements of a JSON array as JSON lines; memory holds them all. ConfigError if the file is something else."""
    try:
        rows = orjson.loads(file.read().removeprefix(BOM))
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} begins like a JSON array, but is none: {error}") from None
    yield from (orjson.dumps(row) + b"\n" for row in rows)


class _Pieces(io.RawIOBase):
    """A file-like object over an iterator of bytes."""

    def __init__(self, pieces: Iterator[bytes]):
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """True, for io.BufferedReader."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill part of ``buffer``; 0 at the end."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count
