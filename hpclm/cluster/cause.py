"""What a run of several processes died of: the first cause, out of what each rank could say of its end."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpclm.cluster.rollcall import Present, ranges
from hpclm.errors import HpclmError

LONGEST = 1 << 16  # characters of a cause that are told


@dataclass(frozen=True)
class Death:
    """What is known of a rank's end."""

    rank: int
    text: str = ""
    """Message, or traceback; empty for a rank that is gone without a word."""
    code: int = 1
    caused: bool = False
    """It only lost a peer."""


def verdict(deaths: Sequence[Death], everyone: Sequence[Present]) -> tuple[str, int]:
    """What to tell of ``deaths`` (in the order they were heard of), first causes first, and the exit code of the first."""
    order = sorted(deaths, key=lambda death: (death.caused, not death.text))
    told, lines = [], []
    for death in order:
        if death.caused or death.text in told:
            continue
        same = [other.rank for other in order if other.text == death.text and not other.caused] if death.text else []
        if len(same) > 1:
            lines.append(f"ranks {ranges(same)} failed: {death.text.strip()}")
            told.append(death.text)
        elif death.text:
            lines.append(f"{everyone[death.rank]} failed: {death.text.strip()}")
        else:
            lines.append(
                f"{everyone[death.rank]} is gone without a word: killed (out of memory?), crashed, or its node is down"
            )
    lost = [death.rank for death in order if death.caused]
    if not lines:  # nobody knows the cause
        lines = [f"{everyone[death.rank]} failed: {death.text.strip()}" for death in order[:1]]
    elif lost:
        lines.append(f"then rank{'s' * (len(lost) != 1)} {ranges(lost)} lost the connection")
    return "\n".join(lines), order[0].code


def shortened(text: str) -> str:
    """``text``, or its beginning and end where it is very long."""
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]}\n[...]\n{text[-half:]}"


def lost_a_peer(error: BaseException) -> bool:
    """Whether an error only says that another process is gone."""
    words = (
        "connection closed by peer",
        "connection reset by peer",
        "broken pipe",
        "gloo",
        "nccl",
        "socket",
        "tcpstore",
    )
    kind = type(error).__name__
    return kind in ("DistBackendError", "DistNetworkError", "DistStoreError") or (
        isinstance(error, RuntimeError)
        and not isinstance(error, HpclmError)
        and any(word in str(error).lower() for word in words)
    )
