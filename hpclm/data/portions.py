"""What a part of a run's data is read from: a span of one dataset, or several spans in turns."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hpclm.config import DataConfig
from hpclm.data import blend, index_cache
from hpclm.data.blocks import Blocks, blocks, shuffled
from hpclm.data.disk.indexed import IndexedDataset
from hpclm.data.order import Index, Order, build_index, samples_in
from hpclm.data.samples import BlendedSamples, BlockSamples, PackedSamples
from hpclm.data.sources import Samples
from hpclm.errors import ConfigError

WORTH_KEEPING = 1 << 20  # entries of an index; smaller ones are built in less time than files take


@dataclass(frozen=True)
class Reading:
    """How samples are cut from a dataset and put in order."""

    context: int
    seed: int
    order: str
    break_mode: str | None
    cache: str | None
    eos: int
    """What stands before a line; for break_mode."""


@dataclass(frozen=True)
class Portion:
    """The sequences ``span`` of a dataset."""

    dataset: IndexedDataset
    span: range
    reading: Reading
    keep_partial: bool

    @cached_property
    def tokens(self) -> int:
        """How many there are."""
        return int(self.dataset.sizes[self.span.start : self.span.stop].sum(dtype=np.int64))

    @cached_property
    def per_epoch(self) -> int:
        """Samples in one pass."""
        if self.reading.break_mode:
            return len(self._blocks.bounds)
        return samples_in(self.tokens, self.reading.context, self.keep_partial)

    def samples(self, wanted: int | None) -> Samples:
        """At least ``wanted`` samples, or one pass; there must be one."""
        if self.reading.break_mode:
            return self._block_samples(wanted or self.per_epoch)
        if self.keep_partial and wanted is not None and wanted <= self.per_epoch:
            wanted = None  # a second pass, begun for the last token, would join the end of the first to its beginning
        reading = self.reading
        order = Order(reading.context, reading.seed, reading.order, wanted, self.keep_partial)

        def build() -> index_cache.Arrays:
            self.dataset.check()  # whole, once; opening a large one only looks at its ends
            return vars(build_index(self.dataset.sizes, self.span, order))

        passes = -(-(wanted or 1) // max(1, self.per_epoch))
        large = passes * (len(self.span) + self.per_epoch) > WORTH_KEEPING
        if not (large or reading.cache):
            return PackedSamples(self.dataset, Index(**build()), self.keep_partial)
        key = {"dataset": self.dataset.fingerprint, "changed_ns": self.dataset.changed_ns, "order": asdict(order)}
        key["span"] = [self.span.start, self.span.stop]
        return PackedSamples(self.dataset, Index(**index_cache.kept(self.folder, key, build)), self.keep_partial)

    def identity(self) -> dict[str, Any]:
        """What must not change under a run (JSON)."""
        return self.dataset.fingerprint | {"span": [self.span.start, self.span.stop]}

    def _block_samples(self, wanted: int) -> Samples:
        first = int(self.dataset.sizes[: self.span.start].sum(dtype=np.int64))
        flat = self.dataset.flat[first : first + self.tokens]
        order = shuffled(self.per_epoch, wanted, self.reading.seed)
        return BlockSamples(flat, self._blocks, order, self.reading.eos)

    @property
    def folder(self) -> Path:
        """Where its index files are kept."""
        return Path(self.reading.cache) if self.reading.cache else Path(f"{self.dataset.prefix}.index")

    @cached_property
    def _blocks(self) -> Blocks:
        self.dataset.check()
        sizes = self.dataset.sizes[self.span.start : self.span.stop]
        found = blocks(sizes, self.reading.context, self.reading.break_mode or "")
        longest = int(np.diff(found.bounds).max(initial=0))
        if longest > self.reading.context:
            raise ConfigError(
                f"dataset {self.dataset.prefix} has a line of {longest} tokens, but data.break_mode={self.reading.break_mode} "
                f"keeps lines whole and model.context is {self.reading.context}; set model.context={longest} or "
                "data.break_mode=none"
            )
        return found


@dataclass(frozen=True)
class Part:
    """What is read as one: portions, and their weights."""

    name: str
    portions: tuple[Portion, ...]
    weights: tuple[float, ...] | None

    @property
    def per_epoch(self) -> int:
        """Samples in one pass: all, or with weights until the first dataset has been read."""
        found = [portion.per_epoch for portion in self.portions]
        if self.weights is None or len(found) == 1:
            return sum(found)
        passes = [count * sum(self.weights) / weight for count, weight in zip(found, self.weights, strict=True)]
        return int(min(passes) + 1e-6)  # what should be a whole number may have come out a little below it

    def samples(self, wanted: int | None, settings: DataConfig, context: int) -> Samples:
        """At least ``wanted`` samples, or one pass; ConfigError names the dataset that cannot give one."""
        for portion in self.portions:
            if not portion.per_epoch:
                raise ConfigError(self._too_small(portion, settings, context))
        if len(self.portions) == 1:
            return self.portions[0].samples(wanted)
        counts = [portion.per_epoch for portion in self.portions]
        if self.weights is None and (wanted is None or wanted <= sum(counts)):
            turns = self._turns({"counts": counts}, sum(counts), lambda: blend.exhaustive(counts))
            return BlendedSamples([portion.samples(None) for portion in self.portions], turns)
        weights = counts if self.weights is None else self.weights
        asked, total = blend.shares(weights, self.per_epoch if wanted is None else wanted, settings.order)
        turns = self._turns({"weights": list(weights)}, total, lambda: blend.weighted(weights, total))
        sizes = [max(number, least) for number, least in zip(asked, blend.counts(turns, len(asked)), strict=True)]
        samples = [portion.samples(size) for portion, size in zip(self.portions, sizes, strict=True)]
        return BlendedSamples(samples, turns)

    def _turns(self, key: dict[str, Any], total: int, take: Callable[[], blend.Turns]) -> blend.Turns:
        """The turns that ``take`` takes, which depend on ``key`` and their number alone."""
        if total <= WORTH_KEEPING:
            return take()
        folder = self.portions[0].folder
        return blend.Turns(**index_cache.kept(folder, {**key, "total": total}, lambda: vars(take())))

    def _too_small(self, portion: Portion, settings: DataConfig, context: int) -> str:
        share = f", data.split={settings.split}" if len(portion.span) < len(portion.dataset) else ""
        return (
            f"the {self.name} part of {portion.dataset.prefix} has {portion.tokens} tokens ({len(portion.span)} of "
            f"{len(portion.dataset)} sequences{share}), but one sample needs model.context + 1 = {context + 1}; "
            "set a shorter model.context or another data.split, or give more data"
        )
