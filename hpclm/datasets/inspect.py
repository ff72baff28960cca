"""Describe a dataset: counts, lengths, tokenizer, and the first documents as text."""

from pathlib import Path
from typing import Any

from hpclm.config.data import DataConfig
from hpclm.data import tokenizers
from hpclm.data.content import noted
from hpclm.data.indexed import IndexedDataset, sidecar
from hpclm.datasets.lengths import bins, document_lengths, sequence_lengths
from hpclm.datasets.verify import check_index
from hpclm.errors import ConfigError

SHOWN = 300  # characters of a document
READ = 4 * SHOWN  # tokens that are decoded for them: a character has at most 4 bytes of UTF-8


def report(
    dataset: IndexedDataset, documents: int, kind: str | None = None, files: list[str] | None = None
) -> dict[str, Any]:
    """A description of ``dataset``, with its first ``documents`` (JSON).

    kind, files: the tokenizer for decoding them; None: the dataset's own. If that is not available, they are token ids, and
    "tokenizer_missing" says why. ConfigError if the index is corrupt, or if ``kind`` is not available.
    """
    check_index(dataset)
    tokenizer, missing = _tokenizer(dataset.prefix, kind, files or [])
    named = sidecar(dataset.prefix).get("tokenizer")
    content = noted(dataset.prefix)
    lengths = document_lengths(dataset)
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
        "document_lengths": lengths.summary(),
        "sequence_lengths": sequence_lengths(dataset).summary(),
        "histogram": [[bin.low, bin.high, bin.count] for bin in bins(lengths)],
        "tokenizer": tokenizer.fingerprint if tokenizer else named,
        "tokenizer_missing": missing,
        "content": content and content.bin,
        "first": [_document(dataset, k, tokenizer) for k in range(min(documents, dataset.document_count))],
    }


def as_text(report: dict[str, Any]) -> str:
    """A ``report`` for a terminal."""
    rows = {
        "layout": f"{report['layout']}, {report['dtype']}" + (", with modes" if report["modes"] else ""),
        "files": f"{report['bin_bytes']:,} bytes of tokens, {report['idx_bytes']:,} of index",
        "documents": f"{report['documents']:,}",
        "sequences": f"{report['sequences']:,}",
        "tokens": f"{report['tokens']:,}",
        "tokenizer": tokenizers.describe(report["tokenizer"]) if report["tokenizer"] else "unknown",
        "": report["tokenizer_missing"] or "",
        "content hash": report["content"] or "none; hpclm data hash adds one",
        "tokens in a document": _summary(report["document_lengths"]),
    }
    if report["sequence_lengths"] != report["document_lengths"]:
        rows["tokens in a sequence"] = _summary(report["sequence_lengths"])
    parts = [report["prefix"], *(f"  {name:<21} {value}" for name, value in rows.items() if value)]
    for document in report["first"]:
        text = document["text"] if "text" in document else " ".join(map(str, document["ids"]))
        cut = " … (cut)" if document["cut"] else ""
        parts += ["", f"document {document['document']}, {document['tokens']:,} tokens", text + cut]
    return "\n".join(parts)


def _tokenizer(prefix: Path, kind: str | None, files: list[str]) -> tuple[tokenizers.Tokenizer | None, str | None]:
    try:
        return tokenizers.of_run(DataConfig(prefix=str(prefix), tokenizer=kind, tokenizer_files=files)), None
    except ConfigError as error:
        if kind is not None:
            raise
        why = str(error) if "tokenizer" in sidecar(prefix) else "the dataset does not name one"
        return None, f"{why}; --tokenizer and --tokenizer-files select one"


def _document(dataset: IndexedDataset, number: int, tokenizer: tokenizers.Tokenizer | None) -> dict[str, Any]:
    first, last = dataset.bounds(number, number + 1).tolist()
    begin, end = dataset.place(first), dataset.place(last)
    ids = dataset.flat[begin : min(end, begin + READ)].tolist()
    document = {"document": number, "tokens": end - begin}
    if tokenizer is None or any(not 0 <= id < tokenizer.size for id in ids):
        return document | {"ids": ids[: SHOWN // 5], "cut": end - begin > SHOWN // 5}
    text = tokenizer.decode(ids)
    return document | {"text": text[:SHOWN], "cut": end - begin > len(ids) or len(text) > SHOWN}


def _summary(summary: dict[str, float]) -> str:
    return " · ".join(
        f"{name} {value:,.1f}" if name == "mean" else f"{name} {value:,}" for name, value in summary.items()
    )
