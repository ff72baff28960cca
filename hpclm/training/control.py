"""Signals, requests and time limits, agreed on by all ranks; and the steps after which an attempt ends.

Every step sends what its rank knows in the vector that also reduces the step's metrics. The answer is read when the next step has been
queued, so nothing waits for it. Where a decision depends on the newest state, the ranks poll one another.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpclm.checkpoint import CheckpointStore, Progress
from hpclm.config import RunConfig
from hpclm.config.plan import Length
from hpclm.distributed.context import DistributedContext
from hpclm.engine import Engine, StepResult
from hpclm.engine.compiling import AgreedCompilations
from hpclm.node.preemption import WARNINGS, Preemption
from hpclm.parallel.async_all_reduce import AsyncAllReduce, Reduction
from hpclm.parallel.mesh import Compute
from hpclm.rundir.control_files import KILL_SWITCH, ControlFiles
from hpclm.rundir.lease import Lease

SIGNALS = tuple(number.name for number in WARNINGS)
STOPS = (None, "stop", KILL_SWITCH)
"""Requests that end a run for good, by their number in the control vector. A kill switch outranks ``stop``: it also ends the next start."""


@dataclass(frozen=True)
class ControlState:
    """The state that all ranks agree on; each has an equal copy."""

    since: Mapping[str, float] = field(default_factory=dict)
    """Seconds since any rank first received a signal, by the signal's name."""
    stop: str | None = None
    """The request that ends the run for good: "stop" or "kill_switch"."""
    out_of_time: bool = False
    """The attempt has lasted as long as exit_minutes allows, set-up included."""
    save: bool = False
    """A save-now request."""
    written: bool = True
    """Every rank has written its part of the checkpoint that is being saved."""
    minutes: float = 0.0
    """Minutes by rank 0's clock since training began in this attempt."""
    trained: float = 0.0
    """Seconds of all steps with known results, by the slowest rank."""
    micro_batch: float = 0.0
    """Seconds per micro-batch in the last of these steps, by the slowest rank; 0 before the first."""
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


class Control:
    """All-reduces signals, requests and times. Every rank must call its methods at the same places."""

    def __init__(
        self,
        config: RunConfig,
        context: DistributedContext,
        compute: Compute,
        engine: Engine,
        store: CheckpointStore,
        preemption: Preemption,
        lease: Lease | None = None,
        trained: float = 0.0,
    ):
        """``lease``: rank 0's. ``trained``: seconds of the steps of earlier attempts."""
        self.context = context
        self.store = store
        self.preemption = preemption
        self.lease = lease
        self.compilations = AgreedCompilations(engine, context)
        self.control_files = ControlFiles(Path(config.out), config.kill_switch) if context.is_main else None
        self.exit_minutes = math.inf if config.exit_minutes is None else config.exit_minutes
        self.trained = trained
        """Seconds of all attempts' steps with known results, by this rank's clock."""
        self.micro_batch_seconds = 0.0
        """Seconds per micro-batch in the last of these steps, by this rank's clock."""
        self.state = ControlState()
        """The state by the last poll, on which the run acts."""
        self.news: ControlState | None = None
        """A newer state, which came with a step; None after a poll."""
        self._vector = AsyncAllReduce(compute.mesh.world, compute.device)
        self._began = time.monotonic()
        self._set_up_minutes = max(0.0, time.time() - context.began) / 60

    @property
    def micro_batch(self) -> float:
        """Seconds per micro-batch by the slowest rank; 0 before a step's time is known."""
        return (self.news or self.state).micro_batch

    def poll(self) -> ControlState:
        """Agree on the newest state, and act on it from here on; a collective. See ``ask``."""
        self.state = self.ask()
        self.news = None
        return self.state

    def ask(self) -> ControlState:
        """Agree on the newest state; a collective. LockedError on every rank if another attempt has taken the run directory over."""
        values = self._values()
        state = self._state(dict(zip(values, self.context.all_reduce_max(*values.values()), strict=True)))
        if state.lost:
            self.context.run_on_main(lambda: self.lease.check() if self.lease else None)
        if state.since and not state.stop:  # it wins over a signal, and may have been requested since the last look
            state = replace(state, stop=STOPS[int(self.context.all_reduce_max(self._stop(now=True))[0])])
        return state

    def send(self, result: StepResult) -> Reduction:
        """Send what this rank knows, and a step's ``result``, without waiting; ``receive`` takes the answer."""
        self.context.watchdog.tick()
        return self._vector.start({**self._values(), **result.metrics}, result.expert_tokens)

    def receive(self, answer: Mapping[str, float]) -> ControlState:
        """Note the state in the ``answer`` to what every rank has sent with a step."""
        self.news = self._state(answer)
        return self.news

    def remove(self, request: str) -> None:
        """Remove a request that was carried out."""
        if self.control_files:
            self.control_files.remove(request)

    def _values(self) -> dict[str, float]:
        """Values to be max-reduced over all ranks. The prefix keeps them apart from a step's metrics."""
        requests = self.control_files
        failed = self.compilations.failed_late()
        minutes = (time.monotonic() - self._began) / 60
        values = {
            "uncompiled": failed,
            "least_uncompiled": -failed,
            "writing": not self.store.written(),
            "stop": self._stop(),
            "save": bool(requests and requests.requested("save-now")),
            "lost": bool(self.lease and self.lease.lost),
            "minutes": minutes if self.context.is_main else 0.0,
            "attempt_minutes": self._set_up_minutes + minutes,
            "trained": self.trained,
            "micro_batch": self.micro_batch_seconds,
            **{name: self.preemption.seconds(name) for name in SIGNALS},
        }
        return {f"control/{name}": float(value) for name, value in values.items()}

    def _stop(self, now: bool = False) -> int:
        """The number in STOPS of what is requested; ``now``: check the files even if that was done a moment ago."""
        if self.control_files is None:
            return 0
        stop = self.control_files.requested("stop", now)
        return 2 if self.control_files.requested(KILL_SWITCH) else int(stop)

    def _state(self, answer: Mapping[str, float]) -> ControlState:
        """The state that reduced values describe."""
        return ControlState(
            since={name: answer[f"control/{name}"] for name in SIGNALS if answer[f"control/{name}"]},
            stop=STOPS[int(answer["control/stop"])],
            out_of_time=answer["control/attempt_minutes"] >= self.exit_minutes,
            save=bool(answer["control/save"]),
            written=not answer["control/writing"],
            minutes=answer["control/minutes"],
            trained=answer["control/trained"],
            micro_batch=answer["control/micro_batch"],
            compiled_unlike=answer["control/uncompiled"] != -answer["control/least_uncompiled"],
            lost=bool(answer["control/lost"]),
        )


@dataclass(frozen=True)
class Milestones:
    """The steps after which an attempt evaluates, verifies and ends, by its settings."""

    config: RunConfig
    length: Length
    first_step: int
    """The step that the attempt resumes from."""

    def evaluates(self, progress: Progress) -> bool:
        """Whether the model is evaluated after this step."""
        return self.finished(progress) or due(self.config.evaluate.every, progress)

    def verifies(self, progress: Progress) -> bool:
        """Whether this step is one to look for silent corruption after."""
        return due(self.config.cluster.verify_every, progress)

    def finished(self, progress: Progress) -> bool:
        """Whether the run has used up its budget, or reached ``stop_at``."""
        ends = [end for end in (self.length.steps, self.config.stop_at) if end is not None]
        hours = self.config.budget.hours
        out_of_time = hours is not None and progress.seconds >= hours * 3600
        return out_of_time or any(progress.step >= end for end in ends)

    def ends(self, progress: Progress) -> bool:
        """Whether the attempt ends after this step, even without a signal or request."""
        interval = due(self.config.exit_interval or 0, progress) and progress.step > self.first_step
        return self.finished(progress) or interval


def due(every: int, progress: Progress) -> bool:
    """Whether something that happens ``every`` steps happens now; 0 is never."""
    return bool(every) and progress.step > 0 and progress.step % every == 0
