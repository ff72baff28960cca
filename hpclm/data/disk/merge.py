"""Merge datasets into one, or convert one to another layout or type."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from hpclm.data import tokenizers
from hpclm.data.disk.content import KEY, Verification
from hpclm.data.disk.formats import DTYPES, FAIRSEQ_ONLY
from hpclm.data.disk.indexed import IndexedDataset, files, sidecar
from hpclm.data.disk.writer import Layout, Writer
from hpclm.errors import ConfigError, unwritten
from hpclm.files import writable_folder

COUNTS = ("documents", "tokens", "skipped")  # summed over the PREFIX.json of all datasets
TOKENS = 1 << 21  # tokens, sequences or documents that are copied at a time; documents are not split


@dataclass(frozen=True)
class _Part:
    prefix: Path
    layout: str
    dtype: np.dtype
    modes: bool
    sequences: int
    tokens: int


def merge(
    out: str | Path,
    prefixes: Sequence[str | Path],
    note: dict[str, Any] | None = None,
    layout: Literal["megatron", "fairseq"] | None = None,
    dtype: DTypeLike | None = None,
    lossy: bool = False,
    compare: bool = True,
    overwrite: bool = False,
) -> IndexedDataset:
    """Write the documents of the datasets ``prefixes``, in order, as the dataset ``out``, which ``overwrite`` lets it replace.

    note: for ``out``.json; None: from the datasets' own, which must name the same tokenizer (without ``compare``: none).
    layout: None: the one they share, if it can be written, else Megatron's. dtype: None: the narrowest that holds all tokens.
    lossy: see ``copy``. ConfigError, and nothing is written, if they cannot be merged.
    """
    from tqdm import tqdm

    _check_places(Path(out), prefixes, overwrite)
    parts = [_surveyed(prefix) for prefix in prefixes]
    if layout is None:
        layout = "fairseq" if all(part.layout == "fairseq" for part in parts) else "megatron"
    if len({part.modes for part in parts if part.sequences}) > 1 and layout == "megatron":
        plain = next(part.prefix for part in parts if part.sequences and not part.modes)
        raise ConfigError(f"{plain} has no modes, but others have: they cannot be merged")
    if note is None and compare:
        note = joined_note(prefixes)
    writable_folder(Path(out).parent, "output folder")
    wide = common_dtype([part.dtype for part in parts], layout) if dtype is None else dtype
    try:
        with (
            Writer(out, wide, layout) as writer,
            tqdm(total=sum(part.tokens for part in parts), unit=" tokens", unit_scale=True, disable=None) as bar,
        ):
            for part in parts:
                copy(IndexedDataset(part.prefix), writer, lossy, bar.update)
            if note is not None:
                writer.note = note | {"documents": writer.documents, "tokens": writer.tokens}
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
    """The content of all PREFIX.json files, merged; None if none names a tokenizer. ConfigError for different tokenizers."""
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
    given = [notes[str(prefix)] for prefix in prefixes]
    sums = {key: sum(note[key] for note in given) for key in COUNTS if all(isinstance(n.get(key), int) for n in given)}
    return {key: value for key, value in joined.items() if key not in (*COUNTS, KEY)} | sums


def _surveyed(prefix: str | Path) -> _Part:
    """The properties of a dataset, after checking its index; it is closed again, because there may be thousands."""
    dataset = IndexedDataset(prefix)
    dataset.check()
    modes = dataset.modes is not None
    return _Part(dataset.prefix, dataset.layout, dataset.dtype, modes, len(dataset), dataset.token_count)


def _check_places(out: Path, prefixes: Sequence[str | Path], overwrite: bool) -> None:
    if not prefixes:
        raise ConfigError("no datasets to merge; name at least one")
    taken = {path.resolve() for prefix in prefixes for path in files(prefix)[:2]}
    for path in files(out)[:2]:
        same = path.resolve() in taken
        with suppress(OSError):
            same = same or any(path.samefile(other) for other in taken)
        if same:
            raise ConfigError(f"{path} is both input and output; choose another output")
    there = [str(path) for path in files(out) if path.exists()]
    if there and not overwrite:
        raise ConfigError(f"{' and '.join(there)} exists; give --overwrite to replace it, or choose another output")


def document_ranges(dataset: IndexedDataset) -> Iterator[tuple[int, int]]:
    """Ranges [begin, end) of consecutive documents with at most ``TOKENS`` tokens in all (at least one document)."""
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
    progress: Callable[[int], object] = lambda tokens: None,
) -> None:
    """Append all documents of ``dataset``, whose index must have been checked; ``progress`` is called with numbers of tokens.

    ConfigError if the tokens do not match their hash. ``lossy`` drops what the writer's layout cannot store; otherwise that is a
    ConfigError.
    """
    single, verification = writer.layout == "fairseq", Verification(dataset)
    modes = dataset.modes
    if single and modes is not None and not lossy:
        raise ConfigError(f"{dataset.prefix} has modes, which fairseq's layout cannot store; --lossy drops them")
    for begin, end in document_ranges(dataset):
        bounds = dataset.bounds(begin, end)
        first, last = int(bounds[0]), int(bounds[-1])
        documents = np.diff(bounds)
        if single and (documents != 1).any():
            if not lossy:
                where = int(np.argmax(documents != 1))
                raise ConfigError(
                    f"{dataset.prefix}: document {begin + where} has {documents[where]} sequences, and in fairseq's layout "
                    "each sequence is a document; --lossy makes each sequence a document and drops empty documents"
                )
            documents = np.ones(last - first, np.int64)
        start, stop = dataset.place(first), dataset.place(last)
        kept = None if modes is None or single else modes[first:last]
        writer.extend(dataset.block(start, stop), dataset.sizes[first:last], documents, kept)
        verification.update(start, stop)
        dataset.release()
        progress(stop - start)
    verification.end()
