"""Scores how well a model predicts a text or dataset: loss, perplexity, bits per byte.

If the run has a token that begins a text, it precedes every document and is not scored. A document longer than the context is read in
windows, as in lm-evaluation-harness: each token is scored once, and the last window has a full context.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from hpclm.base.errors import ConfigError
from hpclm.base.progress import Bar
from hpclm.checkpoint import Progress
from hpclm.config import ModelConfig
from hpclm.data.indexed import IndexedDataset
from hpclm.data.tokenizers import Tokenizer
from hpclm.engine.step import mean_loss
from hpclm.inference.texts import json_texts
from hpclm.model.position import scaling_length
from hpclm.model.stack import Stack
from hpclm.parallel.mesh import SINGLE
from hpclm.parallel.micro_batch import MicroBatch
from hpclm.preprocess.run_text import RunText

Item = TypeVar("Item")


@dataclass(frozen=True)
class Document:
    """A text as tokens to score."""

    ids: Sequence[int]
    bytes: int | None
    """Bytes of the text; None if unknown."""
    counts: Sequence[bool] | None = None
    """Whether each token is scored; None: all."""


class Window(NamedTuple):
    """Tokens that are read together."""

    ids: Sequence[int]
    scored: Sequence[bool]
    """Whether each token but the first is scored."""


@dataclass
class Score:
    """Running totals of the scores."""

    documents: int = 0
    tokens: int = 0
    bytes: int | None = 0
    nats: float = 0.0

    def result(self, progress: Progress) -> dict[str, float | int]:
        """The figures to print."""
        mean = self.nats / max(1, self.tokens)
        figures: dict[str, float | int] = {"loss": mean, "perplexity": perplexity(mean)}
        if self.bytes:
            figures |= {"bits_per_byte": self.nats / math.log(2) / self.bytes, "bytes": self.bytes}
        return {**figures, "tokens": self.tokens, "documents": self.documents, "step": progress.step}


def perplexity(mean: float) -> float:
    """Perplexity for a mean loss in nats; infinite if too large for a float."""
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf


def windows(ids: Sequence[int], context: int, counts: Sequence[bool] | None = None) -> Iterator[Window]:
    """Runs of up to ``context`` + 1 of ``ids``. Each token except the first of ``ids`` is scored once, if it ``counts``."""
    for begin in range(0, len(ids) - 1, context):
        end = min(begin + context + 1, len(ids))
        first = max(0, end - context - 1)
        scored = [position >= begin for position in range(first, end - 1)]
        if counts is not None:
            scored[begin - first :] = counts[begin + 1 : end]
        yield Window(ids[first:end], scored)


def of_text(path: str, text: str, json_lines: bool, run_text: RunText) -> Iterator[Document]:
    """The documents of a text: one, or with JSON lines the "text" of each line. The bytes of one with unknown or special tokens, which may
    hide text, are unknown."""
    texts: Iterable[str] = json_texts(path, text, "text", "a document") if json_lines else [text]
    for number, document in enumerate(texts, 1):
        ids = run_text.encode(document)
        if not ids and document:
            raise ConfigError(f"{path}: the tokenizer gives no tokens for document {number}")
        unknown = getattr(run_text.tokenizer, "special_ids", {}).keys() & run_text.tokenizer.encode(document)
        yield Document(ids, None if unknown else len(document.encode()))


def of_dataset(dataset: IndexedDataset, mask: IndexedDataset | None, tokenizer: Tokenizer | None) -> Iterator[Document]:
    """The sequences of a dataset. ``mask``: its loss mask, which decides the tokens that count. ``tokenizer``: the dataset's, to count the
    bytes of its text. Bytes are unknown with a mask or without a tokenizer."""
    for number in range(len(dataset)):
        ids = dataset.tokens(number).tolist()
        if mask is not None:
            yield Document(ids, None, (mask.tokens(number) == 1).tolist())
            continue
        size = None
        if tokenizer is not None:
            text = [token for token in ids if token != tokenizer.eod]
            size = len(tokenizer.decode(text).encode(errors="surrogatepass"))
        yield Document(ids, size)


def score(
    model: Stack, documents: Iterable[Document], begin_token: int | None, size: int, max_tokens: int | None, bar: Bar
) -> Score:
    """Score documents, each after ``begin_token``, ``size`` windows at a time, until ``max_tokens`` tokens are scored.

    Documents with uncounted tokens are read as in training: without ``begin_token``.
    """
    total = Score()
    device = next(model.parameters()).device
    context = model.config.context
    waiting: list[Window] = []

    def count_waiting() -> int:
        return sum(sum(window.scored) for window in waiting)

    def flush() -> None:
        alike = by_rotation(model.config, waiting, lambda window: len(window.ids) - 1)
        count = count_waiting()
        mean = mean_loss(model, [_batch(windows, device) for windows in alike], device, SINGLE)
        if mean is not None:
            total.nats += mean * count
        total.tokens += count
        waiting.clear()
        bar.update(count)

    for document in documents:
        if max_tokens is not None and total.tokens + count_waiting() >= max_tokens:
            break
        _check(document.ids, model.config.vocab_size)
        total.documents += 1
        ids = list(document.ids)
        if begin_token is not None and document.counts is None:
            ids.insert(0, begin_token)
        if total.bytes is None or document.bytes is None:
            total.bytes = None
        else:
            total.bytes += document.bytes
        for window in windows(ids, context, document.counts):
            waiting.append(window)
            if len(waiting) == size:
                flush()
    if waiting:
        flush()
    if not total.tokens:
        raise ConfigError("nothing to score: no document has a counted token that follows another")
    return total


def by_rotation(config: ModelConfig, items: Sequence[Item], length: Callable[[Item], int]) -> list[list[Item]]:
    """``items`` of ``length`` tokens, grouped so that rotary positions are scaled equally within a group and padding is possible."""
    alike: dict[int, list[Item]] = {}
    for item in items:
        alike.setdefault(scaling_length(config.rope.scaling, config.context, length(item)), []).append(item)
    return [*alike.values()]


def _batch(read: Sequence[Window], device: torch.device) -> MicroBatch:
    """Windows, each with the label of its last token, padded on the right."""
    width = max(len(window.ids) for window in read)
    rows = torch.tensor([[*window.ids, *[0] * (width - len(window.ids))] for window in read], device=device)
    mask = torch.tensor([[*window.scored, *[False] * (width - len(window.ids))] for window in read], device=device)
    return MicroBatch(rows[:, :-1], rows[:, 1:], mask)


def _check(ids: Sequence[int], vocabulary: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise ConfigError(f"a document holds token {max(ids)}, outside the run's model.vocab_size={vocabulary}")
