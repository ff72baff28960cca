"""How the ranks of a launch ended: the cause and its exit code, for the process that started them."""

import sys
import time
from pathlib import Path

from hpclm.base.errors import ExitCode
from hpclm.base.terminal import say
from hpclm.distributed import ending, failure
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
        self.folder = out.absolute() / "logs" / "errors" / start
        """For the files of the ranks."""
        self._memory_kills = memory_kills()

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that tell ranks the folder."""
        return {ends.FOLDER: str(self.folder)}

    def settle(self, code: int) -> tuple[int, str]:
        """The exit code of the cause, and the cause. The cause is also logged in the run's log, unless a rank has done so.

        ``code``: of the launcher.
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
                text += f". The kernel has killed {killed} processes of this job for want of memory"
            troubles = self.job.troubles(sorted({info.host for info in found.gone}))
            if troubles:
                text += f". {self.job.scheduler} says: {'; '.join(troubles)}"
        # the launcher knows more of ranks that are gone than their peers do, unless it only knows that a task failed
        if found.exit_code is not None and not (found.gone and code != ExitCode.FAILED):
            code = found.exit_code
        if text and (self.out / "log.txt").exists() and ends.claim_report(self.folder):
            ending.append_to_log(self.out, text)
            summary.failed_without_main(self.out)(text)
        return code, text

    def tell(self, code: int, why: str) -> None:
        """Say how it ended, unless all went well."""
        if code:
            first = why.partition("\n")[0]
            say(f"{self.launcher} ended with exit code {code}{first and f': {first}'}", file=sys.stderr, flush=True)


def by_signal(code: int) -> bool:
    """Whether an exit code says that a signal, or the loss of its node, ended a process."""
    return code == LOST_NODE or 128 < code < 160
