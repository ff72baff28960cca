"""What holds on all ranks: signals, requests, the time, and whether a checkpoint has been written.

Every step sends what each rank knows along in the vector that brings the step's metrics. The answer, a ``ControlState``, is read
when the next step has been queued, so nothing waits for it. Where something depends on it, the ranks poll one another.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from hpclm.checkpoint import CheckpointStore
from hpclm.distributed.context import DistributedContext
from hpclm.node.preemption import WARNINGS, Preemption
from hpclm.parallel.async_all_reduce import AsyncAllReduce, Reduction
from hpclm.rundir.control_files import KILL_SWITCH, ControlFiles
from hpclm.rundir.lease import Lease
from hpclm.training.compiling import AgreedCompilations

SIGNALS = tuple(number.name for number in WARNINGS)
STOPS = (None, "stop", KILL_SWITCH)
"""What ends a run for good, by its number in the control vector: a kill switch, which also ends the next start, outranks ``stop``."""


@dataclass(frozen=True)
class ControlState:
    """What all ranks agree on: each has an equal copy."""

    since: Mapping[str, float] = field(default_factory=dict)
    """Seconds since any rank was first warned by a signal, for each signal by its name."""
    stop: str | None = None
    """The request that ends the run for good: "stop" or "kill_switch"."""
    out_of_time: bool = False
    """The attempt has lasted as long as exit_minutes allows, set-up included."""
    save: bool = False
    """A save-now request."""
    written: bool = True
    """Every rank has written its part of the checkpoint that is being saved."""
    minutes: float = 0.0
    """Of rank 0's clock, since training began in this attempt."""
    trained: float = 0.0
    """Seconds of all steps whose results are known, by the slowest rank."""
    micro_batch: float = 0.0
    """Seconds of a micro-batch of the last of them, by the slowest rank; 0 before the first."""
    compiled_unlike: bool = False
    """Some rank can no longer compile what others can."""
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


@dataclass
class StepClock:
    """What this rank's clock says of the steps whose results are known."""

    seconds: float
    """Of all attempts."""
    micro_batch: float = 0.0
    """Seconds of a micro-batch of the last step; 0 before the first."""


@dataclass(frozen=True)
class LocalState:
    """What one rank contributes to a ControlState."""

    context: DistributedContext
    store: CheckpointStore
    preemption: Preemption
    clock: StepClock
    control_files: ControlFiles | None
    """Rank 0's."""
    lease: Lease | None
    """Rank 0's."""
    compilations: AgreedCompilations | None = None
    began: float = field(default_factory=time.monotonic)
    set_up_minutes: float = 0.0
    """From the start of this rank's process to the beginning of training."""

    def _minutes(self) -> float:
        return (time.monotonic() - self.began) / 60

    def values(self) -> dict[str, float]:
        """Numbers of which the greatest of all ranks counts. The prefix keeps them apart from a step's metrics."""
        files = self.control_files
        failed = self.compilations.failed_late() if self.compilations else 0
        values = {
            "uncompiled": failed,
            "least_uncompiled": -failed,
            "writing": not self.store.written(),
            "stop": self.stop(),
            "save": bool(files and files.requested("save-now")),
            "lost": bool(self.lease and self.lease.lost),
            "minutes": self._minutes() if self.context.is_main else 0.0,
            "attempt_minutes": self.set_up_minutes + self._minutes(),
            "trained": self.clock.seconds,
            "micro_batch": self.clock.micro_batch,
            **{name: self.preemption.seconds(name) for name in SIGNALS},
        }
        return {f"control/{name}": float(value) for name, value in values.items()}

    def stop(self, now: bool = False) -> int:
        """The number in STOPS of what is requested; ``now``: look in any case."""
        if self.control_files is None:
            return 0
        stop = self.control_files.requested("stop", now)
        return 2 if self.control_files.requested(KILL_SWITCH) else int(stop)


class ControlSync:
    """All-reduces what the ranks know of signals and requests. Every rank must call it at the same places."""

    def __init__(self, local: LocalState, vector: AsyncAllReduce, exit_minutes: float | None):
        self.local, self.context, self.vector, self.exit_minutes = local, local.context, vector, exit_minutes

    def poll(self) -> ControlState:
        """What holds now; a collective. LockedError on every rank when another attempt has taken the run directory over."""
        values = self.local.values()
        state = self.state(dict(zip(values, self.context.all_reduce_max(*values.values()), strict=True)))
        if state.lost:
            self.context.run_on_main(lambda: self.local.lease.check() if self.local.lease else None)
        if state.since and not state.stop:  # it wins over a signal, and may have been requested since the last look
            state = replace(state, stop=STOPS[int(self.context.all_reduce_max(self.local.stop(now=True))[0])])
        return state

    def start(self, metrics: Mapping[str, float | Tensor]) -> Reduction:
        """Send what this rank knows, and a step's ``metrics``, without waiting; ``state`` reads the answer."""
        self.context.watchdog.tick()
        return self.vector.start({**self.local.values(), **metrics})

    def state(self, answer: Mapping[str, float]) -> ControlState:
        """What an answer says."""
        lasted = answer["control/attempt_minutes"]
        return ControlState(
            since={name: answer[f"control/{name}"] for name in SIGNALS if answer[f"control/{name}"]},
            stop=STOPS[int(answer["control/stop"])],
            out_of_time=self.exit_minutes is not None and lasted >= self.exit_minutes,
            save=bool(answer["control/save"]),
            written=not answer["control/writing"],
            minutes=answer["control/minutes"],
            trained=answer["control/trained"],
            micro_batch=answer["control/micro_batch"],
            compiled_unlike=answer["control/uncompiled"] != -answer["control/least_uncompiled"],
            lost=bool(answer["control/lost"]),
        )
