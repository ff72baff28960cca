"""The data of a run (data.source): the interface, building a source, and checking it without reading samples."""

import math
from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpclm.base.errors import ConfigError
from hpclm.base.registry import function_check, lookup
from hpclm.config import DataConfig, ModelConfig
from hpclm.config.data import SOURCES
from hpclm.config.phases import Timeline
from hpclm.config.plan import Length
from hpclm.data.exclusion import Exclusion
from hpclm.data.scan import SharedFacts

CHECK = function_check("data", "context", "seed", "vocab_size")
NEED_EOD = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
REQUIRED = ("eod", "fingerprint", "held_out", "per_epoch", "samples")
WITHOUT = "data.without"  # the fact with the list of documents
PADDING = np.iinfo(np.int64).min
"""Fills the end of samples that are shorter than the others; never a valid token."""


class Samples(Protocol):
    """A sequence of samples; each is context + 1 token ids: the inputs, and the last one's label."""

    dtype: np.dtype
    """Type of the rows: int64, or a smaller integer type if it can hold every token and no sample is padded."""

    def __len__(self) -> int:
        """Number of samples, after which they repeat."""
        ...

    def read(self, index: int, row: NDArray[np.integer]) -> None:
        """Fill ``row`` [context + 1], of ``dtype``, with sample ``index``; a shorter sample ends with PADDING."""
        ...


class Source(Protocol):
    """The data of a run; ``split`` is "train", "valid", "test", or the name of a further validation set.

    Optional members: ``check_content() -> list[str]`` verifies some of the data when a run starts, and describes the result.
    ``without_effect() -> list[str]`` names settings without effect on these data, with reasons.
    ``check(split, requested)`` raises the ConfigError of ``samples`` without reading samples.
    ``bytes_per_token(split)`` is the mean number of bytes of text per token, for bits per byte; None if unknown.
    """

    eod: int | None
    """End-of-document token; None if unknown."""
    fingerprint: dict[str, Any]
    """JSON that must not change when a run is resumed; "tokenizer": its fingerprint, or None."""
    held_out: Sequence[str]
    """Splits that a run evaluates."""

    def per_epoch(self, split: str) -> int:
        """Samples in one epoch of the split; 0 if it is shorter than one sample."""
        ...

    def samples(self, split: str, requested: int | None) -> Samples:
        """At least ``requested`` samples, or one epoch if that is None; ConfigError if the split has none."""
        ...


def build_source(data: DataConfig, model: ModelConfig, seed: int, facts: SharedFacts | None = None) -> Source:
    """The configured source; ConfigError if it does not exist, or if a user-defined source is invalid.

    ``facts``: passed to a source that accepts facts, which adds new ones and does not read known ones again.
    """
    make = lookup("data.source", data.source, SOURCES, CHECK)
    more: dict[str, Any] = {}
    if facts and "facts" in signature(make).parameters:
        more["facts"] = facts
    source: Source = make(data, model.context, seed, model.vocab_size, **more)
    lacks = [name for name in REQUIRED if not hasattr(source, name)]
    if lacks:
        raise ConfigError(
            f"data.source {data.source} gives {type(source).__name__}, which lacks {', '.join(lacks)}; "
            "hpclm/data/sources.py lists the requirements"
        )
    return source


def check_content(source: Source) -> list[str]:
    """Verify some of the data, if the source has ``check_content``. Returns the findings; ConfigError if data are corrupt."""
    look = getattr(source, "check_content", list)
    findings: list[str] = look()
    return findings


def without_effect(source: Source) -> list[str]:
    """The settings without effect on these data, a sentence for each reason; reads a small part of the data."""
    reasons: list[str] = getattr(source, "without_effect", list)()
    return reasons


def bits_per_byte(source: Source, split: str) -> float | None:
    """Bits per byte of text of a split for a loss of 1 nat per token; None if its bytes are unknown."""
    size: float | None = getattr(source, "bytes_per_token", lambda split: None)(split)
    return 1 / math.log(2) / size if size else None


def samples_per_epoch(source: Source) -> int:
    """Samples in one epoch of the training data; ConfigError for an empty epoch."""
    samples = source.per_epoch("train")
    if not samples:
        check_part(source, "train", None)
    return samples


def train_samples(source: Any, timeline: Timeline, length: Length, planned: int | None) -> Samples:
    """The training samples of a run, from the position of ``timeline`` on. ``planned``: the samples that the order is built for."""
    if timeline.run.data.order == "per_dataset":
        samples: Samples = source.in_phases(timeline, length.samples)
    else:
        samples = source.samples("train", planned)
    return samples


def excluded(source: Source, data: DataConfig) -> Exclusion | None:
    """The documents that training leaves out; ConfigError if the source cannot do that."""
    if data.without is None:
        return None
    found: Exclusion | None = getattr(source, "exclusion", None)
    if found is None:
        raise ConfigError(
            f"data.without is for datasets on disk (data.source=indexed); data.source={data.source} has no attribute exclusion"
        )
    return found


def without_evaluation(source: Source, part: str, error: ConfigError) -> ConfigError:
    """The ``error`` of a validation split; a hint is added if the split is too short."""
    if source.per_epoch(part):
        return error
    return ConfigError(f"{error}; or evaluate.every=0, to train without evaluations")


def needs_eod(data: DataConfig, eod: int | None) -> Iterator[str]:
    """An error for each data setting that needs the end-of-document token, if the token is unknown. Packed samples do not need it."""
    for name in NEED_EOD:
        if getattr(data, name) and eod is None and data.order != "packed":
            yield (
                f"data.{name} needs the end-of-document token, which the dataset does not name; "
                f"set data.tokenizer and data.tokenizer_files"
            )


def check_part(source: Source, part: str, requested: int | None) -> None:
    """ConfigError if a split has no samples, or its files cannot be used; reads no samples if the source has ``check``."""
    check: Any = getattr(source, "check", source.samples)
    check(part, requested)
