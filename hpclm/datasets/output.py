"""The output of preprocessing: a dataset that is being written, and counters."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hpclm.data.indexed import token_dtype
from hpclm.datasets.encode import Column, Job, tokenizer_of
from hpclm.datasets.writer import Writer


@dataclass(frozen=True)
class BuildReport:
    """Summary of a dataset: what was written, and what was left out."""

    prefix: Path
    documents: int
    tokens: int
    skipped: int
    """Empty documents."""
    bad: dict[str, int]
    """Lines that could not be read, by reason."""

    @property
    def omissions(self) -> str:
        """What was left out, in words."""
        empty = f"{self.skipped:,} empty documents skipped"
        if not self.bad:
            return empty
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in self.bad.items())
        return f"{empty}, {sum(self.bad.values()):,} unreadable lines skipped ({reasons})"


class Output:
    """The dataset of one key; it exists once the ``with`` block ends without an exception. ``replaces``: as of Writer."""

    def __init__(self, prefix: Path, job: Job, replaces: bool = True):
        self.prefix, self._job = prefix, job
        self.skipped = 0
        self.bad: Counter[str] = Counter()
        self._writer = Writer(prefix, token_dtype(tokenizer_of(job).size), job.layout, replaces)

    @property
    def tokens(self) -> int:
        """Number of tokens so far."""
        return self._writer.tokens

    def add(self, column: Column) -> None:
        """Append a column's documents."""
        self.skipped += column.empty if self._job.empty == "skip" else 0
        self._writer.extend(column.tokens, column.sizes, column.documents)

    def report(self) -> BuildReport:
        """The summary so far."""
        bad = {reason: self.bad[reason] for reason in sorted(self.bad)}
        return BuildReport(self.prefix, self._writer.documents, self._writer.tokens, self.skipped, bad)

    def close(self, more: dict[str, Any]) -> BuildReport:
        """Complete the files, with ``more`` in PREFIX.json; call it last.

        All that can fail is done here, so that of several outputs none appears if one cannot be completed.
        """
        report = self.report()
        self._writer.note = {
            "tokenizer": tokenizer_of(self._job).fingerprint,
            "tokenizer_files": [str(Path(file).absolute()) for file in self._job.files],
            "documents": report.documents,
            "tokens": report.tokens,
            "skipped": report.skipped,
            **({"bad": report.bad} if report.bad else {}),
            **more,
        }
        self._writer.finish()
        return report

    def __enter__(self) -> "Output":
        self._writer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, trace)
