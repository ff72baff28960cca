"""Several datasets laid end to end as one, and one dataset in another layout or type."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from hpclm.data import tokenizers
from hpclm.data.disk.copying import copy
from hpclm.data.disk.formats import DTYPES, FAIRSEQ_ONLY
from hpclm.data.disk.indexed import IndexedDataset, files, sidecar
from hpclm.data.disk.writer import Layout, Writer
from hpclm.errors import ConfigError, unwritten
from hpclm.files import writable_folder

COUNTS = ("documents", "tokens", "skipped")  # what the notes of several datasets sum up to


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
    """Write the documents of the datasets ``prefixes``, in their order, as the dataset ``out``.

    layout: None: the one that all of them have, where it can be written, else Megatron's.
    note: goes to ``out``.json; None: what the datasets' own notes say, which must name the same tokenizer unless not
    ``compare``, and then there is none. dtype: None: the narrowest that holds all of theirs. lossy: see ``copying.copy``.
    ConfigError where they do not fit together; nothing is left of ``out`` then, and ``overwrite`` lets it replace a dataset.
    """
    from tqdm import tqdm

    _check_places(Path(out), prefixes, overwrite)
    parts = [_surveyed(prefix) for prefix in prefixes]
    if layout is None:
        layout = "fairseq" if all(part.layout == "fairseq" for part in parts) else "megatron"
    if len({part.modes for part in parts if part.sequences}) > 1 and layout == "megatron":
        plain = next(part.prefix for part in parts if part.sequences and not part.modes)
        raise ConfigError(
            f"{plain} has no modes and others have: they cannot be one dataset; leave out the one or the others"
        )
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
    """The narrowest integer type of the layout that holds what ``dtypes`` hold, as far as there is one."""
    wide = np.result_type(*dtypes)
    if wide.kind == "f":  # u8 and a signed one: the writer refuses what does not fit
        wide = np.dtype("i8")
    unknown = [DTYPES[code] for code in FAIRSEQ_ONLY]
    if layout == "megatron" and wide in unknown:
        wide = np.dtype(f"i{wide.itemsize}")
    return wide.newbyteorder("<")


def joined_note(prefixes: Sequence[str | Path]) -> dict[str, Any] | None:
    """What the notes of all datasets say together, None where none has one; ConfigError where they are of different tokenizers."""
    notes = {str(prefix): sidecar(prefix) for prefix in prefixes}
    silent = [prefix for prefix, note in notes.items() if not note]
    if len(silent) == len(notes):
        return None
    if silent:
        raise ConfigError(
            f"{', '.join(silent)} has no note that names its tokenizer, and {next(p for p in notes if p not in silent)} has: "
            "give --no-note if you know that they have the same one"
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
    return {key: value for key, value in joined.items() if key not in COUNTS} | sums


def _surveyed(prefix: str | Path) -> _Part:
    """The dataset's properties after a look at all of its index; it is closed again, for there may be thousands."""
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
            raise ConfigError(f"{path} is to be written and to be read; give the output another name")
    there = [str(path) for path in files(out) if path.exists()]
    if there and not overwrite:
        raise ConfigError(f"{' and '.join(there)} exists; give --overwrite to replace it, or another name")
