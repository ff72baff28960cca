"""The output of preprocessing: a dataset being written, counters, and deduplication."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from hpclm.data.disk.indexed import token_dtype
from hpclm.data.disk.writer import Writer
from hpclm.data.text.encode import Column, Job, tokenizer_of
from hpclm.data.text.repeats import Repeats


@dataclass(frozen=True)
class Report:
    """Summary of a dataset: what was written, and what was dropped."""

    prefix: Path
    documents: int
    tokens: int
    counts: dict[str, int]
    """Documents that were "skipped" (empty), "repeated" (left out), "unsplit" (one sequence, unlike the others)."""
    bad: dict[str, int]
    """Lines that could not be read, by reason."""


class Output:
    """The dataset of one key; it exists once the ``with`` block ends without an exception.

    ``digests``: also write the hashes of its documents there, for a merge that finds repeats. ``replaces``: as of Writer.
    """

    def __init__(self, prefix: Path, job: Job, digests: Path | None = None, replaces: bool = True):
        self.prefix, self._job, self._digests = prefix, job, digests
        self.counts: Counter[str] = Counter()
        self.bad: Counter[str] = Counter()
        self._writer = Writer(prefix, token_dtype(tokenizer_of(job).size), job.layout)
        self._writer.replaces = replaces
        self._open = ExitStack()

    @property
    def tokens(self) -> int:
        """Number of tokens so far."""
        return self._writer.tokens

    def add(self, column: Column) -> None:
        """Append a column's documents, except those seen before."""
        self.counts["skipped"] += column.empty if self._job.empty == "skip" else 0
        self.counts["unsplit"] += column.unsplit
        tokens, sizes, documents = column.tokens, column.sizes, column.documents
        if column.digests is not None:
            new = self._repeats.new(column.digests)
            repeated = len(new) - int(np.count_nonzero(new))
            if repeated:
                self.counts["repeated"] += repeated
                sequences = np.repeat(new, documents)
                tokens, sizes, documents = tokens[np.repeat(sequences, sizes)], sizes[sequences], documents[new]
            if self._digests is not None:
                self._file.write(column.digests[new].tobytes())
        self._writer.extend(tokens, sizes, documents)

    def report(self) -> Report:
        """The summary so far."""
        counts = {name: self.counts[name] for name in ("skipped", "repeated", "unsplit")}
        bad = {reason: self.bad[reason] for reason in sorted(self.bad)}
        return Report(self.prefix, self._writer.documents, self._writer.tokens, counts, bad)

    def close(self, more: dict[str, Any]) -> Report:
        """The last thing before the block ends: note what there is, and ``more``; the same for any number of processes.

        All that can fail is done here, so that of several outputs none appears where one cannot be finished.
        """
        job, report = self._job, self.report()
        noted = {
            "tokenizer": tokenizer_of(job).fingerprint,
            "tokenizer_files": [str(Path(file).absolute()) for file in job.files],
            "documents": report.documents,
            "tokens": report.tokens,
            "skipped": report.counts["skipped"],
        }
        noted |= {name: count for name, count in report.counts.items() if count and name != "skipped"}
        if report.bad:
            noted["bad"] = report.bad
        self._writer.note = noted | more
        self._writer.finish()
        return report

    def __enter__(self) -> "Output":
        with ExitStack() as opened:
            opened.enter_context(self._writer)
            if self._job.deduplicate:
                self._repeats = opened.enter_context(Repeats(self.prefix))
            if self._digests is not None:
                self._file = opened.enter_context(self._digests.open("wb"))
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)
