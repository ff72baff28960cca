"""How the next token is chosen from the model's logits."""

import torch
from torch import Tensor

from hpclm.errors import ConfigError
from hpclm.inference.generation_settings import Sampling

NOT_FINITE = (
    "the model gives values that are not finite: its newest checkpoint was saved when training had diverged, or "
    "engine.precision is too narrow for it; hpclm checkpoints lists the run's others"
)


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
