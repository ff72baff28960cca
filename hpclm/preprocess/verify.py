"""Verify a dataset: every entry of its index, every token, and its PREFIX.json."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpclm.base.errors import ConfigError, unwritten
from hpclm.base.files import typed, write_text
from hpclm.base.terminal import many
from hpclm.data.content import KEY, DatasetContent, index_damaged, noted
from hpclm.data.indexed import IndexedDataset, files, sidecar, whereabouts
from hpclm.preprocess.hashing import TokenReader


def verify(dataset: IndexedDataset, vocab_size: int | None = None, record: bool = False) -> dict[str, Any]:
    """Read all of ``dataset``, with a progress bar; ConfigError names the wrong entry or token, and its place.

    ``vocab_size``: limit of the token ids; None: the size of the dataset's tokenizer, or no limit if that is unknown. ``record``: store
    the hashes of the files as they are in PREFIX.json, instead of comparing them. Returns counts of sequences, documents and tokens, the
    highest token, the limit, and the content hash. Without a hash (None), a change to another valid token goes undetected.
    """
    path = files(dataset.prefix)[2]
    note = sidecar(dataset.prefix)
    recorded = None if record else noted(dataset.prefix)
    size = _vocabulary(note, vocab_size)
    check_index(dataset)
    counts = {"documents": dataset.document_count, "sequences": len(dataset), "tokens": dataset.token_count}
    wrong = [f"{counts[key]} {key}, not {note[key]!r}" for key in counts if key in note and note[key] != counts[key]]
    if wrong and not record:
        raise ConfigError(f"{path} belongs to another dataset: {dataset.idx_path} has {' and '.join(wrong)}")
    highest, content = _check_tokens(dataset, recorded, size)
    if record:
        recorded = content
        note |= {key: counts[key] for key in ("documents", "tokens") if key in note or not note}
        note |= {KEY: content.note()}
        try:
            write_text(path, json.dumps(note, indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            raise unwritten(error, path, "no hash was stored") from error
    hashes = {
        "content": recorded and recorded.bin,
        "content_added": recorded and recorded.added,
        "recorded_now": record,
    }
    return {**counts, "highest_token": highest, "vocab_size": size, **hashes}


def verification_summary(dataset: IndexedDataset, result: dict[str, Any]) -> str:
    """The result of ``verify`` in a sentence."""
    counts = (
        f"{many(result['sequences'], 'sequence')} in {many(result['documents'], 'document')}, "
        f"{many(result['tokens'], 'token')}"
    )
    if result["highest_token"] is not None:
        counts += f", the highest {result['highest_token']:,}"
    if result["vocab_size"] is not None:
        counts += f", all below {result['vocab_size']:,}"
    if result["recorded_now"]:
        content = f"its content hash is now recorded ({result['content'][:8]}…); it cannot detect earlier damage"
    elif result["content"]:
        since = "it was written"
        if result["content_added"]:
            since = f"its hash was recorded at {result['content_added']}, which cannot detect earlier damage"
        content = f"the content has not changed since {since} (hash {result['content'][:8]}…)"
    else:
        add = f"hpclm data verify --record {typed(dataset.prefix)}"
        content = f"it has no content hash, so a change to other valid tokens goes undetected; to add one: {add}"
    return f"verified: {counts}; {content}"


def prefix(name: str) -> str:
    """The dataset that ``name`` refers to, possibly by one of its files."""
    stem, _, end = name.rpartition(".")
    return stem if end in ("bin", "idx", "json") and not Path(f"{name}.idx").exists() else name


def prefixes(names: Sequence[str]) -> list[str]:
    """The datasets that ``names`` refer to; a dataset named by several files counts once."""
    chosen: list[str] = []
    for name in names:
        if prefix(name) == name or prefix(name) not in chosen:
            chosen.append(prefix(name))
    return chosen


def check_index(dataset: IndexedDataset) -> None:
    """Check every entry of the index, with a progress bar; ConfigError for the first wrong one."""
    from hpclm.base.progress import Bar

    with Bar(total=len(dataset) + dataset.document_count, unit_scale=True, disable=None, desc="index") as bar:
        dataset.check(bar.update)


def _vocabulary(note: dict[str, Any], vocab_size: int | None) -> int | None:
    """The limit of the token ids: ``vocab_size``, or the size of the tokenizer in PREFIX.json; None if unknown."""
    return int(note["tokenizer"]["size"]) if vocab_size is None and "tokenizer" in note else vocab_size


def _check_tokens(
    dataset: IndexedDataset, recorded: DatasetContent | None, size: int | None
) -> tuple[int | None, DatasetContent]:
    """The highest token (None without tokens), and the hashes; ConfigError for tokens outside [0, ``size``), or other hashes."""
    from hpclm.base.progress import Bar

    reader = TokenReader(dataset, recorded)
    highest: int | None = None
    count = 0
    first = None
    begin = 0
    problems: list[str] = []
    with Bar(total=dataset.token_count, unit=" tokens", unit_scale=True, disable=None, desc="tokens") as bar:
        try:
            for documents in reader:
                block = documents.tokens
                if not len(block):
                    continue
                low = int(block.min())
                high = int(block.max())
                if highest is None or high > highest:
                    highest = high
                if low < 0 or (size is not None and high >= size):
                    is_outside = block < 0
                    if size is not None:
                        is_outside |= block >= size
                    outside = np.flatnonzero(is_outside)
                    count += len(outside)
                    first = first or (begin + int(outside[0]), int(block[outside[0]]))
                begin += len(block)
                bar.update(len(block))
        except ConfigError as error:
            problems += error.problems
    if first is not None:
        place, token = first
        expected = "at least 0" if size is None else f"0 to {size - 1}"
        problems.append(
            f"{dataset.bin_path}: token {token} at {whereabouts(dataset, place)} is not in the vocabulary, {expected}; "
            f"{count} of {dataset.token_count} tokens are outside it. The dataset is corrupt, or belongs to another tokenizer"
        )
    content = reader.content
    if problems or content is None:
        raise ConfigError(problems)
    if recorded and content.idx != recorded.idx:
        raise index_damaged(dataset)
    return highest, content
