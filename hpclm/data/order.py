"""The order of a dataset's samples: which documents a part has, how they are shuffled, where each sample begins.

S tokens in a sample (model.context), n sequences in the dataset, N samples wanted, E epochs. Sample i is S + 1 tokens of
the shuffled documents laid end to end, so neighbours share one. Source: NVIDIA/Megatron-LM
megatron/core/datasets/gpt_dataset.py, bigscience-workshop/Megatron-DeepSpeed megatron/data/gpt_dataset.py, and
Megatron-LM v1.1.5; what their C++ helper does one token count at a time is done here in blocks of documents.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

LAST_EPOCH_APART = {"mcore": 0.80, "bigscience": 0.95, "dse": 0.0}
"""The last epoch is shuffled on its own when less than this part of it is wanted."""
BLOCK = 1 << 16  # documents that are looked at together, so that they stay in the processor's cache


@dataclass(frozen=True)
class Order:
    """What decides the order, apart from the documents' sizes."""

    context: int
    """S"""
    seed: int
    policy: str = "mcore"
    """mcore, bigscience or dse."""
    wanted: int | None = None
    """N; None: one pass."""
    keep_partial: bool = False
    """The tokens after the last whole sample are one more, shorter sample."""


@dataclass(frozen=True, eq=False)
class Index:
    """The order of the samples.

    documents [E x sequences]: sequence ids in the order they are laid end to end, E times over.
    samples [M + 1, 2]: where sample i starts, as a place in documents and an offset in tokens; the last row ends the last.
    shuffle [M]: which sample comes i-th.
    """

    documents: NDArray[np.int32 | np.int64]
    samples: NDArray[np.int32 | np.int64]
    shuffle: NDArray[np.uint32 | np.int64]


def split_parts(split: str) -> list[float]:
    """The three numbers of ``data.split``; missing ones are 0."""
    given = [float(part) for part in split.replace("/", ",").split(",")]
    return given + [0.0] * (3 - len(given))


def split_bounds(split: str, sequences: int, policy: str) -> list[tuple[int, int]]:
    """First and last + 1 sequence of the training, validation and test part of ``sequences``."""
    given = split_parts(split)
    parts = (np.array(given) / sum(given)).tolist()
    bounds = [0.0]
    if policy == "mcore":
        for part in parts:
            bounds.append(bounds[-1] + part)
        whole = [round(bound * float(sequences)) for bound in bounds]
    else:
        for part in parts:
            bounds.append(bounds[-1] + round(part * float(sequences)))
        overshoot = int(bounds[-1]) - sequences
        whole = [0, *(max(0, int(bound) - overshoot) for bound in bounds[1:])]
    return list(pairwise(whole))


def samples_in(tokens: int, context: int, keep_partial: bool = False) -> int:
    """Samples in ``tokens`` tokens: the last token of each is the first of the next."""
    return max(0, -(-(tokens - 1) // context) if keep_partial else (tokens - 1) // context)


def build_index(sizes: NDArray[np.int32], span: range, order: Order) -> Index:
    """The order of at least ``order.wanted`` samples of the sequences ``span``, which hold enough tokens for one.

    sizes [n]: tokens of every sequence of the dataset.
    """
    context, wanted = order.context, order.wanted
    per_epoch = int(sizes[span.start : span.stop].sum(dtype=np.int64))
    epochs = 1 if wanted is None else max(1, -(-(wanted * context + 1) // per_epoch))
    total = samples_in(epochs * per_epoch, context, order.keep_partial)
    before_last = ((epochs - 1) * per_epoch - 1) // context
    enough = int(LAST_EPOCH_APART[order.policy] * ((per_epoch - 1) // context))
    apart = wanted is not None and epochs > 1 and wanted - before_last < enough
    runs = [epochs - 1, 1] if apart else [epochs]

    rng = np.random.RandomState(order.seed)  # the peers' generator, drawn from in their order
    longest = int(sizes[span.start : span.stop].max())
    wide = max(len(sizes), epochs * len(span), longest) > 2**31 - 1
    documents = np.arange(span.start, span.stop, dtype=np.int64 if wide else np.int32)
    if epochs > 1:
        documents = np.tile(documents, epochs)
    _shuffle(rng, documents, [len(span) * run for run in runs])
    samples = _starts(sizes, documents, total, context)
    shuffle = np.arange(total, dtype=np.uint32 if total < 2**32 - 2 else np.int64)
    _shuffle(rng, shuffle, [before_last, total - before_last] if apart else [total])
    return Index(documents, samples, shuffle)


def _shuffle(rng: np.random.RandomState, values: NDArray, lengths: list[int]) -> None:
    """Shuffle consecutive stretches of ``values`` in place, each within itself."""
    begin = 0
    for length in lengths:
        rng.shuffle(values[begin : begin + length])
        begin += length


def _starts(sizes: NDArray[np.int32], documents: NDArray[np.integer], total: int, context: int) -> NDArray:
    """Where each sample starts, and after them where the last ends: [total + 1, 2], place in documents and offset.

    A document that ends after e tokens holds the starts number ceil(e' / S) up to ceil(e / S), where the one before it
    ended after e'; so one pass over the documents finds all, with nothing searched for.
    """
    rows = np.empty((total + 1, 2), documents.dtype)
    end = done = 0
    for first in range(0, len(documents), BLOCK):
        lengths = np.take(sizes, documents[first : first + BLOCK], mode="clip")  # none is outside; saves looking
        ends = np.cumsum(lengths, dtype=np.int64)
        ends += end
        reached = np.minimum(-(-ends // context), total + 1)  # starts before the end of each document
        previous = np.concatenate(([done], reached[:-1]))
        holders = np.flatnonzero(reached > previous)
        place = np.repeat(holders, reached[holders] - previous[holders])
        stop = done + len(place)
        rows[done:stop, 0] = place + first
        rows[done:stop, 1] = np.arange(done, stop, dtype=np.int64) * context - (ends - lengths)[place]
        done, end = stop, int(ends[-1])
    if done <= total:  # the last sample is cut short where the documents end
        last = len(documents) - 1
        while sizes[documents[last]] == 0:
            last -= 1
        rows[done:] = last, sizes[documents[last]] - 1
    return rows
