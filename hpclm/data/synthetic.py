"""A synthetic language with a simple rule to learn, for tests and experiments; needs no files."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.base.errors import ConfigError
from hpclm.config import DataConfig

STRIDES = (1, 3, 5, 7)
SPLITS = ("train", "valid", "test")


class SyntheticSamples:
    """A sample is a series of documents. Each document counts up from a random token by a random stride."""

    dtype = np.dtype(np.int64)

    def __init__(self, length: int, context: int, seed: tuple[int, int], eod: int):
        self.length = length
        self.context = context
        self.seed = seed
        self.eod = eod

    def __len__(self) -> int:
        return self.length

    def read(self, index: int, row: NDArray[np.integer]) -> None:
        """Fill ``row`` [context + 1] with sample ``index``."""
        draw = np.random.default_rng((*self.seed, index))
        filled = 0
        while filled < len(row):
            size = int(draw.integers(self.context // 4 + 1, self.context + 2))
            document = draw.integers(self.eod) + np.arange(size) * draw.choice(STRIDES)
            piece = np.append(document % self.eod, self.eod)[: len(row) - filled]
            row[filled : filled + len(piece)] = piece
            filled += len(piece)


class SyntheticSource:
    """The synthetic language; training, validation and test have different seeds."""

    def __init__(self, context: int, seed: int, vocab_size: int):
        self.context = context
        self.seed = seed
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1
        self.fingerprint: dict[str, Any] = {"source": "synthetic"}
        self.held_out = ["valid"]

    def per_epoch(self, split: str) -> int:
        """Samples per epoch: an arbitrary number, since the data are unlimited."""
        return 10_000

    def samples(self, split: str, requested: int | None) -> SyntheticSamples:
        """``requested`` samples of "train", "valid" or "test"."""
        if split not in SPLITS:
            raise ConfigError(f"data.source=synthetic has no split {split!r}; it has {', '.join(SPLITS)}")
        number = SPLITS.index(split)
        return SyntheticSamples(requested or self.per_epoch(split), self.context, (self.seed, number), self.eod)


def synthetic(data: DataConfig, context: int, seed: int, vocab_size: int) -> SyntheticSource:
    """The source for ``data.source=synthetic``."""
    if vocab_size < 16:
        raise ConfigError(f"data.source=synthetic needs model.vocab_size of at least 16, not {vocab_size}")
    return SyntheticSource(context, seed, vocab_size)
