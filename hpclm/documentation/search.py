"""Search the pages of the documentation for words, with the best places first."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpclm.base import files

PAGES = 8  # most pages in the answer
WIDTH = 100  # most columns of a line in the answer
FENCE = "```"


@dataclass(frozen=True)
class Place:
    """A page that contains words of a search."""

    page: str
    title: str
    heading: str
    """The heading above ``line``; empty above the first."""
    line: str
    """The line of the page with the most words."""
    count: int
    """How often the words occur in the page."""
    rank: tuple[int, ...]
    """The number of words in the page, in its title, in its headings and in ``line``; then ``count``. Larger is better."""


def patterns(words: Sequence[str]) -> list[re.Pattern[str]]:
    """For each of ``words``, a pattern that matches it, and longer words that begin with it, ignoring case."""
    return [re.compile(rf"(?<![A-Za-z]){re.escape(word)}", re.IGNORECASE) for word in words]


def places(words: Sequence[str], pages: Mapping[str, Path]) -> list[Place]:
    """The pages that contain all ``words``, best first; if no page does, those that contain some."""
    found = (_place(name, files.read_text(path), patterns(words)) for name, path in pages.items())
    matches = [place for place in found if place]
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
    return sum(word.search(text) is not None for word in words)


def _with_headings(text: str) -> Iterator[tuple[str, str]]:
    """The heading above each line of a page, and the line without Markdown at its ends; a heading is its own heading."""
    heading = ""
    fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith(FENCE)
        plain = re.sub(r"^[\s#|>-]+|[\s|]+$|\*\*", "", line)
        if line.startswith("#") and not fenced:
            heading = plain
        if plain:
            yield heading, plain


def _around(line: str, words: Sequence[re.Pattern[str]]) -> str:
    """The part of a line, WIDTH columns long, around the first of ``words`` in it."""
    if len(line) <= WIDTH:
        return line
    first = min((match.start() for match in (word.search(line) for word in words) if match), default=0)
    start = max(0, min(first - WIDTH // 3, len(line) - WIDTH + 2))
    end = start + WIDTH - 2
    part = line[start:end].strip()
    if start > 0:
        part = f"…{part}"
    if end < len(line):
        part += "…"
    return part
