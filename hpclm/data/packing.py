"""Best-fit packing (data.order=packed): whole documents in samples of S + 1 tokens, with hardly any padding.

A longer document is cut into pieces of S + 1 tokens and a rest. Each piece begins with the last token of the previous piece, so every
token but a document's first is predicted exactly once. Pieces are placed by decreasing length, each into the fullest sample with room.
Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv:2404.10830).
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SHORTEST = 2  # minimum tokens of a piece: the first one predicts the second


@dataclass(frozen=True, eq=False)
class Packing:
    """The contents of M samples, made of P pieces: sample i has the pieces bounds[i] to bounds[i + 1] - 1."""

    starts: NDArray[np.int64]
    """[P] index in the dataset of the first token of each piece."""
    sizes: NDArray[np.int32]
    """[P] tokens in each piece."""
    bounds: NDArray[np.int64]
    """[M + 1]"""


def pack(sizes: NDArray[np.int32], first: int, context: int, seed: int) -> Packing:
    """Pack consecutive documents of ``sizes`` [n] tokens, the first beginning at token ``first``, for S = ``context``.

    The seed determines the placement among documents of equal length, and the order of the pieces in a sample.
    """
    room = context + 1
    ends = first + np.cumsum(sizes, dtype=np.int64)
    counts = -(-(np.maximum(sizes, 1) - 1) // context)
    document = np.repeat(np.arange(len(sizes)), counts)
    begin = np.arange(len(document)) - np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
    begin *= context
    lengths = np.minimum(sizes[document] - begin, room).astype(np.int32)
    starts = (ends - sizes)[document] + begin
    del document, begin, ends
    drawn = np.random.RandomState(seed).permutation(len(lengths))
    missing = (room - lengths[drawn]).astype(np.uint16 if room < 1 << 16 else np.int32)  # 16 bits are sorted faster
    order = drawn[np.argsort(missing, kind="stable")]
    sample = np.empty(len(lengths), np.int64)
    sample[order] = _best_fit(np.bincount(lengths, minlength=room + 1), room)
    del order, missing
    grouped = drawn[np.argsort(sample[drawn], kind="stable")]
    bounds = np.concatenate(([0], np.cumsum(np.bincount(sample))))
    return Packing(starts[grouped], lengths[grouped], bounds)


def _best_fit(counts: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """The sample of each piece, by decreasing length. ``counts`` [room + 1]: number of pieces of each length.

    Pieces of equal length are placed together, in samples with equal room. Each such round at least halves the room in these samples, so
    there are O(room log room) rounds for any number of pieces.
    """
    samples = np.empty(int(counts.sum()), np.int64)
    done = opened = 0
    groups: list[
        tuple[int, int, int]
    ] = []  # sorted: room left in each sample of the group, its first sample, number of samples
    for size in np.flatnonzero(counts)[::-1].tolist():
        pieces = int(counts[size])
        while pieces:
            place = bisect_left(groups, (size, 0, 0))
            if place == len(groups):
                number = -(-pieces // (room // size))
                groups.append((room, opened, number))
                opened += number
            left, first, number = groups.pop(place)
            per_sample = min(left // size, pieces)
            filled = min(number, pieces // per_sample)
            samples[done : done + filled * per_sample] = np.repeat(np.arange(first, first + filled), per_sample)
            done += filled * per_sample
            pieces -= filled * per_sample
            if left - per_sample * size >= SHORTEST:
                insort(groups, (left - per_sample * size, first, filled))
            if filled < number:
                insort(groups, (left, first + filled, number - filled))
    return samples
