"""Why a run of several processes ended: the first failure, in the store, where every rank polls for it.

A rank that has only lost a connection knows a symptom, not the cause. It publishes that: any cause replaces it, and if
none does, the ranks find out who of them is gone (``heartbeat``).
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hpclm.distributed.rendezvous import RankInfo
from hpclm.distributed.store import JsonStore
from hpclm.errors import HpclmError
from hpclm.terminal import ranges

KEY = "hpclm/failure"
MAX_TEXT_CHARACTERS = 1 << 16  # characters of a failure's text that are kept
# gloo raises plain RuntimeErrors, which only their text tells apart
LOST = re.compile("connection (closed|reset) by peer|broken pipe|gloo|nccl|socket|tcpstore", re.IGNORECASE)
CLOSED = re.compile("connection (closed|reset|refused)|broken pipe|remote process exited", re.IGNORECASE)
Kind = Literal["raised", "killed", "lost", "disconnected", "launcher", "hung", "late"]


@dataclass(frozen=True)
class Failure:
    """Why a run ends."""

    rank: int
    """The rank that failed; in a hang, the one that reports it."""
    kind: Kind
    code: int
    """Exit code of all ranks that still can choose it."""
    text: str = ""
    """Message or traceback, if any; or the signal that killed a rank, according to torchrun's agent."""

    @property
    def symptom(self) -> bool:
        """Whether this rank only lost its connection to another."""
        return self.kind == "disconnected"

    def describe(self, ranks: Sequence[RankInfo]) -> str:
        """For the log; lines after the first are indented, so that none looks like another entry."""
        who, text = str(ranks[self.rank]), self.text.strip().replace("\n", "\n  ")
        if self.kind == "killed":
            silent = "was killed: it ended without a message (SIGKILL, perhaps out of memory, or a crash)"
            return f"{who} {text or silent}"
        if self.kind == "lost":
            return f"{text}; the other ranks end too"
        if self.kind in ("hung", "late"):
            return text
        if self.kind == "launcher":
            return f"the launcher of {who} is gone; the run ends, because nothing would restart or stop it"
        return f"{who} failed: {text}"


def publish(store: JsonStore, failure: Failure) -> Failure:
    """Put ``failure`` into the store, unless there is a cause already; returns what is there."""

    def replaced(present: dict[str, Any]) -> bool:
        return Failure(**present).symptom and not failure.symptom

    return Failure(**store.put(KEY, asdict(failure), replaced))


def read(store: JsonStore) -> Failure | None:
    """The failure in the store, if any."""
    value = store.get(KEY)
    return None if value is None else Failure(**value)


def shortened(text: str) -> str:
    """``text``, or its beginning and end if it is very long."""
    # a traceback's beginning says where, its end says what
    half = MAX_TEXT_CHARACTERS // 2
    return text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[:half]}\n[...]\n{text[-half:]}"


def named(lost: Sequence[int], ranks: Sequence[RankInfo]) -> str:
    """Ranks and their hosts, for the log."""
    if len(lost) == 1:
        return str(ranks[lost[0]])
    hosts = sorted({ranks[rank].host for rank in lost})
    return f"ranks {ranges(lost)} on {', '.join(hosts[:8])}{', ...' * (len(hosts) > 8)}"


def lost_a_peer(error: BaseException) -> bool:
    """Whether an error may only mean that another process has ended."""
    if type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        return True
    of_torch = isinstance(error, RuntimeError) and not isinstance(error, HpclmError)
    return of_torch and LOST.search(str(error)) is not None
