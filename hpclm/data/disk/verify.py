"""Whether a dataset is whole: every entry of its index, every token, and what its note says of it."""

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.data.disk.indexed import IndexedDataset, files, sidecar
from hpclm.errors import ConfigError

TOKENS = 1 << 22  # tokens that are looked at at a time


def verify(dataset: IndexedDataset, vocab_size: int | None = None) -> dict[str, Any]:
    """Read all of ``dataset``, with a progress bar; ConfigError says which entry or token is wrong, and where it is.

    vocab_size: more than every token; None: that of the tokenizer in the dataset's note, and of any where there is none.
    The result says what was looked at: sequences, documents, tokens, the highest token, and the size it was held against.
    """
    from tqdm import tqdm

    note = sidecar(dataset.prefix)
    size = note["tokenizer"]["size"] if note and vocab_size is None else vocab_size
    entries = len(dataset) + dataset.document_count
    with tqdm(total=entries, unit_scale=True, disable=None, desc="index") as bar:
        dataset.check(bar.update)
    _check_counts(dataset, note)
    with tqdm(total=dataset.token_count, unit=" tokens", unit_scale=True, disable=None, desc="tokens") as bar:
        highest = _check_tokens(dataset, size, bar.update)
    return {
        "sequences": len(dataset),
        "documents": dataset.document_count,
        "tokens": dataset.token_count,
        "highest_token": highest,
        "vocab_size": size,
    }


def _check_counts(dataset: IndexedDataset, note: dict[str, Any]) -> None:
    found = {"documents": dataset.document_count, "sequences": len(dataset), "tokens": dataset.token_count}
    wrong = [
        f"{found[key]} {key} where it says {note[key]}" for key in found if key in note and note[key] != found[key]
    ]
    if wrong:
        path = files(dataset.prefix)[2]
        raise ConfigError(f"{path} belongs to another dataset: {dataset.idx_path} has {' and '.join(wrong)}")


def _check_tokens(dataset: IndexedDataset, size: int | None, seen: Callable[[int], object]) -> int | None:
    """The highest token, None where there is none; ConfigError for tokens below 0 or not below ``size``."""
    highest, outside, first = None, 0, None
    for start in range(0, dataset.token_count, TOKENS):
        block = dataset.block(start, min(start + TOKENS, dataset.token_count))
        low, high = int(block.min()), int(block.max())
        highest = high if highest is None else max(highest, high)
        if low < 0 or (size is not None and high >= size):
            wrong = _outside(block, size)
            outside += int(wrong.sum())
            if first is None:
                at = int(np.argmax(wrong))
                first = start + at, int(block[at])
        dataset.release()
        seen(len(block))
    if first is not None:
        place, token = first
        expected = "at least 0" if size is None else f"0 to {size - 1}"
        raise ConfigError(
            f"{dataset.bin_path}: token {token} at {whereabouts(dataset, place)} is not one of the vocabulary, {expected}; "
            f"{outside} of {dataset.token_count} tokens are not: the tokens are damaged, or of another tokenizer"
        )
    return highest


def _outside(block: NDArray, size: int | None) -> NDArray[np.bool_]:
    wrong = block < 0 if block.dtype.kind == "i" else np.zeros(len(block), bool)
    return wrong if size is None else wrong | (block >= size)


def whereabouts(dataset: IndexedDataset, place: int) -> str:
    """Byte, document and sequence of the token ``flat[place]``, in words."""
    sequence = bisect_right(range(len(dataset)), place, key=dataset.place) - 1
    document = bisect_right(range(dataset.document_count), sequence, key=lambda k: int(dataset.bounds(k, k)[0])) - 1
    return (
        f"byte {place * dataset.dtype.itemsize} (document {document}, sequence {sequence}, "
        f"offset {place - dataset.place(sequence)} in it)"
    )
