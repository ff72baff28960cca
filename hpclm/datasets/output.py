"""The output of preprocessing: a dataset that is being written, and counters."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
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


class Output(Writer):
    """Writes the dataset of one key. ``replaces``: as of Writer."""

    def __init__(self, prefix: Path, job: Job, replaces: bool = True):
        super().__init__(prefix, token_dtype(tokenizer_of(job).size), job.layout, replaces)
        self.prefix, self._job = prefix, job
        self.skipped = 0
        self.bad: Counter[str] = Counter()

    def add_column(self, column: Column) -> None:
        """Append a column's documents."""
        self.skipped += column.empty if self._job.empty == "skip" else 0
        self.extend(column.tokens, column.sizes, column.documents)

    def report(self) -> BuildReport:
        """The summary so far."""
        return BuildReport(self.prefix, self.documents, self.tokens, self.skipped, dict(sorted(self.bad.items())))

    def complete(self, more: dict[str, Any]) -> BuildReport:
        """Complete the files, with ``more`` in PREFIX.json; all that can fail is done here (see ``Writer.finish``)."""
        report = self.report()
        self.note = {
            "tokenizer": tokenizer_of(self._job).fingerprint,
            "tokenizer_files": [str(Path(file).absolute()) for file in self._job.files],
            "documents": report.documents,
            "tokens": report.tokens,
            "skipped": report.skipped,
            **({"bad": report.bad} if report.bad else {}),
            **more,
        }
        self.finish()
        return report
