"""The splits of a run's data (train, valid, test): slices of datasets, alone or blended."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np

from hpclm.base.errors import ConfigError
from hpclm.config import DataConfig
from hpclm.data import blend, index_cache, loss_mask
from hpclm.data.content import noted
from hpclm.data.indexed import IndexedDataset, text_bytes
from hpclm.data.order import Blocks, Order, SampleIndex, blocks, build_index, index_bytes, passes, samples_in, shuffled
from hpclm.data.packing import SHORTEST, Packing, pack
from hpclm.data.samples import BlendedSamples, BlockSamples, DocumentSamples, PackedSamples, Sequences
from hpclm.data.sources import Samples

WORTH_KEEPING = 1 << 20  # entries of an index; a smaller index is built faster than files are written
MANY_PASSES = 100  # the size of an index is not limited for up to this many passes over a split
LARGE_INDEX = 256 << 20  # maximum bytes of an index for more than MANY_PASSES passes


@dataclass(frozen=True)
class SampleSettings:
    """How to cut and order samples of a dataset."""

    context: int
    seed: int
    order: str
    break_mode: str | None
    cache: str | None
    eos: int
    """Token before each line, for break_mode."""
    repeat: bool = False
    """Whether to repeat a split that is shorter than one sample; otherwise it has no samples."""

    @property
    def packed(self) -> bool:
        """Whether samples hold whole documents."""
        return self.order == "packed"


@dataclass(frozen=True)
class DatasetSlice:
    """The sequences ``span`` of a dataset; with ``inside``, only their tokens in that range."""

    dataset: IndexedDataset
    span: range
    sampling: SampleSettings
    keep_partial: bool
    mask: IndexedDataset | None = None
    """1 for each token that counts in the loss, in sequences like the dataset's; None: all tokens count."""
    inside: range | None = None
    """Range of tokens of the dataset, which may begin and end within a sequence (data.split_by=tokens); None: all of ``span``."""

    @classmethod
    def of_tokens(
        cls, dataset: IndexedDataset, inside: range, sampling: SampleSettings, keep_partial: bool
    ) -> "DatasetSlice":
        """The tokens ``inside`` of a dataset."""
        first = dataset.holder(inside.start)
        span = range(first, dataset.holder(inside.stop - 1) + 1) if inside else range(first, first)
        return cls(dataset, span, sampling, keep_partial, inside=inside)

    @cached_property
    def tokens(self) -> int:
        """Number of tokens in the slice."""
        if self.inside is not None:
            return len(self.inside)
        begin = self.span.start
        end = self.span.stop
        count = f"tokens of sequences {begin} to {end}"
        return self.dataset.find(count, lambda: int(self.dataset.sizes[begin:end].sum(dtype=np.int64)))

    @cached_property
    def masked_out(self) -> int:
        """Number of sequences without a token that counts in the loss."""
        return 0 if self.mask is None else loss_mask.without_counted(self.mask, self.span)

    @cached_property
    def per_epoch(self) -> int:
        """Samples in one epoch; 1 for a short split that is repeated."""
        return self._whole or int(self.sampling.repeat and self.tokens > 0)

    @cached_property
    def _whole(self) -> int:
        """Samples in one epoch, without repetition."""
        if self.sampling.break_mode:
            return len(self._blocks.bounds)
        if self.sampling.packed:
            return len(self._packing.bounds) - 1
        return samples_in(self.tokens, self.sampling.context, self.keep_partial)

    def check(self, requested: int | None, split: str) -> None:
        """ConfigError if the index of ``requested`` samples would not fit in memory, or if there is nothing to learn."""
        if self.span and self.masked_out == len(self.span):
            raise ConfigError(
                f"the {split} split of {self.dataset.prefix} has no token to learn: its loss mask excludes every token of its "
                f"{len(self.span)} sequences; preprocess again, set another data.split, or {loss_mask.WITHOUT}"
            )
        if self.sampling.break_mode or self.sampling.packed:
            often = -(-(requested or 1) // self.per_epoch)
            size = 8 * (requested or 0)
            per_pass = 8 * self.per_epoch
        else:
            order = self._order(requested)
            often = passes(self.tokens, order)
            size = index_bytes(len(self.span), self.tokens, order)
            per_pass = size // often
        if often <= MANY_PASSES or size <= LARGE_INDEX:
            return
        fits = max(MANY_PASSES, LARGE_INDEX // max(1, per_pass))
        raise ConfigError(
            f"{requested:,} samples of model.context={self.sampling.context} tokens are {often:,} passes over the {split} split of "
            f"{self.dataset.prefix}, which has {self.tokens:,} tokens, and their index would take {size / 2**30:.1f} GiB of "
            f"memory; set budget.epochs=10 (at most budget.epochs={fits} fits), or give more data"
        )

    def _order(self, requested: int | None) -> Order:
        if self.keep_partial and requested is not None and requested <= self.per_epoch:
            requested = None  # otherwise the last token would come from a second epoch
        if requested is None and not self._whole:
            requested = 1
        sampling = self.sampling
        return Order(sampling.context, sampling.seed, sampling.order, requested, self.keep_partial)

    def samples(self, requested: int | None) -> Samples:
        """At least ``requested`` samples, or one epoch; there must be at least one sample."""
        if self.sampling.break_mode:
            first = self.dataset.place(self.span.start)
            order = shuffled(self.per_epoch, requested or self.per_epoch, self.sampling.seed)
            return BlockSamples(self.dataset, first, self._blocks, order, self.sampling.eos)
        if self.sampling.packed:
            parameters = self.per_epoch, requested or self.per_epoch, self.sampling.seed
            key = {"shuffled": [*parameters]}  # JSON
            shuffle = self.kept(parameters[1], key, lambda: {"order": shuffled(*parameters)})["order"]
            mask = None
            if self.mask is not None:
                mask = self.mask.flat
            return DocumentSamples(self.dataset, mask, self._packing, shuffle)
        wanted = self._order(requested)
        sequences = self._sequences

        def build() -> index_cache.Arrays:
            self.dataset.check_once()  # checks the whole index; opening a large dataset only checks its ends
            return vars(build_index(sequences.sizes, sequences.span, wanted))

        often = -(-(requested or 1) // max(1, self.per_epoch))
        index = self.kept(often * (len(self.span) + self.per_epoch), {"order": asdict(wanted)}, build)
        return PackedSamples(self.dataset, SampleIndex(**index), self.keep_partial, sequences)

    def kept(self, entries: int, key: dict[str, Any], build: Callable[[], index_cache.Arrays]) -> index_cache.Arrays:
        """The arrays that ``build`` creates for ``key`` from this slice, cached if there are enough ``entries``."""
        if not (entries > WORTH_KEEPING or self.sampling.cache):
            return build()
        key = {"dataset": self.dataset.fingerprint, "changed_ns": self.dataset.changed_ns, **key}
        key |= self._place
        return index_cache.kept(self.folder, key, build, self.dataset.facts)

    def fingerprint(self) -> dict[str, Any]:
        """Facts that must not change when a run is resumed (JSON)."""
        content = noted(self.dataset.prefix)
        return self.dataset.fingerprint | {
            **self._place,
            "content": content and content.bin,
            **({"loss_mask": self.mask.fingerprint["bin"]} if self.mask is not None else {}),
        }

    @property
    def _place(self) -> dict[str, Any]:
        """The slice's part of the dataset (JSON)."""
        place = {"span": [self.span.start, self.span.stop]}
        if self.inside is not None:
            place["tokens"] = [self.inside.start, self.inside.stop]
        return place

    @cached_property
    def _sequences(self) -> Sequences:
        """Positions of the sequences in the dataset. With ``inside``, a copy in which the first and last sequence are cut to that range."""
        if self.inside is None:
            return Sequences(self.dataset.sizes, self.dataset.pointers, self.span)
        begin = self.inside.start
        end = self.inside.stop
        sizes = self.dataset.sizes[self.span.start : self.span.stop].copy()
        pointers = self.dataset.pointers[self.span.start : self.span.stop].copy()
        if len(sizes):
            sizes[-1] = end - self.dataset.place(self.span.stop - 1)
            sizes[0] -= begin - self.dataset.place(self.span.start)
            pointers[0] = begin * self.dataset.dtype.itemsize
        return Sequences(sizes, pointers, range(len(sizes)))

    @property
    def folder(self) -> Path:
        """The folder of its cached index files."""
        return Path(self.sampling.cache or f"{self.dataset.prefix}.index")

    @cached_property
    def _blocks(self) -> Blocks:
        self.dataset.check_once()
        sizes = self.dataset.sizes[self.span.start : self.span.stop]
        packed = blocks(sizes, self.sampling.context, self.sampling.break_mode or "")
        longest = int(np.diff(packed.bounds).max(initial=0))
        if longest > self.sampling.context:
            raise ConfigError(
                f"dataset {self.dataset.prefix} has a line of {longest} tokens, but data.break_mode={self.sampling.break_mode} "
                f"keeps lines whole and model.context is {self.sampling.context}; set model.context={longest} or "
                "data.break_mode=none"
            )
        return packed

    @cached_property
    def _packing(self) -> Packing:
        context = self.sampling.context
        seed = self.sampling.seed
        sequences = self._sequences
        sizes = sequences.sizes[sequences.span.start : sequences.span.stop]
        first = self.inside.start if self.inside is not None else self.dataset.place(self.span.start)

        def build() -> index_cache.Arrays:
            self.dataset.check_once()
            longest = int(sizes.max(initial=0))
            if self.mask is not None and longest > context + 1:
                raise ConfigError(
                    f"dataset {self.dataset.prefix} has a conversation of {longest} tokens, more than model.context + 1 = "
                    f"{context + 1}; set model.context={longest - 1}, or preprocess with --context {context}"
                )
            return vars(pack(sizes, first, context, seed))

        key = {"packed": {"context": context, "seed": seed, "masked": self.mask is not None}}
        return Packing(**self.kept(len(self.span) + self.tokens // context, key, build))


@dataclass(frozen=True)
class Split:
    """A split of the data: slices of datasets, and their blending weights."""

    name: str
    slices: tuple[DatasetSlice, ...]
    weights: tuple[float, ...] | None

    @property
    def per_epoch(self) -> int:
        """Samples in one epoch: all samples, or with weights, the samples until the first dataset is exhausted."""
        counts = [part.per_epoch for part in self.slices]
        if self.weights is None or len(counts) == 1:
            return sum(counts)
        passes = [count * sum(self.weights) / weight for count, weight in zip(counts, self.weights, strict=True)]
        return int(min(passes) + 1e-6)  # rounding may have put a whole number slightly below itself

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token, including end-of-document tokens: the datasets' means, by the share of samples. None if unknown."""
        means = [text_bytes(part.dataset.prefix) / part.dataset.token_count for part in self.slices]
        weights = self._weights()
        return sum(map(mul, weights, means)) / sum(weights) if all(means) else None

    def check(self, requested: int | None, settings: DataConfig, context: int) -> None:
        """ConfigError that names a dataset if it has no samples, or if their index would not fit in memory."""
        for part in self.slices:
            if not part.per_epoch:
                raise ConfigError(self._too_small(part, settings, context))
        asked: list[int | None] = [requested]
        if len(self.slices) > 1 and self._once(requested):
            asked = [None for _ in self.slices]
        elif len(self.slices) > 1:
            asked = [*self._shares(requested, settings)[0]]
        for part, number in zip(self.slices, asked, strict=True):
            part.check(number, self.name)

    def samples(self, requested: int | None, settings: DataConfig, context: int) -> Samples:
        """At least ``requested`` samples, or one epoch; ConfigError names a dataset that has none."""
        self.check(requested, settings, context)
        if len(self.slices) == 1:
            return self.slices[0].samples(requested)
        if self._once(requested):
            counts = [part.per_epoch for part in self.slices]
            blend_index = self._blend_index({"counts": counts}, sum(counts), lambda: blend.exhaustive(counts))
            return BlendedSamples([part.samples(None) for part in self.slices], blend_index)
        asked, total = self._shares(requested, settings)
        blend_index = self.weighted_blend(total)
        sizes = [
            max(number, needed) for number, needed in zip(asked, blend.counts(blend_index, len(asked)), strict=True)
        ]
        samples = [part.samples(size) for part, size in zip(self.slices, sizes, strict=True)]
        return BlendedSamples(samples, blend_index)

    def weighted_blend(self, total: int) -> blend.BlendIndex:
        """The blend order of ``total`` samples by weight."""
        weights = self._weights()
        return self._blend_index({"weights": list(weights)}, total, lambda: blend.weighted(weights, total))

    def _once(self, requested: int | None) -> bool:
        """Whether every dataset is read at most once, because there are no weights."""
        return self.weights is None and (requested is None or requested <= self.per_epoch)

    def _weights(self) -> Sequence[float]:
        return [part.per_epoch for part in self.slices] if self.weights is None else self.weights

    def _shares(self, requested: int | None, settings: DataConfig) -> tuple[list[int], int]:
        if requested is None:
            requested = self.per_epoch
        return blend.shares(self._weights(), requested, settings.order)

    def _blend_index(self, key: dict[str, Any], total: int, take: Callable[[], blend.BlendIndex]) -> blend.BlendIndex:
        """The blend order computed by ``take``, which depends only on ``key`` and ``total``."""
        if total <= WORTH_KEEPING:
            return take()
        first = self.slices[0]
        key = {**key, "total": total}
        return blend.BlendIndex(**index_cache.kept(first.folder, key, lambda: vars(take()), first.dataset.facts))

    def _too_small(self, part: DatasetSlice, settings: DataConfig, context: int) -> str:
        other = "another data.split"
        if not (settings.train or settings.break_mode or part.mask or part.inside is not None or "/" in self.name):
            other += " or data.split_by=tokens"
        part_of = f"{len(part.span)} of {len(part.dataset)} sequences"
        if part.inside is not None:
            part_of = f"of {part.dataset.token_count}, which data.split_by=tokens divides"
        if part.sampling.packed:
            return (
                f"the {self.name} split of {part.dataset.prefix} has no document of at least {SHORTEST} tokens "
                f"({part_of}); set {other}, or give more data"
            )
        if settings.short_part == "repeat":
            ways = f"set {other}, or give more data: data.short_part=repeat has nothing to repeat"
        elif not part.tokens:
            ways = f"set {other}, or give more data"
        else:
            ways = (
                f"set a shorter model.context or {other}, give more data, or set data.short_part=repeat to read it "
                "several times for one sample, as Megatron does"
            )
        if part.tokens < part.dataset.token_count:
            part_of += f", data.split={settings.split}"
        return (
            f"the {self.name} split of {part.dataset.prefix} has {part.tokens} tokens ({part_of}), but one sample needs "
            f"model.context + 1 = {context + 1}; {ways}"
        )
