"""The order of a dataset's samples: the documents of a split, their shuffling, and the start of each sample.

S tokens in a sample (model.context), n sequences in the dataset, N samples requested, E epochs. Sample i is S + 1 tokens of the
concatenated shuffled documents, so neighbours share one. Source: NVIDIA/Megatron-LM megatron/core/datasets/gpt_dataset.py,
bigscience-workshop/Megatron-DeepSpeed megatron/data/gpt_dataset.py, and Megatron-LM v1.1.5. Their C++ helper processes one document at a
time; this file processes blocks of documents.

fairseq's samples are ``blocks`` of at most S tokens instead, divided according to ``data.break_mode``. Source: facebookresearch/fairseq
fairseq/data/token_block_dataset.py and token_block_utils_fast.pyx.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

LAST_EPOCH_APART = {"mcore": 0.80, "bigscience": 0.95, "dse": 0.0}
"""The last epoch is shuffled separately if less than this fraction of it is requested."""
DOCUMENTS_PER_BLOCK = 1 << 16  # documents processed at a time, to stay in the processor's cache
SEPARATOR = 1  # tokens of a line that ends a document: only </s>


@dataclass(frozen=True)
class Order:
    """The parameters of the order, besides the sizes of the documents."""

    context: int
    """S"""
    seed: int
    policy: str = "mcore"
    """mcore, bigscience or dse."""
    requested: int | None = None
    """N; None: one epoch."""
    keep_partial: bool = False
    """Whether the tokens after the last whole sample form a shorter sample."""


@dataclass(frozen=True, eq=False)
class SampleIndex:
    """The order of the samples.

    documents [E x sequences]: sequence ids in the order of concatenation, E times over.
    samples [M + 1, 2]: start of sample i, as an index in documents and an offset in tokens; the last row ends the last sample.
    shuffle [M]: the number of the sample that comes i-th.
    """

    documents: NDArray[np.int32 | np.int64]
    samples: NDArray[np.int32 | np.int64]
    shuffle: NDArray[np.uint32 | np.int64]


def split_parts(split: str) -> list[float]:
    """The three numbers of ``data.split``; missing ones are 0."""
    given = [float(part) for part in split.replace("/", ",").split(",")]
    return given + [0.0] * (3 - len(given))


def split_bounds(split: str, sequences: int, policy: str = "mcore") -> list[tuple[int, int]]:
    """First and last + 1 sequence of the training, validation and test split. ``sequences``: number of sequences, or of tokens."""
    given = split_parts(split)
    parts = (np.array(given) / sum(given)).tolist()
    bounds = [0.0]
    if policy in ("mcore", "packed"):
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
    """Number of samples in ``tokens`` tokens; the last token of a sample is also the first of the next."""
    if keep_partial:
        tokens += context - 1
    return max(0, (tokens - 1) // context)


def passes(tokens: int, order: Order) -> int:
    """E: number of epochs over a split of ``tokens`` tokens needed for the requested samples."""
    return 1 if order.requested is None else max(1, -(-(order.requested * order.context + 1) // tokens))


def index_bytes(sequences: int, tokens: int, order: Order) -> int:
    """Bytes of the index of a split with ``sequences`` sequences and ``tokens`` tokens."""
    epochs = passes(tokens, order)
    samples = samples_in(epochs * tokens, order.context, order.keep_partial)
    width = 8 if epochs * sequences > 2**31 - 1 else 4
    shuffle_width = 4 if samples < 2**32 - 2 else 8
    return width * (epochs * sequences + 2 * samples) + shuffle_width * samples


def build_index(sizes: NDArray[np.int32], span: range, order: Order) -> SampleIndex:
    """The order of at least ``order.requested`` samples of the sequences ``span``, which hold enough tokens for one.

    A split shorter than one sample is repeated, as in Megatron; with ``requested`` None it has no sample.

    ``sizes`` [n]: tokens of every sequence of the dataset.
    """
    context = order.context
    requested = order.requested
    per_epoch = int(sizes[span.start : span.stop].sum(dtype=np.int64))
    epochs = passes(per_epoch, order)
    total = samples_in(epochs * per_epoch, context, order.keep_partial)
    before_last = ((epochs - 1) * per_epoch - 1) // context
    enough = int(LAST_EPOCH_APART[order.policy] * ((per_epoch - 1) // context))
    epoch_runs, sample_runs = [epochs], [total]
    if requested is not None and epochs > 1 and requested - before_last < enough:
        epoch_runs = [epochs - 1, 1]
        sample_runs = [before_last, total - before_last]

    rng = np.random.RandomState(order.seed)  # the same generator, used in the same sequence, as in the other projects
    longest = int(sizes[span.start : span.stop].max())
    wide = max(len(sizes), epochs * len(span), longest) > 2**31 - 1
    documents: NDArray = np.arange(span.start, span.stop, dtype=np.int64 if wide else np.int32)
    if epochs > 1:
        documents = np.tile(documents, epochs)
    # documents first, then samples, from one generator: the order of the two calls is part of the format
    _shuffle(rng, documents, [len(span) * run for run in epoch_runs])
    samples = _starts(sizes, documents, total, context)
    shuffle: NDArray = np.arange(total, dtype=np.uint32 if total < 2**32 - 2 else np.int64)
    _shuffle(rng, shuffle, sample_runs)
    return SampleIndex(documents, samples, shuffle)


def _shuffle(rng: np.random.RandomState, values: NDArray, lengths: list[int]) -> None:
    begin = 0
    for length in lengths:
        rng.shuffle(values[begin : begin + length])
        begin += length


def _starts(sizes: NDArray[np.int32], documents: NDArray[np.integer], total: int, context: int) -> NDArray:
    """Start of each sample, and end of the last: [total + 1, 2], index in documents and offset.

    A document that covers tokens e' to e contains the starts of samples ceil(e' / S) to ceil(e / S) - 1, so one pass over the documents
    finds every start.
    """
    rows = np.empty((total + 1, 2), documents.dtype)
    end = done = 0
    for first in range(0, len(documents), DOCUMENTS_PER_BLOCK):
        # "clip" skips the bounds check
        lengths = np.take(sizes, documents[first : first + DOCUMENTS_PER_BLOCK], mode="clip")
        ends = np.cumsum(lengths, dtype=np.int64)
        ends += end
        reached = np.minimum(
            -(-ends // context), total + 1
        )  # number of samples that start before the end of each document
        previous = np.concatenate(([done], reached[:-1]))
        holders = np.flatnonzero(reached > previous)
        place = np.repeat(holders, reached[holders] - previous[holders])
        stop = done + len(place)
        rows[done:stop, 0] = place + first
        rows[done:stop, 1] = np.arange(done, stop, dtype=np.int64) * context - (ends - lengths)[place]
        done = stop
        end = int(ends[-1])
    if done <= total:  # the last sample ends with the documents
        last = len(documents) - 1
        while sizes[documents[last]] == 0:
            last -= 1
        rows[done:] = last, sizes[documents[last]] - 1
    return rows


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of the concatenated lines."""

    bounds: NDArray[np.int64]
    """[M, 2] first and last + 1 token of each block."""
    fresh: NDArray[np.bool_]
    """[M] whether a block starts at the beginning of a line."""


def blocks(sizes: NDArray[np.int32], longest: int, mode: str) -> Blocks:
    """The blocks of lines of these sizes, in order.

    none: every ``longest`` tokens; eos: each line; complete: as many whole lines as fit, at least one; complete_doc: the same within
    documents. Lines of one token end a document, and blocks of one token are omitted.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    total = int(sizes.sum(dtype=np.int64))
    if mode == "none":
        starts = np.arange(0, total, longest, dtype=np.int64)
        bounds = np.stack((starts, np.minimum(starts + longest, total)), 1)
    elif mode == "eos":
        bounds = np.stack((ends - sizes, ends), 1)[sizes > 0]
    else:
        bounds = _whole_lines(sizes[sizes > 0], longest, mode == "complete_doc")
    begins = np.concatenate(([0], ends[:-1]))
    near = np.minimum(np.searchsorted(begins, bounds[:, 0]), max(len(begins) - 1, 0))
    return Blocks(bounds, begins[near] == bounds[:, 0])


def _whole_lines(sizes: NDArray[np.int32], longest: int, by_document: bool) -> NDArray[np.int64]:
    """The bounds of non-empty blocks of whole lines.

    The end of a block that starts with a given line is computed for all lines at once; only the steps from block to block are a loop.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    following = np.arange(1, len(sizes) + 1)
    after = np.maximum(np.searchsorted(ends, ends - sizes + longest, "right"), following)  # the next block's first line
    if by_document:
        alone = sizes == SEPARATOR
        stops = np.append(np.flatnonzero(alone), len(sizes))
        after = np.where(alone, following, np.minimum(after, stops[np.searchsorted(stops, following)]))
    firsts = [np.empty(0, np.int64)]
    line = 0
    for begin in range(0, len(sizes), DOCUMENTS_PER_BLOCK):
        jumps = after[begin : begin + DOCUMENTS_PER_BLOCK].tolist()
        reached = []
        while line < begin + len(jumps):
            reached.append(line)
            line = jumps[line - begin]
        firsts.append(np.array(reached, np.int64))
    first = np.concatenate(firsts)
    bounds = np.stack((ends[first] - sizes[first], ends[after[first] - 1]), 1)
    if by_document:
        bounds = bounds[bounds[:, 1] - bounds[:, 0] > 1]
    return bounds


def shuffled(count: int, requested: int, seed: int) -> NDArray[np.int64]:
    """The order of ``requested`` out of ``count`` blocks, shuffled anew in each epoch."""
    passes = -(-requested // count)
    return np.concatenate([np.random.RandomState((seed + i) % 2**32).permutation(count) for i in range(passes)])
