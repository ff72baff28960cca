"""What all ranks agree on between two steps: signals, switches, and whether a checkpoint has been written."""

import signal
import time
from dataclasses import dataclass

from hpclm.checkpoint import CheckpointStore
from hpclm.cluster.lease import Lease
from hpclm.cluster.preempt import Preemption
from hpclm.cluster.switches import Switches
from hpclm.cluster.team import Team


@dataclass(frozen=True)
class Orders:
    """The same on every rank."""

    signal: str | None = None
    """By which any rank was warned."""
    stop: bool = False
    """The stop switch."""
    out_of_time: bool = False
    """The attempt has lasted as long as it may."""
    save: bool = False
    """The save-now switch."""
    hurry: float = 0.0
    """Seconds since the warning."""
    written: bool = True
    """Every rank has written its part of the checkpoint on its way."""
    minutes: float = 0.0
    """Of rank 0's clock, since the attempt began."""

    @property
    def leaving(self) -> str | None:
        """Why the run is to leave now, in a word or two."""
        return self.signal or ("stop" if self.stop else "exit_minutes" if self.out_of_time else None)


class Agreement:
    """Asks every rank, and gives all of them the same answer. Every rank must ask at the same places."""

    def __init__(
        self,
        team: Team,
        preemption: Preemption,
        store: CheckpointStore,
        switches: Switches | None,
        lease: Lease | None,
        exit_minutes: float | None,
    ):
        """``switches`` and ``lease`` are rank 0's."""
        self.team, self.preemption, self.store = team, preemption, store
        self.switches, self.lease, self.exit_minutes = switches, lease, exit_minutes
        self._began = time.monotonic()

    def __call__(self) -> Orders:
        """What stands now. LockedError on every rank when another attempt has taken the run directory over."""
        warned = self.preemption.signal
        minutes = (time.monotonic() - self._began) / 60
        number, hurry, busy, stop, save, lost, clock = self.team.highest_each(
            int(signal.Signals[warned]) if warned else 0,
            self.preemption.seconds(),
            not self.store.written(),
            bool(self.switches and self.switches.given("stop")),
            bool(self.switches and self.switches.given("save-now")),
            bool(self.lease and self.lease.lost),
            minutes if self.team.leads else 0.0,
        )
        if lost:
            self.team.first(lambda: self.lease.check() if self.lease else None)
        out_of_time = self.exit_minutes is not None and clock >= self.exit_minutes
        name = signal.Signals(int(number)).name if number else None
        return Orders(name, bool(stop), out_of_time, bool(save), hurry, not busy, clock)
