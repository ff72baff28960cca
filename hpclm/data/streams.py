"""The order of data.order=per_dataset: a phase continues where the one before stopped.

Each dataset is an endless stream of tokens: epoch after epoch, its documents in an order that only the seed, the dataset's tokens and the
number of the epoch decide. A phase begins at a place in each stream, and its blend chooses the stream of each sample. A
sample is the next S + 1 tokens (S = model.context), and its last token is the first of the next sample from that stream. So neither
the length of a phase nor a later phase changes what has been read.

A document is a sequence of the index, as in Megatron's orders.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.config.plan import Reading
from hpclm.data import blend
from hpclm.data.blend import BlendIndex
from hpclm.data.indexed import IndexedDataset
from hpclm.data.pieces import Piece, between
from hpclm.data.samples import WIDE, BlendedSamples
from hpclm.data.splits import DatasetSlice, Split

EPOCHS_OPEN = 4  # orders of a stream that are kept open
State = Sequence[int]
"""How much has been read of a dataset: the position in its stream, the samples, the tokens, and the context of the last sample."""


def document_order(documents: int, seed: int, key: str, epoch: int) -> NDArray[np.integer]:
    """The order of the documents 0, 1, ... of a dataset in an epoch. ``key``: the hash of its tokens, in hex."""
    order: NDArray[np.integer] = np.arange(documents, dtype=np.int32 if documents < 2**31 else np.int64)
    np.random.RandomState([seed, epoch, int(key[:8], 16), int(key[8:16], 16)]).shuffle(order)
    return order


class Stream:
    """The tokens of a dataset in its own order."""

    def __init__(self, part: DatasetSlice):
        """``part``: a whole dataset."""
        self.part = part
        self.dataset = part.dataset
        self.key: str = part.dataset.fingerprint["bin"]
        """Identifies the dataset wherever its files are."""
        self.tokens = part.tokens
        """Tokens in an epoch."""
        self.order = lru_cache(EPOCHS_OPEN)(self._order)

    def _order(self, epoch: int) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """The documents of an epoch in order, and the number of tokens up to the end of each."""

        def build() -> dict[str, NDArray[Any]]:
            self.dataset.check_once()
            documents = document_order(len(self.dataset), self.part.sampling.seed, self.key, epoch)
            return {"documents": documents, "ends": np.cumsum(self.dataset.sizes[documents], dtype=np.int64)}

        key = {"stream": {"seed": self.part.sampling.seed, "epoch": epoch}}
        kept = self.part.kept(2 * len(self.dataset), key, build)
        return kept["documents"], kept["ends"]

    def pieces(self, position: int, count: int) -> Iterator[tuple[int, int]]:
        """The first token in ``dataset.flat``, and the number of tokens, of each piece of ``count`` tokens from ``position`` on."""
        while count:
            epoch, inside = divmod(position, self.tokens)
            documents, ends = self.order(epoch)
            for place in range(int(np.searchsorted(ends, inside, "right")), len(ends)):
                document = int(documents[place])
                left = int(ends[place]) - inside
                taken = min(count, left)
                if taken:
                    yield self.dataset.place(document) + int(self.dataset.sizes[document]) - left, taken
                inside += taken
                position += taken
                count -= taken
                if not count:
                    return

    def positions(self, begin: int, end: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The positions, from one to before another, of the tokens ``begin`` to ``end`` of ``dataset.flat``, between the positions
        ``first`` and ``last``."""
        holders = range(self.dataset.holder(begin), self.dataset.holder(end - 1) + 1)
        for epoch in range(first // self.tokens, -(-last // self.tokens)):
            documents, ends = self.order(epoch)
            for place in between(documents, holders.start, holders.stop).tolist():
                document = int(documents[place])
                start = self.dataset.place(document)
                size = int(self.dataset.sizes[document])
                before = epoch * self.tokens + int(ends[place]) - size - start
                low = max(first, before + max(begin, start))
                high = min(last, before + min(end, start + size))
                if low < high:
                    yield low, high

    def next_document(self, position: int) -> int:
        """The first position from ``position`` on at which a document begins."""
        epoch, inside = divmod(position, self.tokens)
        if not inside:
            return position
        _, ends = self.order(epoch)
        return epoch * self.tokens + int(ends[np.searchsorted(ends, inside)])


class StreamSamples:
    """Samples of one stream, from a position on."""

    def __init__(self, stream: Stream, start: int, context: int):
        self.stream = stream
        self.start = start
        self.context = context
        self.count = 0
        """Number of samples, which ``find`` examines."""
        self.datasets: list[IndexedDataset] = [stream.dataset]
        self.dtype = stream.dataset.flat.dtype

    def __len__(self) -> int:
        return self.count

    def read(self, index: int, row: NDArray[np.integer]) -> None:
        """Fill ``row`` [S + 1] with sample ``index``."""
        flat = self.stream.dataset.flat
        filled = 0
        for begin, size in self.stream.pieces(self.start + index * self.context, len(row)):
            row[filled : filled + size] = flat[begin : begin + size]
            filled += size

    def pieces(self, index: int) -> Iterator[Piece]:
        """The pieces of sample ``index``; see Traceable."""
        at = 0
        for begin, size in self.stream.pieces(self.start + index * self.context, self.context + 1):
            yield Piece(at, 0, begin, size)
            at += size

    def find(self, dataset: int, begin: int, end: int) -> NDArray[np.int64]:
        """The samples that read these tokens; see Traceable."""
        found = [np.empty(0, np.int64)]
        last = self.start + self.count * self.context + 1
        for low, high in self.stream.positions(begin, end, self.start, last):
            first = max(0, (low - self.start - 1) // self.context)  # its last token is the first of the next sample
            found.append(np.arange(first, min(self.count, (high - 1 - self.start) // self.context + 1)))
        return np.unique(np.concatenate(found))


@dataclass(frozen=True, eq=False)
class Stretch:
    """The samples of one phase."""

    begin: Reading
    count: int
    """Samples until the next phase, or the end of the run."""
    context: int
    parts: Sequence[StreamSamples]
    blend_index: BlendIndex | None
    """The part of each sample; None for one part."""
    samples: Any
    """The Samples of the phase, from 0 on."""

    def after(self, count: int) -> dict[str, State]:
        """The states of all datasets after ``count`` samples of the phase."""
        counts = [count] if self.blend_index is None else blend.counts(self.blend_index, len(self.parts), count)
        states = dict(self.begin.sources or {})
        for part, number in zip(self.parts, counts, strict=True):
            if not number:
                continue
            tokens = number * self.context
            _, samples_before, tokens_before, _ = states.get(part.stream.key, (0, 0, 0, 0))
            state = [part.start + tokens, samples_before + number, tokens_before + tokens, self.context]
            states[part.stream.key] = state
        return states


def stretch(split: Split, streams: Sequence[Stream], begin: Reading, count: int, context: int, again: bool) -> Stretch:
    """The samples of a phase with the mixture ``split``. ``streams``: of its slices. ``again``: they begin anew.

    A dataset that was last read with another context goes on at its next document.
    """
    parts = []
    for stream in streams:
        position, _, _, before = (begin.sources or {}).get(stream.key, (0, 0, 0, context))
        if again:
            position = 0
        if before != context:
            position = stream.next_document(position)
        parts.append(StreamSamples(stream, position, context))
    if len(parts) == 1:
        parts[0].count = count
        return Stretch(begin, count, context, parts, None, parts[0])
    index = split.weighted_blend(count)
    for part, number in zip(parts, blend.counts(index, len(parts)), strict=True):
        part.count = number
    return Stretch(begin, count, context, parts, index, BlendedSamples(parts, index))


class PhasedSamples:
    """The samples of a run, from the phase that it has read last to its end, or to a phase that needs another start of the ranks."""

    def __init__(self, stretches: Sequence[Stretch], read: tuple[Reading, ...], names: Mapping[str, str]):
        """``read``: the beginnings of the phases before those of ``stretches``. ``names``: of the datasets, by their streams' keys."""
        self.stretches = stretches
        self.names = names
        self.dtype = WIDE
        types = {part.dtype for each in stretches for part in each.parts}
        if len(types) == 1:
            self.dtype = types.pop()
        self.datasets = list({id(data): data for each in stretches for data in each.samples.datasets}.values())
        self._begins = [each.begin.samples for each in stretches]
        self._read = read

    def __len__(self) -> int:
        last = self.stretches[-1]
        return last.begin.samples + last.count

    def _at(self, index: int) -> tuple[Stretch, int]:
        """The phase of sample ``index``, and the number of the sample in it."""
        found = self.stretches[bisect_right(self._begins, index) - 1]
        return found, index - found.begin.samples

    def read(self, index: int, row: NDArray[np.integer]) -> None:
        """Fill ``row`` [S + 1] with sample ``index`` of the run."""
        found, number = self._at(index)
        found.samples.read(number, row)

    def pieces(self, index: int) -> Iterator[Piece]:
        """The pieces of sample ``index``; see Traceable."""
        found, number = self._at(index)
        for piece in found.samples.pieces(number):
            yield piece._replace(dataset=self.datasets.index(found.samples.datasets[piece.dataset]))

    def find(self, dataset: int, begin: int, end: int) -> NDArray[np.int64]:
        """The samples that read these tokens; see Traceable; only the samples of ``stretches``."""
        found = [np.empty(0, np.int64)]
        for each in self.stretches:
            for number, data in enumerate(each.samples.datasets):
                if data is self.datasets[dataset]:
                    found.append(each.samples.find(number, begin, end) + each.begin.samples)
        return np.concatenate(found)

    def begun(self, samples: int) -> tuple[Reading, ...]:
        """The beginnings of the phases that have been read from after ``samples`` samples."""
        return self._read + tuple(each.begin for each in self.stretches if each.begin.samples < samples)

    def states(self, samples: int) -> dict[str, State]:
        """The states of the datasets, by name, after ``samples`` samples."""
        found, number = self._at(max(samples - 1, 0))
        return {self.names.get(key, key): state for key, state in found.after(number + 1).items()}
