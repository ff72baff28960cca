"""The chat settings that conversations were rendered with. They are recorded beside a dataset, in runs tuned on it, and in exports of
these runs.

Stored in PREFIX.json under "chat", and in a run directory in chat.json. Neither exists without tuning.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpclm.base.errors import ConfigError, unwritten
from hpclm.base.files import write_text
from hpclm.config.reading import json_object
from hpclm.data.indexed import files, sidecar

log = logging.getLogger(__name__)
KEY = "chat"  # in PREFIX.json
FILE = "chat.json"  # in a run directory
MARK = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")
"""Marks around the assistant's text in a template, which only transformers reads."""
PLAIN_MARK = re.compile(r"(?m)(?:^[ \t]+)?\{%\s*(?:end)?generation\s*%\}\n?")  # with the white space that Jinja removes
SHOWN = 40  # characters of a template in a message


@dataclass(frozen=True)
class ChatRecord:
    """The chat settings that the conversations of a dataset were rendered with."""

    template: str
    tokens: Mapping[str, str]
    """Special tokens that the template may name, such as {"bos_token": "<s>"}."""
    ends: Mapping[str, int]
    """The tokens that the model learns as the end of an answer, text -> id; empty if no single token ends one."""

    @property
    def named(self) -> dict[str, str]:
        """The special tokens that the template names."""
        return {name: text for name, text in self.tokens.items() if names(self.template, name)}

    def note(self) -> dict[str, Any]:
        """The record as JSON."""
        return asdict(self)


def names(template: str, token: str) -> bool:
    """Whether a template names the special token called ``token``, such as bos_token."""
    return re.search(rf"\b{re.escape(token)}\b", template) is not None


def without_marks(template: str) -> str:
    """A template that writes the same text, without {% generation %} marks, which only transformers reads."""
    return MARK.sub(r"{#\1 \2#}", template)  # a comment removes the same white space


def of_json(tree: Any, path: Path, way_out: str) -> ChatRecord:
    """The record in ``tree``, from the file ``path``; ConfigError, which ends with ``way_out``, if it is invalid."""
    match tree:
        case {"template": str(template), "tokens": dict(tokens), "ends": dict(ends)}:
            valid = all(isinstance(text, str) for text in (*tokens, *tokens.values(), *ends))
            if valid and all(type(id) is int and id >= 0 for id in ends.values()):
                return ChatRecord(template, tokens, ends)
    raise ConfigError(
        f"{path}: its record of the chat template is corrupt, or from another version of hpclm; {way_out}"
    )


def of_dataset(prefix: str | Path) -> ChatRecord | None:
    """The chat settings of a dataset of conversations; None for other datasets."""
    note = sidecar(prefix).get(KEY)
    return None if note is None else of_json(note, files(prefix)[2], "restore that file, or preprocess again")


def of_run(run: Path) -> ChatRecord | None:
    """The chat settings that the run in the directory ``run`` was tuned with, or None."""
    path = run / FILE
    if not path.is_file():
        return None
    return of_json(
        json_object(path), path, "restore it, or remove it to use the chat template of the model before tuning"
    )


def owner(path: Path) -> Path:
    """The run directory of ``path``, which is a run directory or one of its checkpoints."""
    if (path / "MANIFEST.json").is_file() and not (path / "config.yaml").is_file():
        return path.absolute().parents[1]
    return path


def keep(run: Path, record: ChatRecord | None) -> None:
    """Store ``record`` as the chat settings of the run in the directory ``run``; None: remove them."""
    path = run / FILE
    try:
        if record is None:
            path.unlink(missing_ok=True)
        else:
            write_text(path, json.dumps(record.note(), indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise unwritten(error, path, "choose another out, or free some space") from error


def shared(prefixes: Sequence[str]) -> ChatRecord | None:
    """The chat settings that all these datasets share; None if none has a record. ConfigError if they differ."""
    found = {prefix: of_dataset(prefix) for prefix in prefixes}
    records = {prefix: record for prefix, record in found.items() if record is not None}
    if not records:
        return None
    (first, record), *others = records.items()
    for prefix, other in others:
        difference = _difference(record, other)
        if difference:
            raise ConfigError(
                f"datasets {first} and {prefix} were made with different chat templates, but a run is tuned with one: {difference}; "
                "preprocess one of them again with the template of the other (hpclm preprocess --chat-template FILE), or omit it"
            )
    ends = {text: id for entry in records.values() for text, id in entry.ends.items()}
    tokens = {name: text for entry in records.values() for name, text in entry.tokens.items()}
    return ChatRecord(record.template, {**tokens, **record.tokens}, dict(sorted(ends.items())))


def _difference(one: ChatRecord, other: ChatRecord) -> str | None:
    """The difference between the texts of two templates; None if they are equal."""
    difference = _text_difference(_normal(one.template), _normal(other.template))
    if difference:
        return difference
    for name in sorted(one.named.keys() | other.named.keys()):
        if one.named.get(name) != other.named.get(name):
            return f"{name} was {_quoted(one.named.get(name))} and {_quoted(other.named.get(name))}"
    return None


def _normal(template: str) -> str:
    """A template without parts that do not change its text: marks, and the kind of line ends."""
    lines = template.replace("\r\n", "\n").replace("\r", "\n")
    return PLAIN_MARK.sub("", lines).removesuffix("\n")


def _text_difference(one: str, other: str) -> str | None:
    if one == other:
        return None
    shorter = min(len(one), len(other))
    begin = next((place for place in range(shorter) if one[place] != other[place]), shorter)
    parts = (text[begin : begin + SHOWN] for text in (one, other))
    return f"from character {begin + 1} on {' against '.join(_quoted(part or None) for part in parts)}"


def _quoted(text: str | None) -> str:
    return "nothing" if text is None else repr(text)
