"""Why a run of several processes ended, by the files that its ranks have left.

A rank that has only lost a connection knows a symptom. The cause is with another rank, which says so in its file, or which has left no
file, because it was killed or its node is down.
"""

import re
import traceback
from dataclasses import dataclass
from pathlib import Path

from hpclm import errors, files
from hpclm.distributed import hang
from hpclm.distributed.hang import RankState
from hpclm.distributed.ranks import RankInfo, named
from hpclm.errors import ExitCode, HpclmError
from hpclm.node import ends, processes

MAX_TEXT_CHARACTERS = 1 << 16  # of a failure's text that are kept
# gloo raises plain RuntimeErrors, which only their text tells apart
LOST = re.compile("connection (closed|reset) by peer|broken pipe|gloo|nccl|socket|tcpstore", re.IGNORECASE)
GONE = "left no message: killed (perhaps out of memory), or the node is down"


class LostRankError(HpclmError):
    """Another rank is gone, or has failed."""

    reported = True
    """Whether the run's log says it already."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.exit_code = code  # type: ignore[assignment]  # an exit code of a process that a signal ended is none of ours


@dataclass(frozen=True)
class Verdict:
    """Why the ranks ended."""

    exit_code: int | None
    """None if no rank has chosen one."""
    text: str
    gone: tuple[RankInfo, ...] = ()
    """The ranks that left no file while others did."""
    hang: bool = False


def verdict(where: Path) -> Verdict | None:
    """Why the ranks ended that have left their files in the folder ``where``; None if nothing is known."""
    left, ranks = ends.read(where), [RankInfo(**row) for row in ends.announced(where)]
    cause = ends.first(left.values())
    if cause and cause.hang is not None and ranks:
        states = {rank: RankState(**end.hang) for rank, end in left.items() if end.hang is not None}
        return Verdict(cause.exit_code, hang.report(states, ranks, where), hang=True)
    if cause:
        return Verdict(cause.exit_code, cause.cause)
    alive = ends.traces(where)
    symptom = min(left.values(), key=lambda end: end.time, default=None)
    code = symptom.exit_code if symptom else None
    if gone := [rank for rank in range(len(ranks)) if rank not in left.keys() | alive and not _runs_here(ranks[rank])]:
        return Verdict(code, f"{named(gone, ranks)} {GONE}", tuple(ranks[rank] for rank in gone))
    if symptom is None:
        return None
    why = "the ranks have lost their connections, and none was killed, so the network may be at fault"
    return Verdict(code, f"{why}: {symptom.cause}")


def _runs_here(info: RankInfo) -> bool:
    """Whether a rank's process is one of this machine, and runs: it waits for others, and has not heard of their end."""
    return info.machine == files.here() and processes.started(info.pid) is not None


def lost_a_peer(error: BaseException) -> bool:
    """Whether an error may only mean that another process has ended."""
    if type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        return True
    of_torch = isinstance(error, RuntimeError) and not isinstance(error, HpclmError)
    return of_torch and LOST.search(str(error)) is not None


def described(error: BaseException) -> tuple[int, str]:
    """The exit code of a process that raises ``error``, and the message; a traceback unless it is the user's or the machine's."""
    if isinstance(error, HpclmError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, "interrupted"
    if isinstance(error, SystemExit):  # the others still need this process
        code = error.code if isinstance(error.code, int) and error.code in errors.FAILURES else ExitCode.FAILED
        return code, f"it called sys.exit({error.code!r})\n{traceback.format_exc()}"
    return ExitCode.FAILED, traceback.format_exc()


def shortened(text: str) -> str:
    """``text``, or its beginning and end if it is very long. Lines after the first are indented: none looks like another log entry."""
    half = MAX_TEXT_CHARACTERS // 2  # a traceback's beginning says where, its end says what
    text = text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[:half]}\n[...]\n{text[-half:]}"
    return text.strip().replace("\n", "\n  ")
