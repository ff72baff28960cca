"""Signals, requests and time limits, on which all ranks agree.

Each step sends this rank's values in the vector that also reduces the step's metrics. The result is read once the next step is queued, so
nothing waits for it. When a decision needs the newest state, the ranks poll one another.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpclm.engine import StepResult
from hpclm.node.preemption import WARNINGS
from hpclm.parallel.async_all_reduce import AsyncAllReduce, Reduction
from hpclm.rundir.control_files import KILL_SWITCH, ControlFiles
from hpclm.training.callbacks import FAILED
from hpclm.training.opening import OpenRun

PREFIX = "control/"  # keeps the control values apart from a step's metrics
SIGNALS = tuple(number.name for number in WARNINGS)
HALF = 2**32 - 1  # mask of 32 bits
CALLBACKS = "train.callbacks"
STOPS = (None, CALLBACKS, "stop", KILL_SWITCH, FAILED)
"""Requests that end a run for good, by their number in the control vector. A kill switch also ends the next start."""


def hash_slots(value: int, replica: int, replicas: int) -> list[float]:
    """[2 x replicas] 0, but for the two halves of the 64-bit ``value`` of this replica.

    The maximum over all ranks has every replica's value, each exact in fp64, although several ranks of a replica send the same.
    """
    slots = [0.0] * (2 * replicas)
    slots[replica] = float(value & HALF)
    slots[replicas + replica] = float(value >> 32)
    return slots


def sum_of_hashes(slots: Sequence[float]) -> str:
    """The sum modulo 2**64 of all replicas' values, 16 hexadecimal digits. ``slots``: of all ranks, reduced."""
    replicas = len(slots) // 2
    low = sum(map(int, slots[:replicas]))
    high = sum(map(int, slots[replicas:]))
    return f"{(low + (high << 32)) % 2**64:016x}"


@dataclass(frozen=True)
class ControlState:
    """State that all ranks have agreed on; every rank has the same values."""

    since: Mapping[str, float] = field(default_factory=dict)
    """Seconds since any rank first received a signal, by the signal's name."""
    stop: str | None = None  # the request that ends the run for good, one of STOPS
    out_of_time: bool = False  # the attempt has lasted exit_minutes, set-up included
    save: bool = False  # a save-now request is pending
    written: bool = True  # no rank is still writing its part of a checkpoint
    minutes: float = 0.0  # of training in this attempt, by rank 0's clock
    trained_seconds: float = 0.0  # all recorded steps of the run, by the slowest rank
    micro_batch_seconds: float = 0.0  # mean in the last recorded step, by the slowest rank; 0 before the first
    lost: bool = False  # another attempt may have taken over the run directory

    @property
    def signal(self) -> str | None:
        """The signal that came first."""
        return max(self.since, key=lambda name: self.since[name], default=None)

    @property
    def leaving(self) -> str | None:
        """Why the run must exit now, in a word or two. A request to stop wins over a signal, after which the run would start again."""
        return self.stop or self.signal or ("exit_minutes" if self.out_of_time else None)


class Control:
    """All-reduces signals, requests and times. Every rank must call its methods at the same points."""

    def __init__(self, run: OpenRun):
        config = run.config
        self.run = run
        self.control_files: ControlFiles | None = None
        if run.context.is_main:
            self.control_files = ControlFiles(run.out, config.kill_switch)
        self.exit_minutes = math.inf if config.exit_minutes is None else config.exit_minutes
        self.own_trained_seconds = run.data.begin.seconds  # all recorded steps of the run, by this rank's clock
        self.own_micro_batch_seconds = 0.0  # mean in the last recorded step, by this rank's clock
        self.state = ControlState()  # by the last ``poll``; a turn of the loop acts on it
        self.news: ControlState | None = None  # brought by a step since the last ``poll``
        self._vector = AsyncAllReduce(run.compute.mesh.world, run.compute.device)
        self._began = time.monotonic()
        self._set_up_minutes = max(0.0, time.time() - run.context.world.began) / 60

    @property
    def micro_batch_seconds(self) -> float:
        """Seconds per micro-batch, by the slowest rank; 0 before a step's time is known."""
        return (self.news or self.state).micro_batch_seconds

    def send(self, result: StepResult) -> Reduction:
        """Start reducing this rank's values and a step's ``result``, without waiting; ``receive`` takes the reduced values."""
        self.run.context.watchdog.tick()
        train = self.run.data.train
        slots = hash_slots(train.hash, train.replica, train.plan.data)
        return self._vector.start({**self._values(), **result.metrics}, result.expert_tokens, slots)

    def receive(self, reduced: Mapping[str, float]) -> ControlState:
        """Store the state that came with a step as ``news``, and return it."""
        self.news = self._state(reduced)
        return self.news

    def poll(self) -> ControlState:
        """Agree on the newest state and store it as ``state``; a collective. See ``ask``."""
        self.state = self.ask()
        self.news = None
        return self.state

    def ask(self) -> ControlState:
        """Agree on the newest state; a collective. LockedError on every rank if another attempt has taken over the run directory."""
        values = self._values()
        state = self._state(dict(zip(values, self.run.context.all_reduce_max(*values.values()), strict=True)))
        if state.lost:
            lease = self.run.lease
            self.run.context.run_on_main(lambda: lease.check() if lease else None)
        if state.since and not state.stop:  # a request to stop wins over a signal, so look at the files once more
            (stop,) = self.run.context.all_reduce_max(self._stop(now=True))
            state = replace(state, stop=STOPS[int(stop)])
        return state

    def remove(self, request: str) -> None:
        """Remove a request that was carried out."""
        if self.control_files:
            self.control_files.remove(request)
        if self.run.callbacks:
            self.run.callbacks.requests.discard(request.removesuffix("-now"))

    def _values(self) -> dict[str, float]:
        """Values to be max-reduced over all ranks."""
        minutes = (time.monotonic() - self._began) / 60
        values = {
            "writing": not self.run.store.written(),
            "stop": self._stop(),
            "save": self.control_files is not None
            and (self.control_files.requested("save-now") or "save" in self._of_callbacks),
            "lost": self.run.lease is not None and self.run.lease.lost,
            "minutes": minutes if self.run.context.is_main else 0.0,
            "attempt_minutes": self._set_up_minutes + minutes,
            "trained_seconds": self.own_trained_seconds,
            "micro_batch_seconds": self.own_micro_batch_seconds,
            **{name: self.run.preemption.seconds(name) for name in SIGNALS},
        }
        return {PREFIX + name: float(value) for name, value in values.items()}

    @property
    def _of_callbacks(self) -> set[str]:
        """The pending requests of this rank's callbacks."""
        return self.run.callbacks.requests if self.run.callbacks else set()

    def _stop(self, now: bool = False) -> int:
        """The index in STOPS of the pending request. ``now``: look at the files even if they were checked a moment ago."""
        if self.control_files is None:
            return 0
        pending = {
            FAILED: FAILED in self._of_callbacks,
            "stop": self.control_files.requested("stop", now),
            KILL_SWITCH: self.control_files.requested(KILL_SWITCH),
            CALLBACKS: "stop" in self._of_callbacks,
        }
        return max((STOPS.index(name) for name, is_pending in pending.items() if is_pending), default=0)

    def _state(self, reduced: Mapping[str, float]) -> ControlState:
        """The state that reduced values describe."""
        values = {name.removeprefix(PREFIX): value for name, value in reduced.items() if name.startswith(PREFIX)}
        return ControlState(
            since={name: values[name] for name in SIGNALS if values[name]},
            stop=STOPS[int(values["stop"])],
            out_of_time=values["attempt_minutes"] >= self.exit_minutes,
            save=bool(values["save"]),
            written=not values["writing"],
            minutes=values["minutes"],
            trained_seconds=values["trained_seconds"],
            micro_batch_seconds=values["micro_batch_seconds"],
            lost=bool(values["lost"]),
        )
