"""Describe a dataset: counts, lengths, tokenizer, and the first documents as text."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.base.errors import ConfigError
from hpclm.base.files import typed
from hpclm.base.terminal import many
from hpclm.config.data import DataConfig
from hpclm.data import loss_mask, tokenizer_folder, tokenizers
from hpclm.data.content import noted
from hpclm.data.indexed import IndexedDataset, sidecar
from hpclm.preprocess import counts
from hpclm.preprocess.verify import check_index

SHOWN = 300  # characters shown of a document
READ = 4 * SHOWN  # tokens decoded for these characters, which have at most 4 bytes of UTF-8 each
DOCUMENTS_PER_READ = 1 << 18  # number of documents with lengths read at a time
PERCENTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


def report(
    dataset: IndexedDataset, documents: int, kind: str | None = None, files: list[str] | None = None
) -> dict[str, Any]:
    """A description of ``dataset`` with its first ``documents``, as JSON.

    ``kind``, ``files``: the tokenizer that decodes them; None: the dataset's. If it is not available, documents are shown as token ids,
    and "tokenizer_missing" gives the reason. ConfigError if the index is corrupt, or if ``kind`` is not available.
    """
    check_index(dataset)
    tokenizer, missing = _tokenizer(dataset.prefix, kind, files or [])
    note = sidecar(dataset.prefix)
    named = note.get("tokenizer")
    chat = None
    if loss_mask.KEY in note:
        template = tokenizer_folder.read(tokenizer_folder.beside(dataset.prefix)).template
        chat = {"template": template, "ends": counts.noted(note).ends}
    content = noted(dataset.prefix)
    lengths = counted(document_lengths(dataset))
    return {
        "prefix": str(dataset.prefix),
        "layout": dataset.layout,
        "dtype": dataset.dtype.name,
        "modes": dataset.modes is not None,
        "bin_bytes": dataset.bin_path.stat().st_size,
        "idx_bytes": dataset.idx_path.stat().st_size,
        "documents": dataset.document_count,
        "sequences": len(dataset),
        "tokens": dataset.token_count,
        "document_lengths": summary(lengths),
        "sequence_lengths": summary(counted(_sequence_lengths(dataset))),
        "tokenizer": tokenizer.fingerprint if tokenizer else named,
        "tokenizer_missing": missing,
        "chat": chat,
        "content": content and content.bin,
        "first": [_document(dataset, k, tokenizer) for k in range(min(documents, dataset.document_count))],
    }


def as_text(report: dict[str, Any]) -> str:
    """Format a ``report`` for a terminal."""
    layout = f"{report['layout']}, {report['dtype']}"
    if report["modes"]:
        layout += ", with modes"
    rows = {
        "layout": layout,
        "files": f"{report['bin_bytes']:,} bytes of tokens, {report['idx_bytes']:,} of index",
        "documents": f"{report['documents']:,}",
        "sequences": f"{report['sequences']:,}",
        "tokens": f"{report['tokens']:,}",
        "tokenizer": "unknown",
        "": report["tokenizer_missing"] or "",
        "an answer ends with": _ends(report["chat"]),
        "content hash": report["content"] or f"none; to add one: hpclm data verify --record {typed(report['prefix'])}",
        "tokens in a document": _line(report["document_lengths"]),
    }
    if report["tokenizer"]:
        rows["tokenizer"] = tokenizers.describe(report["tokenizer"])
    if report["sequence_lengths"] != report["document_lengths"]:
        rows["tokens in a sequence"] = _line(report["sequence_lengths"])
    parts = [report["prefix"], *(f"  {name:<21} {value}" for name, value in rows.items() if value)]
    for document in report["first"]:
        text = document["text"] if "text" in document else " ".join(map(str, document["ids"]))
        if document["cut"]:
            text += " … (cut)"
        parts += ["", f"document {document['document']}, {many(document['tokens'], 'token')}", text]
    return "\n".join(parts)


def document_lengths(dataset: IndexedDataset) -> Iterator[NDArray[np.int64]]:
    """Tokens in each document, in blocks; the index must have been checked."""
    for start in range(0, dataset.document_count, DOCUMENTS_PER_READ):
        yield np.diff(dataset.places(dataset.bounds(start, min(start + DOCUMENTS_PER_READ, dataset.document_count))))
        dataset.release()


def _sequence_lengths(dataset: IndexedDataset) -> Iterator[NDArray[np.int32]]:
    for start in range(0, len(dataset), DOCUMENTS_PER_READ):
        yield dataset.sizes[start : start + DOCUMENTS_PER_READ]
        dataset.release()


def counted(blocks: Iterator[NDArray[Any]]) -> Counter[int]:
    """Number of occurrences of each value."""
    counts = Counter[int]()
    for block in blocks:
        values, often = np.unique(block, return_counts=True)
        counts.update(dict(zip(values.tolist(), often.tolist(), strict=True)))
    return counts


def summary(lengths: Counter[int]) -> dict[str, float]:
    """Minimum, mean, median, 90th and 99th percentile, maximum and number of zeros; {} without documents."""
    if not lengths:
        return {}
    values, counts = np.array(sorted(lengths.items())).T
    total = lengths.total()
    ranks = np.ceil(np.array([*PERCENTILES.values()]) * total)
    percentiles = values[np.searchsorted(np.cumsum(counts), ranks)].tolist()
    return {
        "min": min(lengths),
        "mean": sum(value * count for value, count in lengths.items()) / total,
        **dict(zip(PERCENTILES, percentiles, strict=True)),
        "max": max(lengths),
        "empty": lengths[0],
    }


def _tokenizer(prefix: Path, kind: str | None, files: list[str]) -> tuple[tokenizers.Tokenizer | None, str | None]:
    try:
        if kind is not None:
            return tokenizers.build_tokenizer(kind, files), None
        return tokenizer_folder.of_data(DataConfig(prefix=str(prefix))).build(), None
    except ConfigError as error:
        if kind is not None:
            raise
        why = str(error) if "tokenizer" in sidecar(prefix) else "the dataset does not name one"
        return None, f"{why}; --tokenizer and --tokenizer-files select one"


def _document(dataset: IndexedDataset, number: int, tokenizer: tokenizers.Tokenizer | None) -> dict[str, Any]:
    first, last = dataset.bounds(number, number + 1).tolist()
    begin = dataset.place(first)
    end = dataset.place(last)
    ids = dataset.flat[begin : min(end, begin + READ)].tolist()
    document = {"document": number, "tokens": end - begin}
    if tokenizer is None or any(not 0 <= id < tokenizer.size for id in ids):
        return document | {"ids": ids[: SHOWN // 5], "cut": end - begin > SHOWN // 5}
    text = tokenizer.decode(ids)
    return document | {"text": text[:SHOWN], "cut": end - begin > len(ids) or len(text) > SHOWN}


def _ends(chat: dict[str, Any] | None) -> str:
    return "" if chat is None else ", ".join(chat["ends"]) or "no single token"


def _line(summary: dict[str, float]) -> str:
    shown = {name: f"{value:,}" for name, value in summary.items()}
    if summary:
        shown["mean"] = f"{summary['mean']:,.1f}"
    return " · ".join(f"{name} {value}" for name, value in shown.items())
