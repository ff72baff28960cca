"""Continues token sequences with a model, several at a time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpclm.base.errors import ConfigError
from hpclm.config.model import BLOCKS
from hpclm.inference.generation_settings import Sampling
from hpclm.model.cache import KeyValueCache
from hpclm.model.stack import Stack

MIN_TOKENS_TO_TRANSPOSE = 16  # with fewer new tokens, a transposed copy of the output weights costs more than it saves

Ended = Callable[[int, list[int]], bool]
"""Called with a sequence's number and its new tokens after each new token; returns whether the sequence ends here."""
NOT_FINITE = (
    "the model gives values that are not finite: its newest checkpoint was saved after training had diverged, or engine.precision "
    "is too narrow; hpclm checkpoints lists the run's other checkpoints"
)


def window_start(length: int, context: int) -> int:
    """Index of the first of ``length`` tokens that the model sees when it predicts the next token.

    Beyond the context, the window moves in strides of a quarter of the context, so that the cache is rebuilt only once per stride.
    """
    stride = max(1, context // 4)
    return -(-max(0, length - context) // stride) * stride


@torch.inference_mode()
def continue_all(
    model: Stack, prompts: Sequence[list[int]], max_new_tokens: int, vocabulary: int, sampling: Sampling, ended: Ended
) -> list[list[int]]:
    """Up to ``max_new_tokens`` new tokens, each below ``vocabulary``, for every prompt of a batch; prompts must not be empty.

    A sequence's continuation does not depend on the other sequences, except for rounding.
    """
    batch = Batch(model, prompts, max_new_tokens, vocabulary)
    samplers = [Sampler(sampling, sampling.first + number) for number in range(len(prompts))]
    new: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        tokens = choose(batch.logits(), [samplers[number] for number in batch.live])
        going = []
        for row, (number, token) in enumerate(zip(batch.live, tokens, strict=True)):
            new[number].append(token)
            if not ended(number, new[number]):
                going.append(row)
        batch.advance(tokens, going)
        if not batch.live:
            break
    return new


class Batch:
    """Sequences that are continued together, with the cache of their keys and values."""

    def __init__(self, model: Stack, prompts: Sequence[list[int]], max_new_tokens: int, vocabulary: int):
        self.model = model
        self.context = model.config.context
        self.max_new_tokens = max_new_tokens
        self.vocabulary = min(vocabulary, model.config.vocab_size)
        self.ids = [list(prompt) for prompt in prompts]
        self.live = list(range(len(prompts)))
        """Numbers of the live sequences, which are the rows of the batch."""
        self.device = next(model.parameters()).device
        # hpclm does not know what a user-defined block remembers of earlier tokens
        self.cached = model.config.block in BLOCKS
        self._cache: KeyValueCache | None = None
        self._starts: list[int] = []
        self._output: Tensor | None = None  # [C, V]; CPUs multiply a few rows with this in half the time

    def logits(self) -> Tensor:
        """[rows, V] logits of each sequence's next token."""
        starts = [window_start(len(self.ids[number]), self.context) for number in self.live]
        if not self.cached:
            windows = [self.ids[number][start:] for number, start in zip(self.live, starts, strict=True)]
            return torch.cat([self._last(torch.tensor([window], device=self.device)) for window in windows])
        if self._cache is not None and starts == self._starts and self._cache.extensible:
            last = torch.tensor([self.ids[number][-1:] for number in self.live], device=self.device)
            return self._last(last, self._cache)
        self._starts = starts
        return self._begin([self.ids[number][start:] for number, start in zip(self.live, starts, strict=True)])

    def advance(self, tokens: Sequence[int], going: Sequence[int]) -> None:
        """Append a token to each row's sequence, and keep only the rows ``going``."""
        for number, token in zip(self.live, tokens, strict=True):
            self.ids[number].append(token)
        if len(going) < len(self.live):
            self.live = [self.live[row] for row in going]
            if self._starts:
                self._starts = [self._starts[row] for row in going]
            if self._cache is not None and going:
                self._cache.keep(going)

    def _begin(self, windows: list[list[int]]) -> Tensor:
        """Fill a new cache with the windows, padded on the left."""
        lengths = [len(window) for window in windows]
        longest = max(lengths)
        room = min(self.context, longest + self.max_new_tokens)
        self._cache = KeyValueCache(self.model.config, lengths, room, self.model.dtype, self.device)
        padded = [[0] * (longest - len(window)) + window for window in windows]
        return self._last(torch.tensor(padded, device=self.device), self._cache)

    def _last(self, ids: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """[rows, V] logits after the last of [rows, T] ids."""
        head = self.model.head(ids, cache)
        if self.device.type == "cpu" and self.max_new_tokens >= MIN_TOKENS_TO_TRANSPOSE:
            if self._output is None:
                dtype = torch.float32 if head.shape.fp32 else head.hidden.dtype
                self._output = head.weight[: self.vocabulary].to(dtype).t().contiguous()
            return head.shape.of(head.hidden[-1].to(self._output.dtype) @ self._output)
        return head._replace(hidden=head.hidden[-1:], vocab_size=self.vocabulary).logits()[:, 0]


class Sampler:
    """Chooses the tokens of one sequence, independently of the other sequences."""

    def __init__(self, sampling: Sampling, number: int):
        """``number``: the sequence's number, from 0; each sequence has its own random numbers."""
        self.sampling = sampling
        self.generator = torch.Generator().manual_seed((sampling.seed + number * 0x9E3779B97F4A7C15) % 2**63)

    def __call__(self, logits: Tensor) -> int:
        """Choose a token, given the [V] logits."""
        size = min(self.sampling.top_k or len(logits), len(logits))
        values, indices = logits.double().cpu().topk(size)
        probabilities = ((values - values[0]) / self.sampling.temperature).softmax(0)
        if self.sampling.top_p < 1:
            before = probabilities.cumsum(0) - probabilities
            probabilities = probabilities.masked_fill(before >= self.sampling.top_p, 0.0)
        return int(indices[torch.multinomial(probabilities, 1, generator=self.generator)])


def choose(logits: Tensor, samplers: list[Sampler]) -> list[int]:
    """The next token of each sequence, given [B, V] logits; ConfigError if a logit is not finite."""
    best = logits.max(-1)
    if not best.values.isfinite().all():
        raise ConfigError(NOT_FINITE)
    if not samplers or samplers[0].sampling.temperature < 1e-6:
        greedy: list[int] = best.indices.tolist()
        return greedy
    return [sampler(row) for sampler, row in zip(samplers, logits, strict=True)]
