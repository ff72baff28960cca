"""What all ranks agree on between two steps: signals, switches, and whether a checkpoint has been written."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpclm.checkpoint import CheckpointStore
from hpclm.cluster.lease import Lease
from hpclm.cluster.preempt import WARNINGS, Preemption
from hpclm.cluster.switches import Switches
from hpclm.cluster.team import Team

SIGNALS = tuple(number.name for number in WARNINGS)


@dataclass(frozen=True)
class Orders:
    """The same on every rank."""

    since: Mapping[str, float] = field(default_factory=dict)
    """Seconds since any rank was first warned by a signal, for each signal by its name."""
    stop: bool = False
    """The stop switch."""
    out_of_time: bool = False
    """The attempt has lasted as long as it may."""
    save: bool = False
    """The save-now switch."""
    written: bool = True
    """Every rank has written its part of the checkpoint on its way."""
    minutes: float = 0.0
    """Of rank 0's clock, since the attempt began."""

    @property
    def signal(self) -> str | None:
        """The signal that came first."""
        return max(self.since, key=lambda name: self.since[name], default=None)

    @property
    def leaving(self) -> str | None:
        """Why the run is to leave now, in a word or two: stop goes before a signal, after which it would start again."""
        return "stop" if self.stop else self.signal or ("exit_minutes" if self.out_of_time else None)


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
        minutes = (time.monotonic() - self._began) / 60
        busy, stop, save, lost, clock, *seconds = self.team.highest_each(
            not self.store.written(),
            bool(self.switches and self.switches.given("stop")),
            bool(self.switches and self.switches.given("save-now")),
            bool(self.lease and self.lease.lost),
            minutes if self.team.leads else 0.0,
            *(self.preemption.seconds(name) for name in SIGNALS),
        )
        if lost:
            self.team.first(lambda: self.lease.check() if self.lease else None)
        out_of_time = self.exit_minutes is not None and clock >= self.exit_minutes
        since = {name: passed for name, passed in zip(SIGNALS, seconds, strict=True) if passed}
        if since and not stop:  # it goes before a signal, and may have been given since the last look
            stop = self.team.highest(bool(self.switches and self.switches.given("stop", now=True)))
        return Orders(since, bool(stop), out_of_time, bool(save), not busy, clock)
