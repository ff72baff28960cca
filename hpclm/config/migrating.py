"""What takes the place of other projects' options here: the tables of docs/migrating.md."""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from hpclm import files, shipped

PAGE = "migrating"
SEE = f"hpclm docs {PAGE} lists other projects' options"
SPAN = re.compile(r"`([^`]+)`")
SPANS = re.compile(r"`[^` ]+`(, `[^` ]+`)*")
"""A cell of settings only, one for each option of the cell before it."""


class Replacement(NamedTuple):
    """What takes the place of an option."""

    here: str
    """A setting, key=value, or a sentence."""
    example: str
    """The option's value for which the value of ``here`` is right; empty: any."""


@lru_cache(maxsize=1)
def replacements() -> dict[str, Replacement]:
    """Option or key of a JSON, with _ for - and for dots, -> what takes its place; empty where there are no pages."""
    page = shipped.pages().get(PAGE)
    rows = [row for line in files.read_text(page).splitlines() for row in _of_line(line)] if page else []
    return dict(reversed(rows))  # the first row that names an option counts


def _of_line(line: str) -> Iterator[tuple[str, Replacement]]:
    """The options that a line of the page names, if it is a row of a table."""
    cells = [cell.strip() for cell in line.split("|")]
    if len(cells) != 4 or "`" not in cells[1]:
        return
    spans = SPAN.findall(cells[1])
    settings = SPAN.findall(cells[2]) if SPANS.fullmatch(cells[2]) else []
    whole = cells[2].replace("`", "")
    for number, span in enumerate(spans):
        here = settings[number] if len(settings) == len(spans) else settings[0] if len(settings) == 1 else whole
        words = span.replace("...", "").split()
        for word, after in zip(words, [*words[1:], ""], strict=True):
            if word.startswith("--") or (word == words[0] and re.fullmatch(r"\w+[._][\w.]+:?", word)):
                name = re.sub("[-.]", "_", word.strip("-:").lower())
                yield name, Replacement(here, "" if after.startswith("-") or after.isupper() else after)
