"""Where samples come from, behind one interface."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpclm.config import RunConfig
from hpclm.config.data import SOURCES
from hpclm.registry import lookup

PADDING = np.iinfo(np.int64).min
"""Stands after the end of a sample that is shorter than the others; no token is it, not even a wrong one."""


class Samples(Protocol):
    """A sequence of samples; each is context + 1 token ids: the inputs, and the last one's label."""

    dtype: np.dtype
    """Type of the rows: int64, or a smaller one that holds every token, where no sample is short."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def read(self, index: int, row: NDArray[np.integer]) -> None:
        """Fill ``row`` [context + 1], of ``dtype``, with sample ``index``, and with PADDING after the end of a shorter one."""
        ...


class Source(Protocol):
    """A dataset with its parts; ``part`` is "train", "valid", "test", or the name of a further validation set."""

    eod: int | None  # end-of-document token, None where it is not known
    identity: dict[str, Any]  # JSON: what a run that goes on must find unchanged; "tokenizer": its identity, or None
    held_out: Sequence[str]  # parts that a run evaluates; empty where the settings keep nothing for it

    def per_epoch(self, part: str) -> int:
        """Samples in one pass over the part; 0 where it has fewer tokens than one sample."""
        ...

    def samples(self, part: str, wanted: int | None) -> Samples:
        """At least ``wanted`` samples, or one pass where that is None; ConfigError where the part cannot give one."""
        ...


def build(config: RunConfig) -> Source:
    """The source that the settings name."""
    make = lookup("data.source", config.data.source, SOURCES)
    made: Source = make(config.data, config.model.context, config.seed, config.model.vocab_size)
    return made
