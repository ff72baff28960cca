"""Reads one line of an input, and describes its faults."""

import json
from typing import Any

import orjson

from hpclm.preprocess.kinds import Format


class UnreadableLineError(Exception):
    """An unreadable line: a ``reason`` for counting, and a message to follow file name and line number."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def read_line(line: bytes, format: Format, keys: tuple[str, ...], begin: int = 0) -> list[str]:
    """The texts of a line; none for a blank line of JSONL. Accepts the JSON that Python's json accepts. Raises
    UnreadableLineError.

    ``begin``: offset of a piece of a document in the line, in bytes.
    """
    if format != "jsonl":
        text = _decoded(line, begin)
        if format == "lines":
            text = without_end(text)
        return [text for _ in keys]
    record = read_object(line, f"with the key {keys[0]!r}")
    if record is None:
        return []
    for key in keys:
        if key not in record:
            message = f" has no key {key!r}; it has {sorted(record)}; select one by hpclm preprocess --json-keys"
            raise UnreadableLineError("no key", message)
    return [text_of(record[key], repr(key)) for key in keys]


def without_end(line: str) -> str:
    """A line of text without its line end, including Windows'."""
    return line.removesuffix("\n").rstrip("\r")


def read_object(line: bytes, hint: str) -> dict[str, Any] | None:
    """The JSON object of a line; None for a blank line. ``hint``: describes the object in an UnreadableLineError."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        text = _decoded(line)
        if not text.strip():
            return None
        try:
            record = json.loads(text, parse_int=lambda _: 0)  # Python refuses very long numbers
        except (ValueError, RecursionError) as error:
            message = f" is not JSON: {error}; a .jsonl file has one JSON object per line"
            raise UnreadableLineError("not JSON", message) from None
    if not isinstance(record, dict):
        message = f" holds a JSON {type(record).__name__}, not an object {hint}"
        raise UnreadableLineError("not an object", message)
    return record


def text_of(value: Any, name: str) -> str:
    """``value`` if it is text; otherwise UnreadableLineError. ``name``: describes the value in the message."""
    if not isinstance(value, str):
        kind = "null" if value is None else f"a JSON {type(value).__name__}"
        raise UnreadableLineError("not text", f": {name} holds {kind}, not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UnreadableLineError("half a character", f": {name} holds half a character (a lone surrogate)") from None
    return value


def _decoded(line: bytes, begin: int = 0) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        message = (
            f" is not UTF-8: byte {line[error.start]:#x} at {begin + error.start}; convert it, for example with iconv"
        )
        raise UnreadableLineError("not UTF-8", message) from None
