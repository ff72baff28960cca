"""Documents that training leaves out (data.without): their tokens are replaced by end-of-document tokens, and the order stays."""

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpclm.base import files
from hpclm.base.errors import ConfigError
from hpclm.data.indexed import IndexedDataset
from hpclm.data.pieces import Traceable

LINE = re.compile(r"(?:(.*\S)\s+)?([0-9]+)")
"""A document: [PREFIX] NUMBER."""


class Exclusion:
    """The documents in a list, one `PREFIX NUMBER` or `NUMBER` per line; empty lines, and those that begin with #, are skipped."""

    def __init__(self, text: str, source: str, datasets: Iterable[IndexedDataset], eod: int):
        """``text``: the list; ``source``: where it is from. ``datasets``: of the run. ConfigError names each wrong line."""
        self.text = text
        self.eod = eod
        by_path: dict[str, list[IndexedDataset]] = {}
        for dataset in datasets:
            by_path.setdefault(os.path.realpath(dataset.prefix), []).append(dataset)
        self.documents: dict[str, set[int]] = {}
        """By the real path of the dataset."""
        wrong = []
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            try:
                path, document = _document(line.strip(), by_path)
                self.documents.setdefault(path, set()).add(document)
            except ConfigError as error:
                wrong.append(f"{source}, line {number}: {error}")
        if wrong:
            raise ConfigError(wrong)
        self._ranges: dict[Path, tuple[list[int], list[int]]] = {}
        for path, documents in self.documents.items():
            ranges = [by_path[path][0].document_tokens(document) for document in sorted(documents)]
            begins, ends = ([bounds[side] for bounds in ranges] for side in (0, 1))
            self._ranges |= {dataset.prefix: (begins, ends) for dataset in by_path[path]}

    def __len__(self) -> int:
        return sum(map(len, self.documents.values()))

    def __contains__(self, document: tuple[IndexedDataset, int]) -> bool:
        dataset, number = document
        return number in self.documents.get(os.path.realpath(dataset.prefix), ())

    @property
    def name(self) -> str:
        """A file name for the list, by its content."""
        return f"without-{xxhash.xxh3_64_hexdigest(self.text.encode())}.txt"

    def replace(self, samples: Traceable, index: int, row: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Replace tokens in ``row`` [S + 1], which is sample ``index``; returns which ones, [S + 1]."""
        removed = np.zeros(len(row), np.bool_)
        for at, number, begin, size in samples.pieces(index):
            begins, ends = self._ranges.get(samples.datasets[number].prefix, ((), ()))
            place = bisect_right(ends, begin)
            while place < len(begins) and begins[place] < begin + size:
                first = at + max(begins[place] - begin, 0)
                removed[first : at + min(ends[place] - begin, size)] = True
                place += 1
        row[removed] = self.eod
        return removed


def read(path: str) -> str:
    """The text of the list ``path``; ConfigError if it cannot be read."""
    try:
        return files.read_text(Path(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"data.without={path} cannot be read: {reason}; the lists that a run has used are copied to its config-history/"
        ) from None


def _document(line: str, by_path: Mapping[str, list[IndexedDataset]]) -> tuple[str, int]:
    """The real path of a dataset, and the number of a document."""
    match = LINE.fullmatch(line)
    if not match:
        raise ConfigError(
            f"{line!r} must be a document's number from 0 on, or the prefix of its dataset and the number"
        )
    prefix, number = match[1], int(match[2])
    paths = list(by_path)
    if prefix is not None:
        paths = [path for path in by_path if prefix in (path, Path(path).name) or os.path.realpath(prefix) == path]
    if len(paths) != 1:
        raise ConfigError(f"{line!r} must name one dataset of {', '.join(by_path)}")
    count = by_path[paths[0]][0].document_count
    if number >= count:
        raise ConfigError(f"{paths[0]} has documents 0 to {count - 1:,}; it has no document {number:,}")
    return paths[0], number
