"""What all ranks agree on: signals, switches, the time, and whether a checkpoint has been written.

Every step takes the question along in the vector that brings its results, and the answer is read when the next step is
queued. Where something depends on it (Agreement.__call__), the ranks ask again and wait.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from hpclm.checkpoint import CheckpointStore
from hpclm.distributed.context import DistributedContext
from hpclm.node.preemption import WARNINGS, Preemption
from hpclm.parallel.step_vector import Reduction, StepVector
from hpclm.rundir.control_files import KILL_SWITCH, ControlFiles
from hpclm.rundir.lease import Lease

SIGNALS = tuple(number.name for number in WARNINGS)
STOPS = (None, "stop", KILL_SWITCH)
"""What ends a run for good, by its number in a question: a kill switch, which also ends the next start, outranks ``stop``."""
ASKED = 7 + len(SIGNALS)
"""Numbers of a question."""


@dataclass
class Trained:
    """What this rank's clock says of the steps whose results are known."""

    seconds: float
    """Of all attempts."""
    micro_batch: float = 0.0
    """Seconds of a micro-batch of the last step; 0 before the first."""


@dataclass(frozen=True)
class Orders:
    """The same on every rank."""

    since: Mapping[str, float] = field(default_factory=dict)
    """Seconds since any rank was first warned by a signal, for each signal by its name."""
    stop: str | None = None
    """The request that ends the run for good: "stop" or "kill_switch"."""
    out_of_time: bool = False
    """The attempt has lasted as long as it may."""
    save: bool = False
    """The save-now switch."""
    written: bool = True
    """Every rank has written its part of the checkpoint on its way."""
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


class Agreement:
    """Asks every rank, and gives all of them the same answer. Every rank must ask at the same places."""

    def __init__(
        self,
        context: DistributedContext,
        vector: StepVector,
        preemption: Preemption,
        store: CheckpointStore,
        trained: Trained,
        switches: ControlFiles | None,
        lease: Lease | None,
        exit_minutes: float | None,
    ):
        """``switches`` and ``lease`` are rank 0's."""
        self.context, self.vector, self.preemption, self.store = context, vector, preemption, store
        self.trained, self.switches, self.lease, self.exit_minutes = trained, switches, lease, exit_minutes
        self._began = time.monotonic()

    def __call__(self) -> Orders:
        """What stands now. LockedError on every rank when another attempt has taken the run directory over."""
        orders = self.orders(self.context.all_reduce_max(*self._known()))
        if orders.lost:
            self.context.run_on_main(lambda: self.lease.check() if self.lease else None)
        if orders.since and not orders.stop:  # it wins over a signal, and may have been requested since the last look
            orders = replace(orders, stop=STOPS[int(self.context.all_reduce_max(self._stop(now=True))[0])])
        return orders

    def start(self, measured: Sequence[float | Tensor]) -> Reduction:
        """Ask, and send what a step has ``measured``, without waiting: ``orders`` understands the first part of the answer."""
        self.context.watchdog.tick()
        return self.vector.start([*self._known(), *measured])

    def orders(self, answer: Sequence[float]) -> Orders:
        """What an answer says."""
        busy, stop, save, lost, minutes, trained, micro_batch, *seconds = answer[:ASKED]
        since = {name: passed for name, passed in zip(SIGNALS, seconds, strict=True) if passed}
        late = self.exit_minutes is not None and minutes >= self.exit_minutes
        return Orders(since, STOPS[int(stop)], late, bool(save), not busy, minutes, trained, micro_batch, bool(lost))

    def _known(self) -> list[float]:
        """What this rank knows, ASKED numbers of which the greatest of all ranks counts."""
        return [
            not self.store.written(),
            self._stop(),
            bool(self.switches and self.switches.requested("save-now")),
            bool(self.lease and self.lease.lost),
            (time.monotonic() - self._began) / 60 if self.context.is_main else 0.0,
            self.trained.seconds,
            self.trained.micro_batch,
            *(self.preemption.seconds(name) for name in SIGNALS),
        ]

    def _stop(self, now: bool = False) -> int:
        """The number in STOPS of what is requested; ``now``: look in any case."""
        if self.switches is None:
            return 0
        stop = self.switches.requested("stop", now)
        return 2 if self.switches.requested(KILL_SWITCH) else int(stop)
