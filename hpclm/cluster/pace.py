"""Names slow ranks: in the log when they become slow, and in the run directory's ranks.json, which status reads."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpclm import files
from hpclm.cluster.rollcall import Present
from hpclm.cluster.slow import Comparison, Slow, Tally

log = logging.getLogger(__name__)

REFRESH = 60.0  # seconds after which the figures of ranks that stay slow are written again


class Pace:
    """Rank 0's comparison of what the ranks have counted."""

    def __init__(self, limit: float):
        self.limit = limit
        self._compare: Comparison | None = None
        self._path: Path | None = None
        self._known: dict[int, Slow] = {}
        self._written = 0.0

    def begin(self, path: Path | None, stages: int) -> None:
        """From here on, compare ranks of a pipeline of ``stages``; what slow ones there are goes to ``path``."""
        self._path = path
        if path:
            with suppress(OSError):
                path.unlink(missing_ok=True)  # of the attempt before
        self._compare = Comparison(self.limit, stages) if path and self.limit else None

    def compare(self, words: Mapping[int, Mapping[str, Any]], everyone: Sequence[Present], step: int) -> None:
        """Compare what the ranks have told, and name who has become slow, or is so no more."""
        if self._compare is None or len(words) < 2:
            return
        found = self._compare({rank: Tally(w["steps"], w["own"], w["all"]) for rank, w in sorted(words.items())})
        if found is None:
            return
        for rank, slow in found.items():
            if rank not in self._known:
                log.warning(
                    "%s is slow: %.3g s of its own for a step, %.1f times the others' median of %.3g s (step %d)",
                    everyone[rank],
                    slow.seconds,
                    slow.times,
                    slow.median,
                    step,
                )
        for rank in self._known.keys() - found.keys():
            log.info("rank %d is slow no more (step %d)", rank, step)
        if found.keys() != self._known.keys() or (found and time.monotonic() - self._written > REFRESH):
            self._write(found, everyone, step)
        self._known = found

    def _write(self, found: Mapping[int, Slow], everyone: Sequence[Present], step: int) -> None:
        rows = [{"rank": rank, "host": everyone[rank].host, **asdict(slow)} for rank, slow in sorted(found.items())]
        content = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step, "slow": rows}
        self._written = time.monotonic()
        if self._path:
            with suppress(OSError):
                files.write_text(self._path, json.dumps(content) + "\n")
