"""How the next token is chosen from the model's logits."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hpclm.config.checks import Checked
from hpclm.errors import ConfigError

NOT_FINITE = (
    "the model gives values that are not finite: its newest checkpoint was saved when training had diverged, or "
    "engine.precision is too narrow for it; hpclm checkpoints lists the run's others"
)


@dataclass(frozen=True)
class Sampling(Checked):
    """How tokens are chosen."""

    temperature: float = 0.8
    """Divides the logits; 0 always takes the most likely token."""
    top_k: int | None = 50
    """Sample from this many most likely tokens; None: from all."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens whose probabilities sum to at least this."""
    seed: int = 0
    """Same seed, same text."""
    first: int = 0
    """Number of the first sequence of a batch: a batch that goes on with a list of prompts counts on."""

    def problems(self) -> Iterator[str]:
        """What cannot work."""
        if not 0 <= self.temperature < math.inf:
            yield f"--temperature {self.temperature} must be a finite number of at least 0"
        if self.top_k is not None and self.top_k < 1:
            yield f"--top-k {self.top_k} must be at least 1"
        if not 0 < self.top_p <= 1:
            yield f"--top-p {self.top_p} must be more than 0 and at most 1"


class Sampler:
    """Chooses the tokens of one sequence: what it chooses does not depend on the sequences beside it."""

    def __init__(self, sampling: Sampling, number: int):
        """``number``: of the sequence, from 0; each has its own random numbers."""
        self.sampling = sampling
        self.generator = torch.Generator().manual_seed((sampling.seed + number * 0x9E3779B97F4A7C15) % 2**63)

    def __call__(self, logits: Tensor) -> int:
        """A token, given the [V] logits."""
        size = len(logits) if self.sampling.top_k is None else min(self.sampling.top_k, len(logits))
        values, indices = logits.double().cpu().topk(size)
        probabilities = ((values - values[0]) / self.sampling.temperature).softmax(0)
        if self.sampling.top_p < 1:
            before = probabilities.cumsum(0) - probabilities
            probabilities = probabilities.masked_fill(before >= self.sampling.top_p, 0.0)
        return int(indices[torch.multinomial(probabilities, 1, generator=self.generator)])


def choose(logits: Tensor, samplers: list[Sampler]) -> list[int]:
    """The next token of each sequence, given [B, V] logits; ConfigError where these are not finite."""
    best = logits.max(-1)
    if not best.values.isfinite().all():
        raise ConfigError(NOT_FINITE)
    if not samplers or samplers[0].sampling.temperature < 1e-6:
        greedy: list[int] = best.indices.tolist()
        return greedy
    return [sampler(row) for sampler, row in zip(samplers, logits, strict=True)]
