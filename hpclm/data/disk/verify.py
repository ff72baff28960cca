"""Verify a dataset: every entry of its index, every token, and its PREFIX.json; add its hashes there."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.data.disk.content import (
    KEY,
    Content,
    Recording,
    Verification,
    ZeroPages,
    differing,
    index_damaged,
    index_hash,
    noted,
)
from hpclm.data.disk.indexed import IndexedDataset, files, sidecar, whereabouts
from hpclm.errors import ConfigError, unwritten
from hpclm.files import write_text

TOKENS = 1 << 22  # tokens that are read at a time


def verify(dataset: IndexedDataset, vocab_size: int | None = None) -> dict[str, Any]:
    """Read all of ``dataset``, with a progress bar; ConfigError says which entry or token is wrong, and where.

    vocab_size: limit of the token ids; None: the size of the dataset's tokenizer, or no limit if that is unknown.
    Returns counts of sequences, documents and tokens, the highest token, the limit, and the content hash; if there is no hash
    (None), a change to another valid token is not detected.
    """
    from tqdm import tqdm

    note = sidecar(dataset.prefix)
    size = vocabulary(note, vocab_size)
    entries = len(dataset) + dataset.document_count
    with tqdm(total=entries, unit_scale=True, disable=None, desc="index") as bar:
        dataset.check(bar.update)
    _check_counts(dataset, note)
    verification = Verification(dataset)
    if verification.noted and index_hash(dataset) != verification.noted.idx:
        raise index_damaged(dataset)
    highest = check_tokens(dataset, size, verification, "tokens")
    return {
        "sequences": len(dataset),
        "documents": dataset.document_count,
        "tokens": dataset.token_count,
        "highest_token": highest,
        "vocab_size": size,
        "content": verification.noted and verification.noted.bin,
        "content_added": verification.noted and verification.noted.added,
        "zeros": verification.zeros.told() or None,
    }


def add_hashes(
    dataset: IndexedDataset, overwrite: bool = False, vocab_size: int | None = None
) -> tuple[Content, bool, ZeroPages]:
    """Store the hashes of a dataset in PREFIX.json, which is created if it is missing.

    Returns the hashes, whether they were added, and the pages of zeros. ConfigError if other hashes are stored there, unless
    ``overwrite``; for tokens outside the vocabulary (``vocab_size``, or that of its tokenizer); or if it cannot be written.
    """
    path, note = files(dataset.prefix)[2], sidecar(dataset.prefix)
    dataset.check()
    known = None if overwrite else noted(dataset.prefix)
    recording = Recording(dataset)
    check_tokens(dataset, vocabulary(note, vocab_size) if known is None else None, recording, "hash")
    found = recording.content()
    if known is not None:
        if known.blocks != found.blocks:
            raise differing(dataset, known, found.blocks)
        if known.idx != found.idx:
            raise index_damaged(dataset)
        return known, False, recording.zeros
    counts = {} if note else {"documents": dataset.document_count, "tokens": dataset.token_count}
    text = json.dumps(note | counts | {KEY: found.note()}, indent=1, ensure_ascii=False) + "\n"
    try:
        write_text(path, text)
    except OSError as error:
        raise unwritten(error, path, "no hash was stored") from error
    return found, True, recording.zeros


def vocabulary(note: dict[str, Any], vocab_size: int | None) -> int | None:
    """The limit of the token ids: ``vocab_size``, or the size of the tokenizer in PREFIX.json; None if it is unknown."""
    return note["tokenizer"]["size"] if "tokenizer" in note and vocab_size is None else vocab_size


def _check_counts(dataset: IndexedDataset, note: dict[str, Any]) -> None:
    found = {"documents": dataset.document_count, "sequences": len(dataset), "tokens": dataset.token_count}
    wrong = [f"{found[key]} {key}, not {note[key]!r}" for key in found if key in note and note[key] != found[key]]
    if wrong:
        path = files(dataset.prefix)[2]
        raise ConfigError(f"{path} belongs to another dataset: {dataset.idx_path} has {' and '.join(wrong)}")


def check_tokens(
    dataset: IndexedDataset, size: int | None, verification: Verification | Recording, name: str
) -> int | None:
    """The highest token, None if there is none; ConfigError for tokens outside [0, ``size``), or that do not match the hash.

    Shows a progress bar with this ``name``.
    """
    from tqdm import tqdm

    with tqdm(total=dataset.token_count, unit=" tokens", unit_scale=True, disable=None, desc=name) as bar:
        return _check_tokens(dataset, size, verification, bar.update)


def _check_tokens(
    dataset: IndexedDataset, size: int | None, verification: Verification | Recording, progress: Callable[[int], object]
) -> int | None:
    highest, outside, first = None, 0, None
    for start in range(0, dataset.token_count, TOKENS):
        block = dataset.block(start, min(start + TOKENS, dataset.token_count))
        verification.update(start, start + len(block))
        low, high = int(block.min()), int(block.max())
        highest = high if highest is None else max(highest, high)
        if low < 0 or (size is not None and high >= size):
            wrong = _outside(block, size)
            outside += int(wrong.sum())
            if first is None:
                at = int(np.argmax(wrong))
                first = start + at, int(block[at])
        dataset.release()
        progress(len(block))
    problems = []
    try:
        verification.end()
    except ConfigError as error:
        problems = error.problems
    if first is not None:
        place, token = first
        expected = "at least 0" if size is None else f"0 to {size - 1}"
        problems.append(
            f"{dataset.bin_path}: token {token} at {whereabouts(dataset, place)} is not in the vocabulary, {expected}; "
            f"{outside} of {dataset.token_count} tokens are not: the dataset is corrupt, or belongs to another tokenizer"
        )
    if problems:
        raise ConfigError(problems)
    return highest


def _outside(block: NDArray, size: int | None) -> NDArray[np.bool_]:
    wrong = block < 0 if block.dtype.kind == "i" else np.zeros(len(block), bool)
    return wrong if size is None else wrong | (block >= size)
