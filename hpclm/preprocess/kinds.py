"""Detects the contents of a text file from its name and first kilobytes: JSON lines or plain lines, compressed or not, or a table.

Compression (.gz), numbering (.jsonl-00000-of-00002), and upper or lower case in a name are ignored. If name and content contradict each
other, the file is refused: JSON lines read as plain lines would silently become documents full of keys and braces.
"""

import gzip
import json
import re
import shlex
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
Storage = Literal["", "gz", "zst", "table"]

BEGINNING = 1 << 13  # bytes of text to examine
PACKED: dict[str, Storage] = {".gz": "gz", ".gzip": "gz", ".zst": "zst", ".zstd": "zst"}
TABLES = (".parquet", ".arrow", ".feather")
JSON_LINES = (".jsonl", ".json", ".ndjson", ".jsonlines", ".jl", ".ldjson")
NUMBER = re.compile(r"[-_.]?(part|shard|chunk|split)?[-_.]?\d+([-_.]?of[-_.]?\d+)?", re.ASCII)
"""A number at the end of a file's name: ``.1`` of logrotate, ``-00000-of-00002`` of Hugging Face's datasets."""
OBJECT = re.compile(rb'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:')
"""Matches the beginning of a JSON object."""
ARRAY = re.compile(rb"\s*\[\s*[\[{]")
SPREAD = re.compile(rb'\s*\{[ \t\r]*\n\s*"')
"""Matches the beginning of a JSON object that does not end in its line."""
CSV = {".csv": "", ".tsv": ", sep=chr(9)"}
"""Extensions of tables of text, with the argument of pandas.read_csv for each."""
MARKUP = re.compile(rb"\s*(?:<!doctype\s+html|<html|<\?xml)", re.IGNORECASE)
BOM = b"\xef\xbb\xbf"  # byte order mark of UTF-8
NULS = 0.01  # fraction of zero bytes above which a file counts as binary

STORED: dict[bytes, Storage] = {
    b"\x1f\x8b\x08": "gz", b"\x28\xb5\x2f\xfd": "zst", b"PAR1\x15": "table", b"ARROW1\0\0": "table",
}  # fmt: skip
"""First bytes of readable files, regardless of their names."""
LIBRARIES = {"zst": "zstandard", "table": "pyarrow"}
UNPACK = {
    rb"\xfd7zXZ\0": ("compressed by xz", "unxz --keep {}"),
    rb"BZh[1-9]1AY&SY": ("compressed by bzip2", "bunzip2 --keep {}"),
    rb"[\x02\x04][\x21\x22][\x4c\x4d]\x18": ("compressed by lz4", "lz4 -d {}"),
    rb"LZIP\x01": ("compressed by lzip", "lzip --decompress --keep {}"),
    rb"\x1f\x9d": ("compressed by compress", "zcat {}"),
    rb"\x5d\0\0": ("compressed by lzma", "unlzma --keep {}"),
    rb"\xff\x06\0\0sNaPpY": ("compressed by snappy", "snzip -d {}"),
    rb"PK\x03\x04": ("a zip archive, as .docx and .epub are", "unzip {}"),
    rb"7z\xbc\xaf\x27\x1c": ("a 7z archive", "7z x {}"),
    rb"Rar!\x1a\x07": ("a rar archive", "unrar x {}"),
    rb".{257}ustar": ("a tar archive", "tar -xf {}"),
}
"""First bytes of files that must be unpacked: their kind, and the command for it."""
OTHERS = {
    rb"%PDF-": "a PDF; extract its text first, for example with pdftotext",
    rb"SQLite format 3\0": "an SQLite database; export its text as JSON lines",
    rb"\x89HDF": "an HDF5 file; export its text as JSON lines",
    rb"\x93NUMPY": "a NumPy array, not text",
    rb"Obj\x01": "an Avro file; export its text as JSON lines or Parquet",
    rb"MMIDIDX\0": "the index of a dataset, not text; train on it with data.prefix",
    rb"version https://git-lfs": "a Git LFS pointer, not the file itself; download the file with git lfs pull",
    rb"\xff\xfe\0\0|\0\0\xfe\xff": "text in UTF-32; convert it: iconv -f UTF-32 -t UTF-8",
    rb"\xff\xfe|\xfe\xff": "text in UTF-16; convert it: iconv -f UTF-16 -t UTF-8",
}
"""First bytes of other files that are not UTF-8 text, as regular expressions."""

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

    ConfigError for a file that is not text, or if name and content disagree on whether it holds JSON lines.
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
    if storage:
        content = _beginning(path, storage)
    _refuse_unreadable(path, content)
    if format is None:
        _refuse_unlikely(path, suffix, content)
        format = "jsonl" if holds_json_lines(path, suffix, content, plain) else plain
    if format == "jsonl":
        for pattern, what, items in (
            (ARRAY, "one JSON array", "'.[]'"),
            (SPREAD, "JSON objects of several lines", "."),
        ):
            if pattern.match(content):
                raise ConfigError(
                    f"{path} holds {what}, but hpclm reads one object per line; convert it: jq -c {items} {typed(path)} > OUT.jsonl"
                )
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
        elif suffix not in (*JSON_LINES, *TABLES, *CSV) and _without_number(name):
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
    """Whether most lines at the beginning of a text are JSON objects; a single unfinished line must begin like an object."""
    lines = [line for line in content.removeprefix(BOM).split(b"\n") if line.strip()]
    cut = len(content) >= BEGINNING  # the last line may be incomplete
    if len(lines) == 1 and cut:
        return OBJECT.match(lines[0]) is not None
    complete = lines[:-1] if cut else lines
    return sum(map(_is_object, complete)) * 2 > len(complete)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _refuse_unreadable(path: str, content: bytes) -> None:
    """ConfigError if a file that begins with ``content`` is not UTF-8 text."""
    for magic, (what, command) in UNPACK.items():
        if re.match(magic, content, re.DOTALL):
            raise ConfigError(
                f"{path} is {what}, which hpclm does not read; unpack it first: {command.format(typed(path))}"
            )
    for magic, what in OTHERS.items():
        if re.match(magic, content):
            raise ConfigError(f"{path} is {what}")


def _refuse_unlikely(path: str, suffix: str, content: bytes) -> None:
    """ConfigError if a file is binary, or if it is a table or page: its separators or tags would become text."""
    if suffix in CSV:
        convert = f"pandas.read_csv({path!r}{CSV[suffix]}).to_json('OUT.jsonl', orient='records', lines=True)"
        raise ConfigError(
            f"{path} is a table, and its header and separators would become text; convert it: python -c "
            f"{shlex.quote(f'import pandas; {convert}')}; or give --format lines to read its lines as they are"
        )
    if content.count(0) > NULS * len(content):
        raise ConfigError(
            f"{path} is not text in UTF-8: {content.count(0):,} of its first {len(content):,} bytes are zero, so it is binary, or text in "
            "UTF-16 or UTF-32; convert it, for example with iconv, or give --format lines or files to read it as it is"
        )
    if MARKUP.match(content):
        raise ConfigError(
            f"{path} is HTML or XML, and its tags would become text; extract the text first, or give --format lines or files to keep the tags"
        )


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
