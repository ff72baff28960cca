"""Find a document of a dataset by its content: an index of the hashes of all documents, beside the dataset in PREFIX.index."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpclm.base.errors import ConfigError
from hpclm.base.progress import Bar
from hpclm.data import index_cache
from hpclm.data.indexed import IndexedDataset, sidecar

DOCUMENTS_PER_READ = 1 << 16


def end_of_document(dataset: IndexedDataset) -> int | None:
    """The end-of-document token that PREFIX.json names."""
    return (sidecar(dataset.prefix).get("tokenizer") or {}).get("eod")


def content_hash(tokens: NDArray[np.integer], eod: int | None) -> int:
    """64-bit xxh3 of a document's tokens, 4 bytes each, without an end-of-document token at its end."""
    if len(tokens) and tokens[-1] == eod:
        tokens = tokens[:-1]
    return xxhash.xxh3_64_intdigest(tokens.astype("<u4").data)


def make(dataset: IndexedDataset) -> None:
    """Make the index, unless it is there; ConfigError if it cannot be written."""
    index_cache.kept(_folder(dataset), _key(dataset), lambda: _built(dataset))
    if index_cache.stored(_folder(dataset), _key(dataset)) is None:
        raise ConfigError(f"the index of {dataset.prefix} cannot be written into {_folder(dataset)}")


def find(dataset: IndexedDataset, texts: Sequence[Sequence[int]]) -> list[int]:
    """The documents that have one of ``texts`` (token ids) as their content, ascending. ConfigError without an index."""
    index = index_cache.stored(_folder(dataset), _key(dataset))
    if index is None:
        raise ConfigError(
            f"{dataset.prefix} has no index of its documents; make it, once: hpclm data index {dataset.prefix}"
        )
    eod = end_of_document(dataset)
    found = set[int]()
    for ids in texts:
        wanted = np.uint64(content_hash(np.asarray(ids, np.int64), eod))
        begin, end = (int(np.searchsorted(index["hashes"], wanted, side)) for side in ("left", "right"))
        found.update(index["documents"][begin:end].tolist())
    return sorted(found)


def _folder(dataset: IndexedDataset) -> Path:
    return Path(f"{dataset.prefix}.index")


def _key(dataset: IndexedDataset) -> dict[str, Any]:
    facts = {"dataset": dataset.fingerprint, "changed_ns": dataset.changed_ns}
    return {"documents": {"hash": "xxh3", "eod": end_of_document(dataset)}, **facts}


def _built(dataset: IndexedDataset) -> index_cache.Arrays:
    """hashes [d], ascending, and the document with each."""
    dataset.check_once()
    eod = end_of_document(dataset)
    count = dataset.document_count
    hashes = np.empty(count, np.uint64)
    with Bar(total=count, desc="documents", unit="", unit_scale=True, disable=None) as bar:
        for first in range(0, count, DOCUMENTS_PER_READ):
            last = min(first + DOCUMENTS_PER_READ, count)
            places = dataset.places(dataset.bounds(first, last)).tolist()
            hashes[first:last] = [content_hash(dataset.flat[begin:end], eod) for begin, end in pairwise(places)]
            dataset.release()
            bar.update(last - first)
    order = np.argsort(hashes, kind="stable")
    return {"hashes": hashes[order], "documents": order}
