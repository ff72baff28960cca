"""Reads texts for a model from files."""

import json
import sys
from collections.abc import Iterator

from hpclm.base import files
from hpclm.base.errors import ConfigError, unread
from hpclm.config.checks import is_utf8
from hpclm.preprocess import kinds
from hpclm.preprocess.lines import without_end

MAX_TEXT_BYTES = 1 << 32  # bytes of a text
BOM = "\ufeff"  # byte order mark
PLAIN = ".txt"


def is_json_lines(path: str, text: str, format: str | None, otherwise: str) -> bool:
    """Whether to read ``text``, of the file ``path`` or "-", as JSON lines; ConfigError if its name and content disagree.

    ``format``: "jsonl" or ``otherwise``, which overrides name and content; None: decide by these.
    """
    if format is not None:
        return format == "jsonl"
    name, suffix = "standard input", PLAIN
    if path != "-":
        name, suffix = path, kinds.suffix_and_storage(path)[0]
    content = text[: kinds.BEGINNING].encode(errors="replace")
    return kinds.holds_json_lines(name, suffix, content, otherwise)


def json_texts(path: str, text: str, key: str, what: str) -> Iterator[str]:
    """The value of ``key`` in each line of a .jsonl file's text; ConfigError if a line lacks it. ``what``: describes the value."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                value = json.loads(line)[key]
            except (ValueError, KeyError, TypeError, RecursionError):
                value = None
            if not isinstance(value, str) or not is_utf8(value):
                raise ConfigError(f'{path}, line {number} must be a JSON object with {what} as "{key}"')
            yield value


def lines_of(text: str) -> list[str]:
    """The lines of a text as `hpclm preprocess --format lines` reads them: without line ends, including empty lines."""
    return [without_end(line) for line in text.removesuffix("\n").split("\n")] if text else []


def text_of(path: str, option: str = "") -> str:
    """The text of a file, or of standard input as "-", without a byte order mark; ConfigError if it is not text.

    ``option``: the option that names the file, for messages.
    """
    name = f"{option} {path}".lstrip()
    try:
        text = sys.stdin.buffer.read().decode() if path == "-" else files.read_text(path, MAX_TEXT_BYTES)
    except UnicodeError:
        raise ConfigError(f"{name} is not UTF-8 text") from None
    except OSError as error:
        raise unread(error, name, "give another file") from None
    return text.removeprefix(BOM)


def prompts(prompt: str | None, path: str | None, format: str | None) -> Iterator[str]:
    """The ``prompt`` ("-": standard input), or the prompts in the file ``path``. ``format``: see ``is_json_lines``."""
    if path is None:
        text = text_of("-", "--prompt") if prompt == "-" else prompt or ""
        if not is_utf8(text):
            raise ConfigError("the prompt is not UTF-8 text")
        yield text
        return
    text = text_of(path, "--prompts")
    if is_json_lines(path, text, format, "lines"):
        yield from json_texts(path, text, "prompt", "the text to continue")
    else:
        yield from lines_of(text)
