"""Why a run of several processes ended: the first failure, in the store, where every rank polls for it."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from hpclm.distributed.rendezvous import RankInfo
from hpclm.errors import HpclmError

if TYPE_CHECKING:
    from torch.distributed import Store

KEY = "hpclm/failure"
LONGEST = 1 << 16  # characters of a failure's text that are kept
LOST = re.compile("connection (closed|reset) by peer|broken pipe|gloo|nccl|socket|tcpstore", re.IGNORECASE)
Kind = Literal["raised", "killed", "unreachable", "launcher", "hung"]


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

    def describe(self, ranks: Sequence[RankInfo]) -> str:
        """For the log."""
        who = str(ranks[self.rank])
        if self.kind == "killed":
            silent = "was killed: it ended without a message (SIGKILL, perhaps out of memory, or a crash)"
            return f"{who} {self.text or silent}"
        if self.kind == "unreachable":
            return f"{who} cannot be reached: {self.text}"
        if self.kind == "launcher":
            return f"the launcher of {who} is gone; the run ends, because nothing would restart or stop it"
        return f"{who} failed: {self.text.strip()}"


def publish(store: "Store", failure: Failure) -> Failure:
    """Put ``failure`` into the store, unless there is one already; returns the first."""
    return parse(store.compare_set(KEY, "", json.dumps(asdict(failure))))


def read(store: "Store") -> Failure | None:
    """The failure in the store, if any."""
    return parse(store.get(KEY)) if store.check([KEY]) else None


def parse(text: bytes) -> Failure:
    """A failure as ``publish`` wrote it."""
    return Failure(**json.loads(text))


def shortened(text: str) -> str:
    """``text``, or its beginning and end if it is very long."""
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]}\n[...]\n{text[-half:]}"


def lost_a_peer(error: BaseException) -> bool:
    """Whether an error only means that another process has ended."""
    if type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        return True
    of_torch = isinstance(error, RuntimeError) and not isinstance(error, HpclmError)
    return of_torch and LOST.search(str(error)) is not None
