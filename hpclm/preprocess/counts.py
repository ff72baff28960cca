"""Counts of a dataset besides its tokens: text left out, special tokens in the text. Workers count, PREFIX.json stores the sums."""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from hpclm.data.indexed import COUNTS


@dataclass(frozen=True)
class Counts:
    """Counts that are summed over chunks, parts and datasets."""

    text_bytes: int = 0
    """Bytes of text, in UTF-8, that became tokens; 0 for conversations."""
    skipped: int = 0
    """Empty documents left out."""
    line_ends: int = 0
    """Line ends inside the texts that their tokens do not restore."""
    special: Counter[str] = field(default_factory=Counter)
    """Special and unknown tokens inside the texts, by name."""
    cut: int = 0
    """Conversations cut because they are too long."""
    dropped: int = 0
    """Conversations left out because they are too long, or because nothing is left to learn when cut."""
    endless: int = 0
    """Conversations in which no end of a turn counts in the loss."""
    spanning: int = 0
    """Conversations with a token that spans a prompt and its answer."""
    ends: Counter[str] = field(default_factory=Counter)
    """Conversations by the tokens that end their answers and count in the loss."""
    unreadable: Counter[str] = field(default_factory=Counter)
    """Unreadable lines left out, by reason."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    def note(self) -> dict[str, Any]:
        """The entry in PREFIX.json: all counts that are not 0."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: dict(sorted(value.items())) if value and isinstance(value, Counter) else value
            for name, value in values.items()
            if value
        }


def noted(note: dict[str, Any]) -> Counts:
    """The counts in the contents of a PREFIX.json; all 0 if it has none. TypeError or ValueError if they are invalid."""
    given = note.get(COUNTS, {})
    tables = {name: Counter(given[name]) for name in ("special", "ends", "unreadable") if name in given}
    return Counts(**{**given, **tables})
