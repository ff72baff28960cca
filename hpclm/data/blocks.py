"""fairseq's way from lines to samples: blocks of at most S tokens, cut where ``data.break_mode`` says.

Source: facebookresearch/fairseq fairseq/data/token_block_dataset.py and token_block_utils_fast.pyx.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpclm.data.compiled import compiled

SEPARATOR = 1  # tokens in a line that ends a document: nothing but </s>


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of the lines laid end to end: tokens bounds[i, 0] up to bounds[i, 1], [M, 2]; fresh [M]: begins with a line."""

    bounds: NDArray[np.int64]
    fresh: NDArray[np.bool_]


def blocks(sizes: NDArray[np.int32], longest: int, mode: str) -> Blocks:
    """The blocks of lines of these sizes, in their order.

    none: every ``longest`` tokens; eos: each line; complete: as many whole lines as fit, at least one;
    complete_doc: the same within documents, which lines of one token end and which blocks of one token are left out of.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    if mode == "none":
        starts = np.arange(0, total, longest, dtype=np.int64)
        bounds = np.stack((starts, np.minimum(starts + longest, total)), 1)
    elif mode == "eos":
        bounds = np.stack((ends - sizes, ends), 1)[sizes > 0]
    else:
        bounds = np.empty((len(sizes), 2), np.int64)
        found = compiled(_pack, len(sizes))(sizes, longest, mode == "complete_doc", bounds)
        bounds = bounds[:found].copy()
    begins = np.concatenate(([0], ends[:-1]))
    near = np.minimum(np.searchsorted(begins, bounds[:, 0]), max(len(begins) - 1, 0))
    return Blocks(bounds, begins[near] == bounds[:, 0])


def _pack(sizes: NDArray[np.int32], longest: int, by_document: bool, bounds: NDArray[np.int64]) -> int:
    """Fill ``bounds`` with blocks of whole lines; gives their number."""
    found = 0
    start = end = 0
    for i in range(len(sizes)):
        size = sizes[i]
        separator = by_document and size == SEPARATOR
        if separator or (end > start and end - start + size > longest):
            if end - start > (1 if by_document else 0):
                bounds[found, 0], bounds[found, 1] = start, end
                found += 1
            start = end
        end += size
        if separator:
            start = end
    if end - start > (1 if by_document else 0):
        bounds[found, 0], bounds[found, 1] = start, end
        found += 1
    return found


def shuffled(count: int, wanted: int, seed: int) -> NDArray[np.int64]:
    """Which block comes i-th: ``wanted`` of ``count``, every pass in an order of its own."""
    passes = -(-wanted // count)
    return np.concatenate([np.random.RandomState((seed + i) % 2**32).permutation(count) for i in range(passes)])
