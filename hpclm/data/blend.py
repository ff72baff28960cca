"""Several datasets as one: which of them gives the i-th sample.

K datasets, N samples wanted. Greedy: at i the dataset that is furthest behind its weight comes next, the first of equals.
Source: NVIDIA/Megatron-LM megatron/core/datasets/blended_megatron_dataset_builder.py and helpers.cpp;
bigscience-workshop/Megatron-DeepSpeed megatron/data/blendable_dataset.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpclm.data.compiled import compiled
from hpclm.errors import ConfigError

MOST = 2**15 - 1  # datasets, whose numbers are int16
BLOCK = 1 << 20  # turns that are counted at a time
SURPLUS = 1.005  # the peers ask each dataset for half a percent more than its share


@dataclass(frozen=True, eq=False)
class Turns:
    """Whose turn it is: sample i is sample index[i] of dataset which[i], [N] each."""

    which: NDArray[np.int16]
    index: NDArray[np.int64]


def shares(weights: Sequence[float], wanted: int, policy: str) -> tuple[list[int], int]:
    """Samples to ask of each dataset so that ``wanted`` come together, and how many the blend then has."""
    whole = sum(weights)
    parts = [weight / whole for weight in weights]
    if policy == "mcore":
        asked = [math.ceil(wanted * part) for part in parts]
        return [math.ceil(number * SURPLUS) for number in asked], sum(asked)
    return [math.ceil(wanted * part * SURPLUS) for part in parts], wanted


def weighted(weights: Sequence[float], total: int) -> Turns:
    """``total`` turns in proportion to the weights."""
    whole = sum(weights)
    return _turns(np.array([weight / whole for weight in weights]), np.full(len(weights), total), total)


def exhaustive(sizes: Sequence[int]) -> Turns:
    """Turns in which every sample of every dataset comes once; sizes: samples of each."""
    total = sum(sizes)
    return _turns(np.array(sizes) / total, np.array(sizes), total)


def counts(turns: Turns, datasets: int) -> list[int]:
    """How many samples each of the datasets gives."""
    found = np.zeros(datasets, np.int64)
    for first in range(0, len(turns.which), BLOCK):
        found += np.bincount(turns.which[first : first + BLOCK], minlength=datasets)
    return found.tolist()


def _turns(weights: NDArray[np.float64], limits: NDArray[np.int64], total: int) -> Turns:
    if len(weights) > MOST:
        raise ConfigError(f"a blend of {len(weights)} datasets is too large: at most {MOST}; merge some of them")
    turns = Turns(np.empty(total, np.int16), np.empty(total, np.int64))
    compiled(_take_turns, total * len(weights))(weights, limits, turns.which, turns.index)
    return turns


def _take_turns(
    weights: NDArray[np.float64], limits: NDArray[np.int64], which: NDArray[np.int16], index: NDArray[np.int64]
) -> None:
    counts = np.zeros(len(weights), np.int64)
    for i in range(len(which)):
        due = max(float(i), 1.0)
        chosen, furthest = 0, -np.inf
        for k in range(len(weights)):
            behind = weights[k] * due - counts[k]
            if behind > furthest and counts[k] < limits[k]:
                chosen, furthest = k, behind
        which[i] = chosen
        index[i] = counts[chosen]
        counts[chosen] += 1
