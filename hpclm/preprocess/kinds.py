"""Detects the contents of a text file from its name and first kilobytes: JSON lines or plain lines, compressed or not, or a table.

Compression (.gz), numbering (.jsonl-00000-of-00002), and upper or lower case in a name are ignored. If name and content contradict each
other, the file is refused: JSON lines read as plain lines would silently become documents full of keys and braces.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from hpclm.base import extras
from hpclm.base.errors import ConfigError
from hpclm.base.files import reader, typed

Format = Literal["jsonl", "lines", "files"]
PlainFormat = Literal["lines", "files"]
"""Format of text that is neither JSON lines nor a table."""
Storage = Literal["", "gz", "zst", "table", "array"]

BEGINNING = 1 << 13  # bytes of text to examine
PACKED: dict[str, Storage] = {".gz": "gz", ".gzip": "gz", ".zst": "zst", ".zstd": "zst"}
TABLES = (".parquet", ".arrow", ".feather")
JSON_LINES = (".jsonl", ".json", ".ndjson", ".jsonlines", ".jl", ".ldjson")
NUMBER = re.compile(r"[-_.]?(part|shard|chunk|split)?[-_.]?\d+([-_.]?of[-_.]?\d+)?", re.ASCII)
"""A number at the end of a file's name: ``.1`` of logrotate, ``-00000-of-00002`` of Hugging Face's datasets."""
OBJECT = re.compile(rb'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:')
"""Matches the beginning of a JSON object."""
BOM = b"\xef\xbb\xbf"  # byte order mark of UTF-8
NULS = 0.01  # fraction of zero bytes above which a file counts as binary

STORED: dict[bytes, Storage] = {
    b"\x1f\x8b\x08": "gz", b"\x28\xb5\x2f\xfd": "zst", b"PAR1\x15": "table", b"ARROW1\0\0": "table",
}  # fmt: skip
"""First bytes of readable files, regardless of their names."""
LIBRARIES = {"zst": "zstandard", "table": "pyarrow"}

PIECE = 1 << 11  # compressed bytes passed to zstandard at a time; all of their text, up to 64 MiB, is held in memory
WINDOW = 1 << 31  # bytes of zstandard's largest window, for files of `zstd --long=31`


@dataclass(frozen=True)
class FileKind:
    """How to read a file."""

    format: Format
    storage: Storage


def kind_of(path: str, format: Format | None, plain: PlainFormat = "files") -> FileKind:
    """How to read the regular file at ``path``. ``format``: the user's choice, which overrides name and content.

    ``plain``: the format of text that is neither JSON lines nor a table.

    ConfigError for a file that is not text in UTF-8, or if name and content disagree on whether it holds JSON lines.
    """
    suffix, storage = suffix_and_storage(path)
    if not storage:
        content = _beginning(path, storage)
        storage = next((kind for magic, kind in STORED.items() if content.startswith(magic)), storage)
    if storage in LIBRARIES:
        problem = extras.missing(f"reading {path}", LIBRARIES[storage])
        if problem:
            raise ConfigError(problem)
    if storage == "table":
        if format not in (None, "jsonl"):
            raise ConfigError(f"{path}: the rows of a table are read as --format jsonl")
        return FileKind("jsonl", storage)
    if (
        not storage
        and suffix == ".json"
        and format in (None, "jsonl")
        and content.removeprefix(BOM).lstrip()[:1] == b"["
    ):
        return FileKind("jsonl", "array")
    if format is None:
        content = _beginning(path, storage)
        _refuse_binary(path, content)
        format = "jsonl" if holds_json_lines(path, suffix, content, plain) else plain
    return FileKind(format, storage)


def suffix_and_storage(path: str) -> tuple[str, Storage]:
    """The extension that describes the contents, such as ".jsonl", without numbers and compression; and the compression."""
    name = Path(path).name.lower()
    storage: Storage = ""
    while True:
        suffix = Path(name).suffix
        if suffix in PACKED and not storage:
            name = Path(name).stem
            storage = PACKED[suffix]
        elif suffix not in (*JSON_LINES, *TABLES) and _without_number(name):
            name = _without_number(name)
        else:
            break
    if suffix in TABLES:
        storage = "table"
    if NUMBER.fullmatch(suffix):
        suffix = ""
    return suffix, storage


def _without_number(name: str) -> str:
    """``name`` without the number at its end, if another extension precedes it; otherwise empty."""
    for match in re.finditer(r"[-_.]", name):
        rest = name[: match.start()]
        if NUMBER.fullmatch(name, match.start()) and Path(rest).suffix:
            return rest
    return ""


def holds_json_lines(name: str, suffix: str, content: bytes, otherwise: str) -> bool:
    """Whether a text is JSON lines, by the file's ``suffix`` (``suffix_and_storage``) and its beginning; ConfigError if the two disagree.

    ``otherwise``: the value of --format for a file without JSON lines.
    """
    if suffix in JSON_LINES:
        return True
    if not holds_objects(content):
        return False
    if not suffix:
        return True
    raise ConfigError(
        f"{name} holds JSON lines, but is not named .jsonl; give --format jsonl (or rename it) to read the objects, or --format "
        f"{otherwise} to read it as it is"
    )


def holds_objects(content: bytes) -> bool:
    """Whether the first line of a text is a JSON object, or begins like one if it is cut."""
    line, end, _ = content.removeprefix(BOM).lstrip().partition(b"\n")
    if not end and len(content) >= BEGINNING:
        return OBJECT.match(line) is not None
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _refuse_binary(path: str, content: bytes) -> None:
    """ConfigError if half of the lines of ``content``, a file's beginning, are not UTF-8, or if it has many zeros. Single wrong lines
    are left to the reader of lines, which names them."""
    lines = content.split(b"\n")
    wrong = sum(not _decodes(line) for line in lines)
    if 2 * wrong >= len(lines) or content.count(0) > NULS * len(content):
        raise ConfigError(
            f"{path} is not text in UTF-8, plain or compressed by gzip or zstd; `file {typed(path)}` says what it is. Unpack it, or "
            "convert it, for example with iconv"
        )


def _decodes(line: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(line)  # the last character may be cut
    except UnicodeDecodeError:
        return False
    return True


def _beginning(path: str, storage: Storage) -> bytes:
    """The first bytes of a file, decompressed; only the readable part of a corrupt file, because reading the file reports the error."""
    pieces = b""
    try:
        with reader(path) as file:
            if storage == "gz":
                with gzip.GzipFile(fileobj=file) as unpacked:
                    return unpacked.read(BEGINNING)
            for piece in decompressed(file) if storage == "zst" else [file.read(BEGINNING)]:
                pieces += piece[: BEGINNING - len(pieces)]
                if len(pieces) == BEGINNING:
                    break
    except (EOFError, zlib.error, gzip.BadGzipFile):
        pass
    return pieces


def decompressed(raw: BinaryIO) -> Iterator[bytes]:
    """The text of all frames of a .zst file. EOFError if it is corrupt or truncated; the library's own reader
    accepts truncated files."""
    import zstandard

    library = zstandard.ZstdDecompressor(max_window_size=WINDOW)
    frame = library.decompressobj()
    within = False
    while piece := raw.read(PIECE):
        while piece:
            try:
                yield frame.decompress(piece)
            except zstandard.ZstdError as error:
                raise EOFError(error) from None
            within = not frame.eof
            piece = frame.unused_data
            if not within:
                frame = library.decompressobj()
    if within:
        raise EOFError("it ends within a frame")
