"""When a run saves and when it exits, decided alike on every rank; and what follows a signal that comes during a long step.

Every step sends what each rank knows of signals, requests and the time along in the vector that brings the step's metrics. The answer,
a ``ControlState``, is read when the next step has been queued, so nothing waits for it. Where something depends on it, the ranks poll
one another.
"""

import logging
import math
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from hpclm.checkpoint import CheckpointStore, Progress
from hpclm.config import CheckpointConfig
from hpclm.engine import Engine, StepResult
from hpclm.engine.compiling import AgreedCompilations
from hpclm.engine.state import UnsavableStateError
from hpclm.errors import ExitCode, HpclmError, LockedError
from hpclm.node.preemption import WARNINGS, Preemption
from hpclm.optim.stability import NonfiniteGuard
from hpclm.parallel.async_all_reduce import AsyncAllReduce, Reduction
from hpclm.rundir.control_files import KILL_SWITCH, ControlFiles
from hpclm.rundir.lease import Lease
from hpclm.training.run_context import RunContext
from hpclm.training.run_state import RunState

log = logging.getLogger(__name__)
LATE_STEPS = 3  # steps that may pass until a signal is acted on where answers are read late
MARGIN = 1.5  # a save may take so much longer than the longest one before
LONG = 2.0  # seconds that a step goes on after a signal until the log says what follows
LATE = 5.0  # seconds beyond the time that a signal leaves until the step is given up
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


class ControlSync:
    """All-reduces what the ranks know of signals and requests. Every rank must call it at the same places."""

    def __init__(self, run: RunContext, state: RunState, lease: Lease | None, preemption: Preemption):
        """``lease``: rank 0's."""
        self.context, self.store, self.lease, self.preemption = run.distributed, state.store, lease, preemption
        self.compilations = AgreedCompilations(state.engine, self.context)
        self.control_files = ControlFiles(run.out, run.config.kill_switch) if self.context.is_main else None
        self.vector = AsyncAllReduce(run.compute.mesh.world, run.compute.device)
        self.exit_minutes = math.inf if run.config.exit_minutes is None else run.config.exit_minutes
        self.trained, self.micro_batch = state.data.begin.seconds, 0.0
        """Seconds by this rank's clock: of all attempts' steps whose results are known; of a micro-batch of the last of them."""
        self._began, self._set_up_minutes = time.monotonic(), max(0.0, time.time() - self.context.began) / 60

    def values(self) -> dict[str, float]:
        """Numbers of which the greatest of all ranks counts. The prefix keeps them apart from a step's metrics."""
        requests, failed = self.control_files, self.compilations.failed_late()
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
            "micro_batch": self.micro_batch,
            **{name: self.preemption.seconds(name) for name in SIGNALS},
        }
        return {f"control/{name}": float(value) for name, value in values.items()}

    def _stop(self, now: bool = False) -> int:
        """The number in STOPS of what is requested; ``now``: look in any case."""
        if self.control_files is None:
            return 0
        stop = self.control_files.requested("stop", now)
        return 2 if self.control_files.requested(KILL_SWITCH) else int(stop)

    def remove(self, request: str) -> None:
        """A request has been granted."""
        if self.control_files:
            self.control_files.remove(request)

    def poll(self) -> ControlState:
        """What holds now; a collective. LockedError on every rank when another attempt has taken the run directory over."""
        values = self.values()
        state = self.state(dict(zip(values, self.context.all_reduce_max(*values.values()), strict=True)))
        if state.lost:
            self.context.run_on_main(lambda: self.lease.check() if self.lease else None)
        if state.since and not state.stop:  # it wins over a signal, and may have been requested since the last look
            state = replace(state, stop=STOPS[int(self.context.all_reduce_max(self._stop(now=True))[0])])
        return state

    def start(self, result: StepResult) -> Reduction:
        """Send what this rank knows, and a step's ``result``, without waiting; ``state`` reads the answer."""
        self.context.watchdog.tick()
        return self.vector.start({**self.values(), **result.metrics}, result.expert_tokens)

    def state(self, answer: Mapping[str, float]) -> ControlState:
        """What an answer says."""
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


class Saver:
    """Saves a run, in the background or before it exits; one save is on its way at once, and one that fails costs no training."""

    def __init__(
        self,
        store: CheckpointStore,
        settings: CheckpointConfig,
        warn_seconds: float | None = None,
        begin: Progress = Progress(),  # noqa: B008 (it is immutable)
        samples_per_save: float = math.inf,
        flush: Callable[[], None] = lambda: None,
    ):
        """``warn_seconds``: job.warn_seconds. ``begin``: where the run resumes, which is saved. ``samples_per_save``: what
        checkpoint.epochs asks for. ``flush``: called on rank 0 just before a checkpoint is published."""
        self.store, self.settings, self.samples_per_save, self.flush = store, settings, samples_per_save, flush
        self.step = begin.step
        """The newest that is saved."""
        grace = settings.grace_seconds
        self.limits = dict(SIGTERM=grace, SIGUSR1=warn_seconds or grace, SIGUSR2=warn_seconds or grace)
        """Seconds from a signal to the end of this process; nothing follows a Ctrl-C."""
        self._passes = int(begin.samples / samples_per_save)
        self._minutes = self._longest = self._began = self._stalled = 0.0

    def due(self, progress: Progress, state: ControlState) -> bool:
        """Whether the state after this step is to be saved, and is not yet."""
        if not self.settings.enabled:
            return False
        pending = self.store.pending
        newest = pending.progress.step if pending else self.step
        return progress.step > newest and (self._regular(progress, state) or state.save)

    def _regular(self, progress: Progress, state: ControlState) -> bool:
        """Whether checkpoint.every, checkpoint.minutes or checkpoint.epochs ask for a save now."""
        minutes = self.settings.minutes
        timed = minutes is not None and state.minutes - self._minutes >= minutes
        ends_pass = int(progress.samples / self.samples_per_save) > self._passes
        return timed or ends_pass or due(self.settings.every, progress)

    def save(self, engine: Engine, progress: Progress, validation: float | None, state: ControlState) -> None:
        """Save. A failure is logged, and training continues with the earlier checkpoints."""
        self._minutes, self._passes = state.minutes, int(progress.samples / self.samples_per_save)
        with self._failures_logged():
            self._begin(engine, progress, validation, self.settings.background)
        if not self.settings.background:
            self.wait()

    def wait(self) -> None:
        """Wait for what is on its way, and publish it; every rank must come here. A failure is logged."""
        if self.store.pending:
            with self._failures_logged():
                self._commit()

    @contextmanager
    def _failures_logged(self) -> Iterator[None]:
        try:
            yield
        except (LockedError, UnsavableStateError):
            raise
        except HpclmError as error:
            log.error("%s; training continues; the checkpoints before it are untouched", error)

    def exit(
        self, engine: Engine, progress: Progress, validation: float | None, state: ControlState, again: bool = False
    ) -> None:
        """Save before the run exits, where there is time for it.

        HpclmError when it was and the save failed, unless the run is started ``again``: then that costs some steps, and no run.
        """
        self.wait()
        if progress.step <= self.step or not self.settings.enabled:
            return
        left = self.seconds_left(state)
        if left is not None and self.seconds() > left:
            text = "%s: %.0f s left but saving may take %.1f s; exiting without saving; steps %d to %d will be repeated"
            log.error(text, state.signal, max(left, 0.0), self.seconds(), self.step + 1, progress.step)
            return
        # where nothing else saves, saves at exit are the regular ones
        often = self.settings.every > 0 or self.settings.minutes is not None or self.settings.epochs is not None
        why = state.leaving if often and not self._regular(progress, state) else None
        try:
            self._begin(engine, progress, validation, background=False, why=why)
            self._commit()
        except HpclmError as error:
            if isinstance(error, (LockedError, UnsavableStateError)) or not again:
                raise
            log.error("%s; the steps after %d will be repeated", error, self.step)

    def seconds(self) -> float:
        """Seconds that a save may take; 0 before the first."""
        return self._longest * MARGIN

    def seconds_left(self, state: ControlState) -> float | None:
        """Seconds until this process is killed; None if no signal announced it."""
        limits, since = self.limits, state.since
        return min((limits[name] - passed for name, passed in since.items() if name in limits), default=None)

    def _begin(
        self, engine: Engine, progress: Progress, validation: float | None, background: bool, why: str | None = None
    ) -> None:
        self._began = time.monotonic()
        if self.store.pending:
            text = "step %d is still being written: training waits; save less often, or to a faster disk"
            log.warning(text, self.store.pending.progress.step)
            self.wait()
        self.store.begin(engine, progress, validation, background, why)
        self._stalled = time.monotonic() - self._began

    def _commit(self) -> None:
        pending = self.store.pending
        assert pending is not None
        self.store.commit(self.flush)
        self.step, health = pending.progress.step, pending.progress.health
        # all ranks decide alike what there is time for
        (seconds,) = self.store.context.all_reduce_max(time.monotonic() - self._began)
        self._longest = max(self._longest, seconds)
        log.info("saved step %d in %.2f s; training waited %.2f s", self.step, seconds, min(self._stalled, seconds))
        if not health.good:
            log.warning("step %d is saved, and does not replace healthy checkpoints: %s", self.step, health.describe())


class RunControl:
    """When the ranks must agree on something, what is due then, and whether the run exits; decided alike on every rank."""

    def __init__(self, run: RunContext, state: RunState, sync: ControlSync, saver: Saver):
        self.run, self.config, self.length, self.engine = run, run.config, state.data.length, state.engine
        self.guard = NonfiniteGuard(run.config.optim, state.data.begin.skipped, state.data.begin.health)
        self.sync, self.saver, self.first_step, self.state = sync, saver, saver.step, ControlState()
        self._save_pending = self._announced = False
        self._answer: ControlState | None = None
        self._must_synchronize = True
        self.micro_batch = 0.0
        """Seconds of a micro-batch by the slowest rank; 0 before a step's time is known."""

    def poll(self) -> None:
        """Poll all ranks for signals and requests, and publish a checkpoint that all have written."""
        self.state = self.sync.poll()
        self._answer, self._must_synchronize = None, False
        self.micro_batch = self.state.micro_batch
        if self.state.written:
            self.saver.wait()

    def apply(self, answer: ControlState) -> None:
        """Take note of what held on all ranks after the step before the last one."""
        self._answer, self.micro_batch = answer, answer.micro_batch

    def synchronize_soon(self) -> None:
        """Synchronize before the next step."""
        self._must_synchronize = True

    def must_synchronize(self, progress: Progress, micro_batches: int) -> bool:
        """Whether something may have to be done after this step, the next of which has ``micro_batches``."""
        answer = self._answer or ControlState(written=False)
        requested = answer.leaving or answer.save or answer.lost or (answer.written and self.saver.store.pending)
        return bool(
            self._must_synchronize or self._save_pending or requested or self._ends(progress)
            or due(self.config.evaluate.every, progress)
            or self.saver.due(progress, answer) or not self.can_check_signals_late(micro_batches)
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

    def saves_now(self, progress: Progress) -> bool:
        """Whether this turn saves the state after this step, unless it lacks the time."""
        if self.exit_is_due(progress):
            return self.saver.settings.enabled and progress.step > self.saver.step
        self._save_pending = self._save_pending or self.saver.due(progress, self.state)
        return self._save_pending and not self.guard.in_a_row

    def save_if_due(self, progress: Progress, validation: float | None) -> None:
        """Begin a save where one is due. While steps are skipped it waits: what may have diverged must not replace good
        checkpoints. ``validation``: the loss on held-out data after this step, where it was measured."""
        if self.saves_now(progress):
            self.saver.save(self.engine, progress, validation, self.state)
            self._save_pending = False
        if self.state.save and not self._save_pending:
            if not self.saver.settings.enabled:
                log.warning("request to save: checkpoint.enabled=false, so nothing is saved")
            self.sync.remove("save-now")

    def exit(self, progress: Progress, validation: float | None, unmeasured: bool = False) -> int:
        """Save before the run exits; its exit code. ``unmeasured``: a run that has finished needs another start to be measured."""
        over = self.finished(progress) and not unmeasured
        requeue = bool(self.state.signal and not over and not self.state.stop)
        self.saver.exit(self.engine, progress, validation, self.state, requeue)
        if self.saver.step == progress.step:
            self.sync.remove("save-now")
        if self.state.stop:
            self.sync.remove("stop")
        return ExitCode.REQUEUE if requeue else ExitCode.DONE

    def can_check_signals_late(self, micro_batches: int) -> bool:
        """Whether there is time to save even where all ranks hear of a signal only after another step of so many micro-batches.
        Before a step's time is known, and where steps are long, there is not."""
        late, save = LATE_STEPS * micro_batches * self.micro_batch, self.saver.seconds()
        return late > 0 and not any(save < limit <= save + late for limit in self.saver.limits.values())

    def watch_signals(self) -> None:
        """Say what follows a signal, once, or end this process, if a step goes on all the time that the signal leaves.

        The watchdog's thread calls this again and again: the main thread is in the step, perhaps inside a library that runs no Python.
        """
        watchdog, limits = self.run.distributed.watchdog, self.saver.limits
        since = {name: self.sync.preemption.seconds(name) for name in SIGNALS}
        name = max(since, key=lambda name: since[name])
        if not since[name] or not watchdog.in_step:
            return
        for late, limit in limits.items():
            if since.get(late, 0) > limit + LATE:
                watchdog.end(
                    f"{late}: step {watchdog.step} has gone on for {since[late]:.0f} s since, and {self._setting(late)} has "
                    f"passed: exiting without saving; the steps after {self.saver.step} will be repeated"
                )
        if since[name] >= LONG and not self._announced:
            self._announced = True
            left = f" within {self._setting(name)}" if name in limits else ""
            end = f"hpclm cancel --now {shlex.quote(str(self.run.out))}"
            sooner = "press Ctrl-C again" if name == signal.SIGINT.name else end
            text = "%s: once step %d ends%s, the run saves, if there is time, and exits; to end it sooner, without saving: %s"
            log.warning(text, name, watchdog.step, left, sooner)

    def _setting(self, name: str) -> str:
        """The setting that says how many seconds the signal leaves."""
        warned = self.config.job.warn_seconds if name != signal.SIGTERM.name else None
        grace = f"checkpoint.grace_seconds={self.config.checkpoint.grace_seconds:g}"
        return f"job.warn_seconds={warned}" if warned else grace


def due(every: int, progress: Progress) -> bool:
    """Whether something that happens ``every`` steps happens now; 0 is never."""
    return bool(every) and progress.step > 0 and progress.step % every == 0
