"""Notice that the ranks of a run have ended before a phase of its data, so that whoever started them starts them again."""

from collections.abc import Sequence
from pathlib import Path

from hpclm.base.errors import ExitCode
from hpclm.rundir import events


class PhaseEnds:
    """Counts the attempts at a run that have saved and ended because the next phase needs another start of the ranks."""

    def __init__(self, out: Path):
        """``out``: the run directory. Errors: see ``events.read_or_refuse``."""
        self.out = out
        self._count = self._counted()

    def another(self, code: int, received: Sequence[int] = ()) -> bool:
        """Whether an attempt has ended so since the last call; after it, the next start continues the run.

        ``code``: the exit code of the ranks. ``received``: the signals that their launcher has received, after which it must end.
        """
        if code != ExitCode.REQUEUE or received:
            return False
        before = self._count
        self._count = self._counted()
        return self._count > before

    def _counted(self) -> int:
        ended = events.of_kind(events.read_or_refuse(self.out), "ended")
        return sum(event.get("state") == events.PHASE for event in ended)
