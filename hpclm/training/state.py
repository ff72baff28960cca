"""What holds on all ranks: signals, requests, the time, and whether a checkpoint has been written."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpclm.node.preemption import WARNINGS
from hpclm.rundir.control_files import KILL_SWITCH

SIGNALS = tuple(number.name for number in WARNINGS)
STOPS = (None, "stop", KILL_SWITCH)
"""What ends a run for good, by its number in the control vector: a kill switch, which also ends the next start, outranks ``stop``."""


@dataclass(frozen=True)
class ControlState:
    """The same on every rank."""

    since: Mapping[str, float] = field(default_factory=dict)
    """Seconds since any rank was first warned by a signal, for each signal by its name."""
    stop: str | None = None
    """The request that ends the run for good: "stop" or "kill_switch"."""
    out_of_time: bool = False
    """The attempt has lasted as long as it may."""
    save: bool = False
    """A save-now request."""
    written: bool = True
    """Every rank has written its part of the checkpoint that is being saved."""
    minutes: float = 0.0
    """Of rank 0's clock, since the attempt began."""
    trained: float = 0.0
    """Seconds of all steps whose results are known, by the slowest rank."""
    micro_batch: float = 0.0
    """Seconds of a micro-batch of the last of them, by the slowest rank; 0 before the first."""
    lost: bool = False
    """Another attempt may have taken the run directory over."""

    @property
    def signal(self) -> str | None:
        """The signal that came first."""
        return max(self.since, key=lambda name: self.since[name], default=None)

    @property
    def leaving(self) -> str | None:
        """Why the run must exit now, in a word or two. stop wins over a signal, after which the run would start again."""
        return self.stop or self.signal or ("exit_minutes" if self.out_of_time else None)
