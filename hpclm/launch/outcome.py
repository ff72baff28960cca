"""Find out how the ranks of a launch ended: the cause and its exit code, for the process that started the ranks."""

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpclm.base.errors import ExitCode
from hpclm.base.terminal import say
from hpclm.distributed import ending, failure
from hpclm.launch.phases import PhaseEnds
from hpclm.node import ends
from hpclm.node.job import OwnJob
from hpclm.node.processes import memory_kills
from hpclm.rundir import summary

SHOWS = 3.0  # seconds for the files of ranks on other nodes to appear: NFS shows them late
LOST_NODE = 205  # mpirun's exit code when a node is lost


class Outcome:
    """The end of the ranks that one launch starts."""

    def __init__(self, out: Path, start: str, launcher: str, job: OwnJob | None = None):
        """``start``: a name for this start of the ranks. ``launcher``: srun, mpirun or torchrun."""
        self.out = out
        self.launcher = launcher
        self.job = job or OwnJob()
        self._start = start
        self._starts = 1
        self.folder = out.absolute() / "logs" / "errors" / start
        """The folder for the ranks' files."""
        self._memory_kills = memory_kills()
        self._phases = PhaseEnds(out)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that tell the ranks their folder."""
        return {ends.FOLDER: str(self.folder)}

    def settle(self, code: int) -> tuple[int, str]:
        """The exit code of the cause, and the cause, which is also written to the run's log unless a rank has done so.

        ``code``: the launcher's exit code.
        """
        if not code:
            return code, ""
        found = failure.verdict(self.folder)
        until = time.monotonic() + SHOWS
        while (found is None or found.gone) and self.folder.exists() and time.monotonic() < until:
            time.sleep(0.2)
            found = failure.verdict(self.folder)
        if found is None:
            return code, ""
        text = found.text
        if found.gone:
            killed = memory_kills() - self._memory_kills
            if killed > 0:
                text += f". The kernel has killed {killed} processes of this job because memory ran out"
            troubles = self.job.troubles(sorted({info.host for info in found.gone}))
            if troubles:
                text += f". {self.job.scheduler} says: {'; '.join(troubles)}"
        # for ranks that left no file, the launcher's code says more, unless it only says that a task failed
        if found.exit_code is not None and not (found.gone and code != ExitCode.FAILED):
            code = found.exit_code
        if text and (self.out / "log.txt").exists() and ends.claim_report(self.folder):
            ending.append_to_log(self.out, text)
            summary.failed_without_main(self.out)(text)
        return code, text

    def next_phase(self, code: int, received: Sequence[int] = ()) -> bool:
        """Whether to start the ranks again at once (``PhaseEnds.another``); for their next start, the folder is another one."""
        if not self._phases.another(code, received):
            return False
        shutil.rmtree(self.folder, ignore_errors=True)
        self._starts += 1
        self.folder = self.folder.with_name(f"{self._start}-start-{self._starts}")
        return True

    def tell(self, code: int, why: str) -> None:
        """Print how the launcher ended if ``code`` is not 0."""
        if code:
            text = f"{self.launcher} ended with exit code {code}"
            if why:
                text += f": {why.partition(chr(10))[0]}"
            say(text, file=sys.stderr, flush=True)


def by_signal(code: int) -> bool:
    """Whether the exit code ``code`` says that a signal, or the loss of its node, ended a process."""
    return code == LOST_NODE or 128 < code < 160
