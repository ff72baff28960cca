"""A dataset's documents, some at a time, into a Writer: what converting and merging are made of."""

from collections.abc import Callable, Iterator

import numpy as np

from hpclm.data.disk.indexed import IndexedDataset
from hpclm.data.disk.writer import Writer
from hpclm.errors import ConfigError

TOKENS = 1 << 21  # tokens, sequences or documents that are held at a time; a document is never divided


def stretches(dataset: IndexedDataset) -> Iterator[tuple[int, int]]:
    """First and last + 1 of documents that follow each other and are, in all, not much longer than ``TOKENS``."""
    begin, last = 0, dataset.document_count
    while begin < last:
        bounds = dataset.bounds(begin, min(begin + TOKENS // 8, last))
        start = dataset.place(int(bounds[0]))
        low, high = 1, len(bounds) - 1
        while low < high:
            middle = (low + high + 1) // 2
            sequences = int(bounds[middle] - bounds[0])
            fits = sequences <= TOKENS and dataset.place(int(bounds[middle])) - start <= TOKENS
            low, high = (middle, high) if fits else (low, middle - 1)
        yield begin, begin + low
        begin += low


def copy(
    dataset: IndexedDataset,
    writer: Writer,
    lossy: bool = False,
    seen: Callable[[int], object] = lambda tokens: None,
) -> None:
    """Append all documents of ``dataset``, whose index must have been checked; ``seen`` hears of tokens as they are done with.

    ``lossy`` lets go of what the writer's layout cannot hold; without it that is a ConfigError.
    """
    single = writer.layout == "fairseq"
    modes = dataset.modes
    if single and modes is not None and not lossy:
        raise ConfigError(f"{dataset.prefix} has modes, which fairseq's layout cannot hold; --lossy leaves them out")
    for begin, end in stretches(dataset):
        bounds = dataset.bounds(begin, end)
        first, last = int(bounds[0]), int(bounds[-1])
        documents = np.diff(bounds)
        if single and (documents != 1).any():
            if not lossy:
                where = int(np.argmax(documents != 1))
                raise ConfigError(
                    f"{dataset.prefix}: document {begin + where} has {documents[where]} sequences, and in fairseq's layout "
                    "each sequence is a document; --lossy makes each sequence one and leaves empty documents out"
                )
            documents = np.ones(last - first, np.int64)
        start, stop = dataset.place(first), dataset.place(last)
        kept = None if modes is None or single else modes[first:last]
        writer.extend(dataset.block(start, stop), dataset.sizes[first:last], documents, kept)
        dataset.release()
        seen(stop - start)
