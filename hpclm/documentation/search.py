"""Where words occur in the pages of the documentation and in the explanations of settings, the best places first."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpclm.base import files

PAGES = 8  # at most
WIDTH = 100  # columns of a line that is shown
FENCE = "```"


@dataclass(frozen=True)
class Place:
    """A page that has words of a search."""

    page: str
    title: str
    heading: str
    """The heading above ``line``; empty above the first."""
    line: str
    """The line of the page that has most of the words."""
    count: int
    """How often they occur in it."""
    rank: tuple[int, ...]
    """How good the page is: how many words are in it, in its title, in its headings and in ``line``, and how often they occur."""


def patterns(words: Sequence[str]) -> list[re.Pattern[str]]:
    """A pattern for each of ``words``, and for words that begin with it, in any case."""
    return [re.compile(rf"(?<![A-Za-z]){re.escape(word)}", re.IGNORECASE) for word in words]


def places(words: Sequence[str], pages: Mapping[str, Path]) -> list[Place]:
    """The pages that contain all ``words``, best first; if no page does, those that contain some."""
    matches = [place for name, path in pages.items() if (place := _place(name, files.read_text(path), patterns(words)))]
    best = max((place.rank[0] for place in matches), default=0)
    return sorted((place for place in matches if place.rank[0] == best), key=lambda place: place.rank, reverse=True)


def _place(page: str, text: str, words: Sequence[re.Pattern[str]]) -> Place | None:
    counts = [len(word.findall(text)) for word in words]
    if not any(counts):
        return None
    lines = list(_with_headings(text))
    title = lines[0][1]
    headings = " ".join(line for heading, line in lines if heading == line)
    heading, line = max(lines, key=lambda pair: (_number(words, pair[1]), _number(words, pair[0])))
    return Place(
        page,
        title,
        "" if heading in (title, line) else heading,
        _around(line, words),
        sum(counts),
        (sum(map(bool, counts)), _number(words, title), _number(words, headings), _number(words, line), sum(counts)),
    )


def _number(words: Sequence[re.Pattern[str]], text: str) -> int:
    """How many of ``words`` are in ``text``."""
    return sum(word.search(text) is not None for word in words)


def _with_headings(text: str) -> Iterator[tuple[str, str]]:
    """The heading above each line of a page, and the line, without the marks of Markdown at its beginning; a heading is above itself."""
    heading, fenced = "", False
    for line in text.splitlines():
        fenced ^= line.startswith(FENCE)
        plain = re.sub(r"^[\s#|>-]+|[\s|]+$|\*\*", "", line)
        if line.startswith("#") and not fenced:
            heading = plain
        if plain:
            yield heading, plain


def _around(line: str, words: Sequence[re.Pattern[str]]) -> str:
    """As much of a line as is shown, around the first of ``words`` in it."""
    if len(line) <= WIDTH:
        return line
    first = min((match.start() for word in words if (match := word.search(line))), default=0)
    start = max(0, min(first - WIDTH // 3, len(line) - WIDTH + 2))
    end = start + WIDTH - 2
    before = "…" if start > 0 else ""
    after = "…" if end < len(line) else ""
    return f"{before}{line[start:end].strip()}{after}"
