"""Blend several datasets: choose the dataset of the i-th sample.

K datasets, N samples requested. The next sample comes from the dataset that is furthest behind its weight, or the first such dataset.
Source: NVIDIA/Megatron-LM megatron/core/datasets/blended_megatron_dataset_builder.py and helpers.cpp;
bigscience-workshop/Megatron-DeepSpeed megatron/data/blendable_dataset.py.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpclm.base.errors import ConfigError

log = logging.getLogger(__name__)
MAX_DATASETS = 2**15 - 1  # indices of datasets are int16
NUMBERS_PER_BLOCK = 1 << 20  # numbers held at a time
SECONDS = 1e-6  # time per sample, whatever the number of datasets
SAMPLES_WORTH_A_LINE = 5_000_000  # minimum number of samples for a log line
SURPLUS = 1.005  # the other projects request half a percent more than needed from each dataset


@dataclass(frozen=True, eq=False)
class BlendIndex:
    """The blend order: sample i is sample index[i] of dataset which[i], [N] each."""

    which: NDArray[np.int16]
    index: NDArray[np.int64]


def shares(weights: Sequence[float], requested: int, policy: str) -> tuple[list[int], int]:
    """Samples to request from each dataset for ``requested`` in total, and the resulting size of the blend."""
    whole = sum(weights)
    parts = [weight / whole for weight in weights]
    if policy in ("mcore", "packed"):
        asked = [math.ceil(requested * part) for part in parts]
        return [math.ceil(number * SURPLUS) for number in asked], sum(asked)
    return [math.ceil(requested * part * SURPLUS) for part in parts], requested


def weighted(weights: Sequence[float], total: int) -> BlendIndex:
    """A blend of ``total`` samples in proportion to the weights."""
    whole = sum(weights)
    return _blended(np.array([weight / whole for weight in weights]), np.full(len(weights), total), total)


def exhaustive(sizes: Sequence[int]) -> BlendIndex:
    """A blend with every sample of every dataset once. ``sizes``: the number of samples in each dataset."""
    total = sum(sizes)
    return _blended(np.array(sizes) / total, np.array(sizes), total)


def counts(blend_index: BlendIndex, datasets: int, samples: int | None = None) -> list[int]:
    """Number of samples from each dataset among the first ``samples``, or all."""
    found: dict[int, int] = {}
    stop = len(blend_index.which) if samples is None else samples
    block = 1 << 10
    while stop and len(found) < datasets:  # the last sample of a dataset says how many there are
        first = max(0, stop - block)
        which, last = np.unique(blend_index.which[first:stop][::-1], return_index=True)
        for dataset, back in zip(which.tolist(), last.tolist(), strict=True):
            found.setdefault(dataset, int(blend_index.index[stop - 1 - back]) + 1)
        stop = first
        block = min(2 * block, NUMBERS_PER_BLOCK)
    return [found.get(dataset, 0) for dataset in range(datasets)]


def _blended(weights: NDArray[np.float64], limits: NDArray[np.int64], total: int) -> BlendIndex:
    """``limits`` [K]: samples available in each dataset."""
    if len(weights) > MAX_DATASETS:
        raise ConfigError(
            f"a blend of {len(weights)} datasets is too large: at most {MAX_DATASETS}; merge some of them"
        )
    if total > SAMPLES_WORTH_A_LINE:
        log.info("blending %s samples takes about %.0f s, once", f"{total:,}", total * SECONDS)
    blend_index = BlendIndex(np.empty(total, np.int16), np.empty(total, np.int64))
    counts = np.where(limits > 0, 0.0, np.inf)  # inf: no sample is left
    left = limits.tolist()
    rows = max(1, NUMBERS_PER_BLOCK // len(weights))
    for first in range(0, total, rows):
        which = []
        index = []
        due = np.maximum(np.arange(first, min(first + rows, total), dtype=np.float64), 1.0)
        for wanted in np.multiply.outer(due, weights):
            chosen = int((wanted - counts).argmax())
            number = int(counts[chosen])
            which.append(chosen)
            index.append(number)
            counts[chosen] = number + 1 if number + 1 < left[chosen] else np.inf
        blend_index.which[first : first + rows] = which
        blend_index.index[first : first + rows] = index
    return blend_index
