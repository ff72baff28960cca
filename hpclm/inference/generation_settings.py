"""How a continuation is sampled, and where it ends. PyTorch, whose import takes seconds, is not imported: wrong values are refused first."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hpclm.base.errors import ArgumentError
from hpclm.config.checks import is_utf8


@dataclass(frozen=True)
class Limits:
    """Where a continuation ends, besides the end of the document."""

    tokens: int = 100
    """Maximum number of new tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end the continuation, and are not part of it."""

    def __post_init__(self) -> None:
        ArgumentError.refuse(self._wrong())

    def _wrong(self) -> Iterator[tuple[str, object, str]]:
        if self.tokens < 1:
            yield "tokens", self.tokens, "must be at least 1"
        for text in self.stop:
            if not text:
                yield "stop", text, "is empty; give the text to stop at"
            if not is_utf8(text):
                yield "stop", text, "is not UTF-8 text"


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen."""

    temperature: float = 0.8
    """Divides the logits; 0 always takes the most likely token."""
    top_k: int | None = 50
    """Sample from this many most likely tokens; None: from all."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens with at least this total probability."""
    seed: int = 0
    """Seed of the random numbers; the same seed gives the same text."""
    first: int = 0
    """Number of the first sequence of a batch, counted over all batches of a list of prompts."""

    def __post_init__(self) -> None:
        ArgumentError.refuse(self._wrong())

    def _wrong(self) -> Iterator[tuple[str, object, str]]:
        if not 0 <= self.temperature < math.inf:
            yield "temperature", self.temperature, "must be a finite number of at least 0"
        if self.top_k is not None and self.top_k < 1:
            yield "top_k", self.top_k, "must be at least 1"
        if not 0 < self.top_p <= 1:
            yield "top_p", self.top_p, "must be more than 0 and at most 1"
