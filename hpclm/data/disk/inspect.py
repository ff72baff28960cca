"""Describe a dataset: counts, lengths, tokenizer, and the first documents as text."""

import shutil
from pathlib import Path
from typing import Any

from hpclm.config.data import DataConfig
from hpclm.data import tokenizers
from hpclm.data.disk import lengths
from hpclm.data.disk.content import noted
from hpclm.data.disk.indexed import IndexedDataset, sidecar
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
    from tqdm import tqdm

    with tqdm(total=len(dataset) + dataset.document_count, unit_scale=True, disable=None, desc="index") as bar:
        dataset.check(bar.update)
    tokenizer, missing = _tokenizer(dataset.prefix, kind, files or [])
    named = sidecar(dataset.prefix).get("tokenizer")
    content = noted(dataset.prefix)
    of_documents = lengths.document_lengths(dataset)
    of_sequences = lengths.sequence_lengths(dataset)
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
        "document_lengths": of_documents.summary(),
        "sequence_lengths": of_sequences.summary(),
        "histogram": [[bin.low, bin.high, bin.count] for bin in lengths.bins(of_documents)],
        "tokenizer": tokenizer.fingerprint if tokenizer else named,
        "tokenizer_missing": missing,
        "content": content and content.bin,
        "first": [_document(dataset, k, tokenizer) for k in range(min(documents, dataset.document_count))],
    }


def words(found: dict[str, Any]) -> str:
    """A ``report`` as text."""
    size = shutil.get_terminal_size()
    rows = {
        "layout": f"{found['layout']}, {found['dtype']}" + (", with modes" if found["modes"] else ""),
        "files": f"{found['bin_bytes']:,} bytes of tokens, {found['idx_bytes']:,} of index",
        "documents": f"{found['documents']:,}",
        "sequences": f"{found['sequences']:,}",
        "tokens": f"{found['tokens']:,}",
        "tokenizer": tokenizers.describe(found["tokenizer"]) if found["tokenizer"] else "unknown",
        "": found["tokenizer_missing"] or "",
        "content hash": found["content"] or "none; hpclm data hash adds one",
        "tokens in a document": _summary(found["document_lengths"]),
    }
    if found["sequence_lengths"] != found["document_lengths"]:
        rows["tokens in a sequence"] = _summary(found["sequence_lengths"])
    parts = [found["prefix"], *(f"  {name:<21} {value}" for name, value in rows.items() if value)]
    if found["histogram"]:
        bins = [lengths.Bin(*bin) for bin in found["histogram"]]
        parts += ["", "documents by their tokens", lengths.bars(bins, min(size.columns, 100))]
    for document in found["first"]:
        parts += ["", f"document {document['document']}, {document['tokens']:,} tokens", _shown(document)]
    return "\n".join(parts)


def _tokenizer(prefix: Path, kind: str | None, files: list[str]) -> tuple[tokenizers.Tokenizer | None, str | None]:
    try:
        return tokenizers.of_run(DataConfig(prefix=str(prefix), tokenizer=kind, tokenizer_files=files)), None
    except ConfigError as error:
        if kind is not None:
            raise
        why = str(error) if "tokenizer" in sidecar(prefix) else "the dataset does not name one"
        return None, f"{why}; --tokenizer and --tokenizer-files select one"


def _document(dataset: IndexedDataset, k: int, tokenizer: tokenizers.Tokenizer | None) -> dict[str, Any]:
    first, last = dataset.bounds(k, k + 1).tolist()
    begin, end = dataset.place(first), dataset.place(last)
    ids = dataset.block(begin, min(end, begin + READ)).tolist()
    found: dict[str, Any] = {"document": k, "tokens": end - begin}
    if tokenizer is None or any(not 0 <= id < tokenizer.size for id in ids):
        return found | {"ids": ids[: SHOWN // 5], "cut": end - begin > SHOWN // 5}
    text = tokenizer.decode(ids)
    return found | {"text": text[:SHOWN], "cut": end - begin > len(ids) or len(text) > SHOWN}


def _shown(document: dict[str, Any]) -> str:
    text = document["text"] if "text" in document else " ".join(map(str, document["ids"]))
    return text + (" … (cut)" if document["cut"] else "")


def _summary(summary: dict[str, float]) -> str:
    return " · ".join(
        f"{name} {value:,.1f}" if name == "mean" else f"{name} {value:,}" for name, value in summary.items()
    )
