"""Where samples come from, behind one interface."""

from typing import Any, Protocol

import numpy as np

from hpclm.config import RunConfig
from hpclm.config.schema import SOURCES
from hpclm.registry import lookup


class Samples(Protocol):
    """A sequence of samples; each is [context + 1] token ids: the inputs, and the last one's label."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample ``index``, [context + 1]."""
        ...


class Source(Protocol):
    """A dataset with its parts; ``part`` is "train", "valid" or "test"."""

    eod: int | None  # end-of-document token, None where it is not known
    identity: dict[str, Any]  # JSON: what a run that goes on must find unchanged

    def weight(self, part: str) -> float:
        """How much of the data the settings give to the part; 0 where it is left out on purpose."""
        ...

    def per_epoch(self, part: str) -> int:
        """Samples in one pass over the part; 0 where it has fewer tokens than one sample."""
        ...

    def samples(self, part: str, wanted: int | None) -> Samples:
        """At least ``wanted`` samples, or one pass where that is None; ConfigError where the part cannot give one."""
        ...


def build(config: RunConfig) -> Source:
    """The source that the settings name."""
    make = lookup("data.source", config.data.source, SOURCES)
    return make(config.data, config.model.context, config.seed, config.model.vocab_size)
