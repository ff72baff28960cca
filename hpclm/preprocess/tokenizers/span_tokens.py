"""Marks the tokens of a text that count in the loss: the tokens of given spans, such as the answers of a conversation.

Generation tokenizes the text before a span alone. The resulting ids may differ from those in the whole text, for example if a token
crosses the beginning of a span. In that case the text is tokenized in pieces: the spans, and the text between them.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

APART = ("\n", ":", "0", "a")
"""Texts before a piece that make a tokenizer treat it as the middle of a text, if no token spans the two."""


class Marked(NamedTuple):
    """The tokens of a text, and whether each counts in the loss."""

    ids: NDArray[np.int64]
    """[t]"""
    counts: NDArray[np.bool_]
    """[t]"""
    spanning: bool
    """Whether a token spans the end of a prompt and the beginning of an answer, because they cannot be tokenized apart."""


def marked(model: Any, special: Mapping[str, int], text: str, spans: list[tuple[int, int]]) -> Marked:
    """Ids of ``text``, and whether each has characters in one of ``spans``, as transformers marks them.

    ``model``: a Tokenizer of the tokenizers library; ``special``: ids of its special tokens.
    """
    encoding = model.encode(text, add_special_tokens=False)
    ids = np.array(encoding.ids, np.int64)
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    counts = np.zeros(len(offsets), np.bool_)
    for begin, end in spans:
        counts |= (offsets[:, 0] < end) & (offsets[:, 1] > begin)
    apart = _joined(spans)
    is_special = np.isin(ids, [*special.values()])
    if _as_generated(model, text, ids, offsets, is_special, apart):
        return Marked(ids, counts, False)
    return _in_pieces(model, special, text, ids, apart) or Marked(ids, counts, True)


def _as_generated(
    model: Any, text: str, ids: NDArray, offsets: NDArray, is_special: NDArray, spans: list[tuple[int, int]]
) -> bool:
    """Whether no token crosses the bounds of a span, and the text before each span has the same ids alone.

    A special token is always a token by itself, so the text before the last one need not be tokenized again.
    """
    for begin, end in spans:
        if any(((offsets[:, 0] < bound) & (offsets[:, 1] > bound)).any() for bound in (begin, end)):
            return False
        before = np.count_nonzero(offsets[:, 1] <= begin)
        last = max(np.flatnonzero(is_special[:before]), default=None)
        first, start = 0, 0
        if last is not None:
            first, start = int(last), int(offsets[last, 0])
        alone = model.encode(text[start:begin], add_special_tokens=False).ids
        if alone != ids[first:before].tolist():
            return False
    return True


def _in_pieces(
    model: Any, special: Iterable[str], text: str, whole: NDArray, spans: list[tuple[int, int]]
) -> Marked | None:
    """``marked`` with tokens that end at the bounds of ``spans``; None if such tokens do not decode to the text.

    A tokenizer may put a space before any text. So a piece is tokenized after the special token that precedes it. Without such a token, it
    is tokenized after another text, and the tokens of that text are removed again.
    """
    cuts = sorted({0, len(text), *chain.from_iterable(spans)})
    before = [max((token for token in special if text.endswith(token, 0, cut)), key=len, default="") for cut in cuts]
    expected = model.decode(whole.tolist(), skip_special_tokens=False)
    for others in (("",), APART):
        pieces = [
            _after(model, [token] if token or not begin else others, text[begin:end])
            for token, (begin, end) in zip(before, pairwise(cuts), strict=False)
        ]
        ids = [id for piece in pieces for id in piece or ()]
        if None not in pieces and model.decode(ids, skip_special_tokens=False) == expected:
            counts = np.repeat([begin in dict(spans) for begin in cuts[:-1]], [len(piece or ()) for piece in pieces])
            return Marked(np.array(ids, np.int64), counts, False)
    return None


def _after(model: Any, others: Sequence[str], text: str) -> list[int] | None:
    """The ids of ``text`` after the first of ``others`` that does not affect them; None without one."""
    for before in others:
        given, whole = (model.encode(part, add_special_tokens=False).ids for part in (before, before + text))
        if whole[: len(given)] == given:
            return list(whole[len(given) :])
    return None


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """``spans`` without empty ones, and with adjacent ones joined."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if joined and joined[-1][1] >= begin:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined
