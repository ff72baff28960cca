"""Find out why a run of several processes ended, from the files that its ranks have left.

A rank that lost a connection only knows a symptom. The rank at fault has left the cause in its file, or no file if it was killed or its
node is down.
"""

import re
import traceback
from dataclasses import dataclass
from pathlib import Path

from hpclm.base import errors, files
from hpclm.base.errors import ExitCode, HpclmError
from hpclm.distributed import hang
from hpclm.distributed.hang import RankState
from hpclm.distributed.ranks import RankInfo, named_ranks
from hpclm.node import ends, processes

MAX_TEXT_CHARACTERS = 1 << 16  # a longer text of a failure is shortened
# gloo raises plain RuntimeErrors, so only their text identifies a lost connection
LOST = re.compile("connection (closed|reset) by peer|broken pipe|gloo|nccl|socket|tcpstore", re.IGNORECASE)
GONE = "left no message: killed (perhaps out of memory), or the node is down"


class LostRankError(HpclmError):
    """Another rank is lost, or has failed."""

    reported = True
    """True: the run's log already has the error."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.exit_code = code  # type: ignore[assignment]  # may be the code of a signal, which is not in ExitCode


@dataclass(frozen=True)
class FailureVerdict:
    """Why the ranks ended."""

    exit_code: int | None
    """None if no rank has left one."""
    text: str
    gone: tuple[RankInfo, ...] = ()
    """The ranks that left no file while others did."""
    hang: bool = False


def verdict(folder: Path) -> FailureVerdict | None:
    """Why the ranks with files in ``folder`` ended; None if nothing is known."""
    left = ends.read_ends(folder)
    ranks = [RankInfo(**row) for row in ends.announced(folder)]
    cause = ends.first(left.values())
    if cause and cause.hang is not None and ranks:
        states = {rank: RankState(**end.hang) for rank, end in left.items() if end.hang is not None}
        return FailureVerdict(cause.exit_code, hang.report(states, ranks, folder), hang=True)
    if cause:
        return FailureVerdict(cause.exit_code, cause.cause)
    symptom = min(left.values(), key=lambda end: end.time, default=None)
    code = symptom.exit_code if symptom else None
    known = left.keys() | ends.traces(folder)
    gone = [rank for rank, info in enumerate(ranks) if rank not in known and not _runs_here(info)]
    if gone:
        return FailureVerdict(code, f"{named_ranks(gone, ranks)} {GONE}", tuple(ranks[rank] for rank in gone))
    if symptom is None:
        return None
    why = "the ranks have lost their connections, and none was killed, so the network may be at fault"
    return FailureVerdict(code, f"{why}: {symptom.cause}")


def _runs_here(info: RankInfo) -> bool:
    """Whether a rank's process still runs on this machine. Such a rank is not lost: it waits for the others and has not noticed their end."""
    return info.machine == files.here() and processes.started(info.pid) is not None


def lost_a_peer(error: BaseException) -> bool:
    """Whether an error may be only a symptom of another process's end."""
    if type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        return True
    from_torch = isinstance(error, RuntimeError) and not isinstance(error, HpclmError)
    return from_torch and LOST.search(str(error)) is not None


def described_error(error: BaseException) -> tuple[int, str]:
    """The exit code and the message for ``error``; with a traceback if hpclm or the user's code may be at fault."""
    if isinstance(error, HpclmError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, "interrupted"
    if isinstance(error, SystemExit):  # counts as a failure, because the other ranks still need this process
        code = error.code if isinstance(error.code, int) and error.code in errors.FAILURES else ExitCode.FAILED
        return code, f"it called sys.exit({error.code!r})\n{traceback.format_exc()}"
    return ExitCode.FAILED, traceback.format_exc()


def shortened(text: str) -> str:
    """``text``, or its beginning and end if it is very long. Later lines are indented, so that none looks like another log entry."""
    if len(text) > MAX_TEXT_CHARACTERS:
        half = MAX_TEXT_CHARACTERS // 2  # a traceback begins with the place and ends with the error
        text = f"{text[:half]}\n[...]\n{text[-half:]}"
    return text.strip().replace("\n", "\n  ")
