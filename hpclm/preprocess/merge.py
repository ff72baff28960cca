"""Merge datasets into one, or convert one to another layout or type."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hpclm.base.errors import ConfigError, unwritten
from hpclm.base.folders import writable_folder
from hpclm.data import loss_mask, tokenizer_folder, tokenizers
from hpclm.data.content import KEY, noted
from hpclm.data.formats import DTYPES, FAIRSEQ_ONLY
from hpclm.data.indexed import COUNTS, IndexedDataset, files, sidecar
from hpclm.preprocess import counts
from hpclm.preprocess.hashing import TokenReader
from hpclm.preprocess.writer import Layout, Writer

log = logging.getLogger(__name__)


def merge(
    out: str | Path,
    prefixes: Sequence[str | Path],
    layout: Layout | None = None,
    dtype: DTypeLike | None = None,
    compare: bool = True,
    overwrite: bool = False,
) -> IndexedDataset:
    """Write the documents of the datasets ``prefixes``, in order, as the dataset ``out``. ``overwrite`` allows replacing it.

    ``layout``: None: the datasets' common layout, or Megatron's if they differ. ``dtype``: None: the narrowest that holds all tokens.
    ``compare``: require the same tokenizer in every PREFIX.json; otherwise these files are ignored. ConfigError, and nothing is written,
    if the datasets cannot be merged.
    """
    from hpclm.base.progress import Bar

    _check_places(Path(out), prefixes, overwrite)
    layouts = set[Layout]()
    dtypes = list[np.dtype]()
    total = 0
    with_modes = list[Path]()
    without = list[Path]()
    for prefix in prefixes:  # closed again, because there may be thousands
        dataset = IndexedDataset(prefix)
        dataset.check()
        layouts.add(dataset.layout)
        dtypes.append(dataset.dtype)
        total += dataset.token_count
        if len(dataset):
            if dataset.modes is None:
                without.append(dataset.prefix)
            else:
                with_modes.append(dataset.prefix)
    if layout is None and len(layouts) == 1:
        layout = layouts.pop()
    layout = layout or "megatron"
    if dtype is None:
        dtype = common_dtype(dtypes, layout)
    if with_modes and without:
        raise ConfigError(f"{without[0]} has no modes, but others have: they cannot be merged")
    masked = [str(prefix) for prefix in prefixes if loss_mask.KEY in sidecar(prefix)]
    if masked:
        raise ConfigError(
            f"{masked[0]} has a loss mask, which merging would lose; list the datasets in data.train or data.blend instead"
        )
    note = joined_note(prefixes) if compare else None
    writable_folder(Path(out).parent, "output folder")
    try:
        with (
            Writer(out, dtype, layout) as writer,
            Bar(total=total, unit=" tokens", unit_scale=True, disable=None) as bar,
        ):
            for prefix in prefixes:
                copy(IndexedDataset(prefix), writer, bar.update)
            if note is not None:
                writer.note = note | {"documents": writer.documents, "tokens": writer.tokens}
                folder = tokenizer_folder.beside(prefixes[0])
                if folder.is_dir():
                    writer.write_beside = partial(copytree, folder)
                elif note["tokenizer"]["files"]:
                    log.warning("%s is missing, so %s has no tokenizer; name it by data.tokenizer", folder, out)
    except OSError as error:
        raise unwritten(error, out, "no dataset was written") from error
    return IndexedDataset(out)


def common_dtype(dtypes: Sequence[np.dtype], layout: Layout) -> np.dtype:
    """The narrowest integer type of the layout that can hold the values of all ``dtypes``."""
    wide = np.result_type(*dtypes)
    if wide.kind == "f":  # u8 and a signed type; the writer refuses tokens that do not fit
        wide = np.dtype("i8")
    unknown = [DTYPES[code] for code in FAIRSEQ_ONLY]
    if layout == "megatron" and wide in unknown:
        wide = np.dtype(f"i{wide.itemsize}")
    return wide.newbyteorder("<")


def joined_note(prefixes: Sequence[str | Path]) -> dict[str, Any] | None:
    """The contents of all PREFIX.json files, merged; None if none names a tokenizer. ConfigError for different tokenizers."""
    notes = {str(prefix): sidecar(prefix) for prefix in prefixes}
    silent = [prefix for prefix, note in notes.items() if "tokenizer" not in note]
    if len(silent) == len(notes):
        return None
    if silent:
        raise ConfigError(
            f"the tokenizer of {', '.join(silent)} is unknown, but that of {next(p for p in notes if p not in silent)} is known: "
            "give --no-note if you know that it is the same"
        )
    (first, joined), *others = notes.items()
    for prefix, note in others:
        differ = tokenizers.mismatch(joined["tokenizer"], note["tokenizer"])
        if differ:
            raise ConfigError(
                f"{first} and {prefix} were made with different tokenizers: {differ}; they cannot be merged"
            )
    total = sum((counts.noted(notes[str(prefix)]) for prefix in prefixes), counts.Counts())
    return {key: value for key, value in joined.items() if key != KEY} | {COUNTS: total.note()}


def _check_places(out: Path, prefixes: Sequence[str | Path], overwrite: bool) -> None:
    taken = {path.resolve() for prefix in prefixes for path in files(prefix)[:2]}
    for path in files(out)[:2]:
        if path.resolve() in taken:
            raise ConfigError(f"{path} is both input and output; choose another output")
    there = [str(path) for path in files(out) if path.exists()]
    if there and not overwrite:
        raise ConfigError(f"{' and '.join(there)} exists; give --overwrite to replace it, or choose another output")


def copy(dataset: IndexedDataset, writer: Writer, progress: Callable[[int], object] = lambda tokens: None) -> None:
    """Append all documents of ``dataset``; its index must have been checked. Calls ``progress`` with numbers of tokens.

    ConfigError if the tokens do not match their hash, or if the writer's layout cannot store the documents.
    """
    for documents in TokenReader(dataset, noted(dataset.prefix)):
        writer.extend(*documents)
        progress(len(documents.tokens))
