"""How far preprocessing is: a bar on a terminal, a quiet line now and then elsewhere."""

import logging
import sys
import time
from types import TracebackType
from typing import Any

log = logging.getLogger(__name__)
QUIET = 60  # seconds between lines where nobody said how many documents


class Progress:
    """Bytes read, documents and tokens so far; ``total`` bytes are expected, None where nobody knows.

    ``every`` documents a line is logged when standard error is no terminal; None: once a minute.
    """

    def __init__(self, name: str, total: int | None, every: int | None):
        self._name, self._total, self._every = name, total, every
        self._bytes = self._documents = self._shown = 0
        self._began = self._next = 0.0
        self._bar: Any = None

    def update(self, consumed: int, documents: int, tokens: int) -> None:
        """``consumed`` bytes and ``documents`` more, ``tokens`` in all."""
        self._bytes += consumed
        self._documents += documents
        now = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(f"{tokens / max(now - self._began, 1e-9):,.0f} tokens/s", refresh=False)
            self._bar.update(consumed)
            return
        due = now >= self._next if self._every is None else self._documents - self._shown >= self._every
        if due:
            log.info(self._line(now - self._began, tokens))
            self._shown, self._next = self._documents, now + QUIET

    def _line(self, seconds: float, tokens: int) -> str:
        said = f"{self._name}: {self._documents:,} documents, {self._bytes / 1e6 / seconds:.1f} MB/s, "
        said += f"{tokens / seconds:,.0f} tokens/s"
        if self._total:
            left = seconds * max(self._total - self._bytes, 0) / max(self._bytes, 1)
            said += f", {min(self._bytes / self._total, 1):.0%}, {_clock(left)} left"
        return said

    def __enter__(self) -> "Progress":
        self._began = time.monotonic()
        self._next = self._began + QUIET
        if sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit="B", unit_scale=True, desc=self._name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()


def _clock(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
