"""When a run saves and when it exits, decided alike on every rank.

Every step sends what each rank knows (signals, requests, the time, whether a checkpoint has been written) along in the vector
that brings the step's metrics. The answer, a ``ControlState``, is read when the next step has been queued, so nothing waits for
it. Where something depends on it, the ranks synchronize: they wait for the last step, and poll one another.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from hpclm.checkpoint import CheckpointStore, Progress
from hpclm.config import RunConfig
from hpclm.config.plan import Length
from hpclm.distributed.context import DistributedContext
from hpclm.engine import Engine, keep_going
from hpclm.errors import REQUEUE
from hpclm.node.preemption import Preemption
from hpclm.optim.guard import Guard
from hpclm.parallel.async_all_reduce import AsyncAllReduce, Reduction
from hpclm.rundir.control_files import KILL_SWITCH, ControlFiles
from hpclm.rundir.lease import Lease
from hpclm.training.saver import Saver
from hpclm.training.state import SIGNALS, STOPS, ControlState

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0  # between two polls within a step or an evaluation, about
LATE_STEPS = 3  # steps that may pass until a signal is acted on where answers are read late


class StepAbandoned(Exception):
    """The step was not finished: weights and optimizer state are what they were before it."""


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
    began: float = field(default_factory=time.monotonic)

    def values(self) -> dict[str, float]:
        """Numbers of which the greatest of all ranks counts. The prefix keeps them apart from a step's metrics."""
        files = self.control_files
        values = {
            "writing": not self.store.written(),
            "stop": self.stop(),
            "save": bool(files and files.requested("save-now")),
            "lost": bool(self.lease and self.lease.lost),
            "minutes": (time.monotonic() - self.began) / 60 if self.context.is_main else 0.0,
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
        minutes = answer["control/minutes"]
        return ControlState(
            since={name: answer[f"control/{name}"] for name in SIGNALS if answer[f"control/{name}"]},
            stop=STOPS[int(answer["control/stop"])],
            out_of_time=self.exit_minutes is not None and minutes >= self.exit_minutes,
            save=bool(answer["control/save"]),
            written=not answer["control/writing"],
            minutes=minutes,
            trained=answer["control/trained"],
            micro_batch=answer["control/micro_batch"],
            lost=bool(answer["control/lost"]),
        )


class RunControl:
    """Saves and exits, and abandons a step that cannot be finished in time, decided alike on every rank."""

    def __init__(
        self, config: RunConfig, length: Length, engine: Engine, sync: ControlSync, saver: Saver, guard: Guard
    ):
        self.config, self.length, self.engine = config, length, engine
        self.sync, self.saver, self.guard = sync, saver, guard
        self.first_step, self.state = saver.step, ControlState()
        self._save_pending = False
        self._answer: ControlState | None = None
        self._must_synchronize = True
        self._micro_batch = 0.0

    def poll(self) -> None:
        """Poll all ranks for signals and requests, and publish a checkpoint that all have written."""
        self.state = self.sync.poll()
        self._answer, self._must_synchronize = None, False
        self._micro_batch = self.state.micro_batch
        self.saver.poll(self.state)

    def apply(self, answer: ControlState) -> None:
        """Take note of what held on all ranks after the step before the last one."""
        self._answer, self._micro_batch = answer, answer.micro_batch

    def synchronize_soon(self) -> None:
        """Synchronize before the next step."""
        self._must_synchronize = True

    def must_synchronize(self, progress: Progress, micro_batches: int) -> bool:
        """Whether something may have to be done after this step, the next of which has ``micro_batches``."""
        answer = self._answer or ControlState(written=False)
        requested = answer.leaving or answer.save or answer.lost or (answer.written and self.saver.store.pending)
        evaluation = due(self.config.evaluate.every, progress)
        return bool(
            self._must_synchronize or self._save_pending or requested or evaluation or self._ends(progress)
            or self.saver.due(progress, answer) or not self._late_is_early_enough(micro_batches)
        )  # fmt: skip

    def finished(self, progress: Progress) -> bool:
        """Whether the run has used up its budget, or reached ``stop_at``."""
        ends = [end for end in (self.length.steps, self.config.stop_at) if end is not None]
        hours = self.config.budget.hours
        out_of_time = hours is not None and progress.seconds >= hours * 3600
        return out_of_time or any(progress.step >= end for end in ends)

    def exit_is_due(self, progress: Progress) -> bool:
        """Whether the run exits after this step."""
        return self._ends(progress) or bool(self.state.leaving)

    def _ends(self, progress: Progress) -> bool:
        """Whether this attempt was meant to end after this step."""
        interval = due(self.config.exit_interval or 0, progress) and progress.step > self.first_step
        return self.finished(progress) or interval

    def save_if_due(self, progress: Progress, validation: float | None) -> None:
        """Begin a save where one is due. While steps are skipped it waits: what may have diverged must not replace good
        checkpoints. ``validation``: the loss on held-out data after this step, where it was measured."""
        self._save_pending = self._save_pending or self.saver.due(progress, self.state)
        if self._save_pending and not self.guard.in_a_row:
            self.saver.save(self.engine, progress, validation, self.state)
            self._save_pending = False
        if self.state.save and not self._save_pending:
            self._remove("save-now")

    def exit(self, progress: Progress, validation: float | None, unmeasured: bool = False) -> int:
        """Save before the run exits; its exit code. ``unmeasured``: a run that has finished needs another start to be measured."""
        over = self.finished(progress) and not unmeasured
        requeue = bool(self.state.signal and not over and not self.state.stop)
        self.saver.exit(self.engine, progress, validation, self.state, requeue)
        if self.saver.step == progress.step:
            self._remove("save-now")
        if self.state.stop:
            self._remove("stop")
        return REQUEUE if requeue else 0

    def _remove(self, request: str) -> None:
        if self.sync.local.control_files:
            self.sync.local.control_files.remove(request)

    def micro_batches_per_poll(self) -> int:
        """Micro-batches of about POLL_SECONDS; 1 before a step's time is known."""
        return max(1, round(POLL_SECONDS / self._micro_batch)) if self._micro_batch else 1

    def _late_is_early_enough(self, micro_batches: int) -> bool:
        """Whether there is time to save even where all ranks hear of a signal only after another step of so many micro-batches.
        Before a step's time is known, and where steps are long, there is not."""
        late, save = LATE_STEPS * micro_batches * self._micro_batch, self.saver.seconds()
        return late > 0 and not any(save < limit <= save + late for limit in self.saver.limits.values())

    def check_interrupt(self, micro_batches: int) -> Callable[[int], None]:
        """What a step of so many micro-batches calls between two of them, with how many are done.

        It raises StepAbandoned on every rank where the rest of the step, and a save, would take longer than there is.
        """
        if self._late_is_early_enough(micro_batches):
            return keep_going
        began, every = time.monotonic(), self.micro_batches_per_poll()

        def check(done: int) -> None:
            if done % every:
                return
            state = self.sync.poll()
            left, remaining = self.saver.seconds_left(state), micro_batches - done
            if left is None:
                return
            (needed,) = self.sync.context.all_reduce_max((time.monotonic() - began) / done * remaining)
            if needed + self.saver.seconds() < left:
                return
            text = "%s: %.0f s left but the other %d of %d micro-batches may take %.0f s; step abandoned; it will be redone"
            log.warning(text, state.signal, left, remaining, micro_batches, needed)
            raise StepAbandoned

        return check


def due(every: int, progress: Progress) -> bool:
    """Whether something that happens ``every`` steps happens now; 0 is never."""
    return bool(every) and progress.step > 0 and progress.step % every == 0
