"""Verify a dataset: every entry of its index, every token, and its PREFIX.json; add its hashes there."""

import json
from typing import Any

import numpy as np

from hpclm.data.content import KEY, DatasetContent, differing, index_damaged, noted
from hpclm.data.indexed import IndexedDataset, files, sidecar, whereabouts
from hpclm.datasets.hashing import TokenReader, index_hash
from hpclm.errors import ConfigError, unwritten
from hpclm.files import write_text


def verify(dataset: IndexedDataset, vocab_size: int | None = None) -> dict[str, Any]:
    """Read all of ``dataset``, with a progress bar; ConfigError says which entry or token is wrong, and where.

    vocab_size: limit of the token ids; None: the size of the dataset's tokenizer, or no limit if that is unknown.
    Returns counts of sequences, documents and tokens, the highest token, the limit, and the content hash; if there is no hash
    (None), a change to another valid token is not detected.
    """
    note = sidecar(dataset.prefix)
    size = _vocabulary(note, vocab_size)
    check_index(dataset)
    _check_counts(dataset, note)
    reader = TokenReader(dataset)
    if reader.recorded and index_hash(dataset) != reader.recorded.idx:
        raise index_damaged(dataset)
    return {
        "sequences": len(dataset),
        "documents": dataset.document_count,
        "tokens": dataset.token_count,
        "highest_token": _check_tokens(reader, size),
        "vocab_size": size,
        "content": reader.recorded and reader.recorded.bin,
        "content_added": reader.recorded and reader.recorded.added,
    }


def add_hashes(
    dataset: IndexedDataset, overwrite: bool = False, vocab_size: int | None = None
) -> tuple[DatasetContent, bool]:
    """Store the hashes of a dataset in PREFIX.json, which is created if it is missing; the hashes, and whether they were added.

    ConfigError if other hashes are stored there, unless ``overwrite``; for tokens outside the vocabulary (``vocab_size``, or
    that of its tokenizer); or if it cannot be written.
    """
    path, note = files(dataset.prefix)[2], sidecar(dataset.prefix)
    check_index(dataset)
    recorded = None if overwrite else noted(dataset.prefix)
    reader = TokenReader(dataset, record=True)
    _check_tokens(reader, _vocabulary(note, vocab_size) if recorded is None else None)
    content = reader.content()
    if recorded is not None:
        if recorded.blocks != content.blocks:
            raise differing(dataset, recorded, content.blocks)
        if recorded.idx != content.idx:
            raise index_damaged(dataset)
        return recorded, False
    counts = {} if note else {"documents": dataset.document_count, "tokens": dataset.token_count}
    try:
        write_text(path, json.dumps(note | counts | {KEY: content.note()}, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise unwritten(error, path, "no hash was stored") from error
    return content, True


def check_index(dataset: IndexedDataset) -> None:
    """Check every entry of the index, with a progress bar; ConfigError for the first that is wrong."""
    from tqdm import tqdm

    with tqdm(total=len(dataset) + dataset.document_count, unit_scale=True, disable=None, desc="index") as bar:
        dataset.check(bar.update)


def _vocabulary(note: dict[str, Any], vocab_size: int | None) -> int | None:
    """The limit of the token ids: ``vocab_size``, or the size of the tokenizer in PREFIX.json; None if it is unknown."""
    return note["tokenizer"]["size"] if "tokenizer" in note and vocab_size is None else vocab_size


def _check_counts(dataset: IndexedDataset, note: dict[str, Any]) -> None:
    actual = {"documents": dataset.document_count, "sequences": len(dataset), "tokens": dataset.token_count}
    wrong = [f"{actual[key]} {key}, not {note[key]!r}" for key in actual if key in note and note[key] != actual[key]]
    if wrong:
        path = files(dataset.prefix)[2]
        raise ConfigError(f"{path} belongs to another dataset: {dataset.idx_path} has {' and '.join(wrong)}")


def _check_tokens(reader: TokenReader, size: int | None) -> int | None:
    """The highest token, None if there is none; ConfigError for tokens outside [0, ``size``), or that do not match the hash."""
    from tqdm import tqdm

    dataset = reader.dataset
    highest, count, first = None, 0, None
    problems: list[str] = []
    with tqdm(total=dataset.token_count, unit=" tokens", unit_scale=True, disable=None, desc="tokens") as bar:
        try:
            for begin, block in reader.blocks():
                low, high = int(block.min()), int(block.max())
                highest = high if highest is None else max(highest, high)
                if low < 0 or (size is not None and high >= size):
                    outside = np.flatnonzero((block < 0) if size is None else (block < 0) | (block >= size))
                    count += len(outside)
                    first = first or (begin + int(outside[0]), int(block[outside[0]]))
                bar.update(len(block))
        except ConfigError as error:
            problems += error.problems
    if first is not None:
        place, token = first
        expected = "at least 0" if size is None else f"0 to {size - 1}"
        problems.append(
            f"{dataset.bin_path}: token {token} at {whereabouts(dataset, place)} is not in the vocabulary, {expected}; "
            f"{count} of {dataset.token_count} tokens are not: the dataset is corrupt, or belongs to another tokenizer"
        )
    if problems:
        raise ConfigError(problems)
    return highest
