"""A made-up language with a rule to learn, for tests and for trying things out: no file, no download."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.config import DataConfig
from hpclm.errors import ConfigError

STRIDES = (1, 3, 5, 7)
PARTS = ("train", "valid", "test")


class SyntheticSamples:
    """Sample i counts up from a random token by a stride, with documents in between."""

    dtype = np.dtype(np.int64)

    def __init__(self, length: int, context: int, seed: tuple[int, int], eod: int):
        self.length, self.context, self.seed, self.eod = length, context, seed, eod

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
    """The made-up language; training, validation and test never share a seed."""

    def __init__(self, context: int, seed: int, vocab_size: int):
        self.context, self.seed, self.vocab_size, self.eod = context, seed, vocab_size, vocab_size - 1
        self.identity: dict[str, Any] = {"source": "synthetic"}
        self.held_out = ["valid"]

    def per_epoch(self, part: str) -> int:
        """Samples in one pass: a round number, since there is no end."""
        return 10_000

    def samples(self, part: str, wanted: int | None) -> SyntheticSamples:
        """``wanted`` samples of "train", "valid" or "test"."""
        if part not in PARTS:
            raise ConfigError(f"data.source=synthetic has no part {part!r}; it has {', '.join(PARTS)}")
        number = PARTS.index(part)
        return SyntheticSamples(wanted or self.per_epoch(part), self.context, (self.seed, number), self.eod)


def synthetic(data: DataConfig, context: int, seed: int, vocab_size: int) -> SyntheticSource:
    """The source that ``data.source=synthetic`` names."""
    if vocab_size < 16:
        raise ConfigError(f"data.source=synthetic needs model.vocab_size of at least 16, not {vocab_size}")
    return SyntheticSource(context, seed, vocab_size)
