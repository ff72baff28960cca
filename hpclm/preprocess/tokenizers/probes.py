"""Whether two tokenizers give the same ids, on texts in which tokenizers tend to differ."""

import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import zip_longest

from hpclm.data.tokenizers import Tokenizer

PROBES = (
    "line\nbreak", "two  spaces", " before", "after ", "", "   ", "tab\there", "a\r\nb", "\n\n", "x\n\n\ny", "don't",
    "I'LL", "12,345.67 + 8%", "...---...", "aaaaaaaaaaaa", "ﬁne ①② Ｈｅｌｌｏ", "caf\u00e9 cafe\u0301 a\u0301\u0323",
    "ÀÉÎõß", "x\u00a0y\u200bz", "日本語のテキスト。", "中文，没有空格。", "한국어 문장", "Привет, мир", "مرحبا ١٢٣", "\u2581under",
    "😀 x 👩\u200d👩\u200d👧", "a\x01b", "\ufeffbom", "def f(x):\n    return x  # a comment\n",
    "The quick brown fox jumps over the lazy dog; so it goes, and then it comes back again.",
)  # fmt: skip
WIDTH = 16
CHUNKS = 256
"""Up to CHUNKS test texts are made from the vocabulary, each of WIDTH consecutive ids."""


def differing(
    ours: Callable[[str], list[int]],
    theirs: Callable[[str], list[int]],
    tokenizer: Tokenizer,
    added: Sequence[str] = (),
    avoided: Sequence[str] = (),
) -> str | None:
    """The first test text that ``theirs`` and ``ours`` encode differently, with both ids; None if all agree.

    ``tokenizer``: its vocabulary supplies test texts. ``added``: tokens to use in further test texts. ``avoided``: tokens that must not
    occur in test texts.
    """
    size = tokenizer.size
    pieces = (range(begin, min(begin + WIDTH, size)) for begin in range(0, size, max(WIDTH, size // CHUNKS)))
    written = (tokenizer.decode(list(ids)) for ids in pieces)
    for text in (*PROBES, *_texts_with(added), *written, *_characters()):
        if any(token in text for token in avoided):
            continue
        here = ours(text)
        there = theirs(text)
        if here != there:
            pairs = enumerate(zip_longest(here, there))
            first = next(place for place, (one, other) in pairs if one != other)
            here, there = (ids[first : first + 6] for ids in (here, there))
            return f"{text[:57]!r} is {here} here and {there} there, from id {first} on"
    return None


def _texts_with(tokens: Sequence[str]) -> Iterator[str]:
    """Texts with added ``tokens`` alone, between words and next to each other."""
    for begin in range(0, len(tokens), 64):
        some = tokens[begin : begin + 64]
        yield "".join(some)
        yield "".join(f"the {token} cat{token}sat\n" for token in some)


@cache
def _characters() -> tuple[str, ...]:
    """Texts with every character that normalisation may change, composed and decomposed, in upper and lower case."""
    changed = (c for c in map(chr, range(0x80, sys.maxunicode)) if unicodedata.decomposition(c) or c.lower() != c)
    forms = [
        form
        for c in changed
        for form in dict.fromkeys(
            [c, *(unicodedata.normalize(nf, x) for nf in ("NFD", "NFKD") for x in (c, c.upper()))]
        )
    ]
    return tuple(" ".join(forms[begin : begin + 64]) for begin in range(0, len(forms), 64))
