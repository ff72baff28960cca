"""Texts that a model is to read, from files."""

import json
from collections.abc import Iterator

from hpclm import files
from hpclm.datasets import kinds
from hpclm.errors import ConfigError, unread

LARGEST = 1 << 32  # bytes of a text
PLAIN = ".txt"


def is_json_lines(path: str, text: str, format: str | None, otherwise: str) -> bool:
    """Whether ``text``, of the file ``path`` or "-", is read as JSON lines; ConfigError where its name and content disagree.

    ``format``: "jsonl" or ``otherwise``, which count more than both; None: by the name and the content.
    """
    if format is not None:
        return format == "jsonl"
    name, suffix = ("standard input", PLAIN) if path == "-" else (path, kinds.named(path)[0])
    content = text[: kinds.BEGINNING].encode(errors="replace")
    return kinds.guess(name, suffix, content, otherwise) == "jsonl"


def json_texts(path: str, text: str, key: str, what: str) -> Iterator[str]:
    """The value of ``key`` in each line of a .jsonl file's text; ConfigError where a line has no ``what`` there."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                value = json.loads(line)[key]
            except (ValueError, KeyError, TypeError, RecursionError):
                value = None
            if not isinstance(value, str):
                raise ConfigError(f'{path}, line {number} must be a JSON object with {what} as "{key}"')
            yield value


def text_of(path: str) -> str:
    """The text of a file; ConfigError where it is none."""
    try:
        return files.read_text(path, LARGEST)
    except UnicodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise unread(error, path, "give another file") from None
