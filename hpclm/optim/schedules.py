"""Learning rate and batch size as pure functions of a run's progress.

A schedule is ``f(position, length, optim) -> learning rate`` for positions after the warm-up; positions and lengths are in
``optim.unit`` and ``optim.warmup`` is the resolved length of the warm-up. The formulas are those of Megatron-LM (core, and v1.1.5) and
fairseq, to the last bit where their order of operations decides it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from hpclm.base.registry import function_check, lookup
from hpclm.config import OptimConfig, Plan
from hpclm.config.optim import SCHEDULES
from hpclm.config.phases import Timeline
from hpclm.config.plan import Length, Reading

Shape = Callable[[float, float, OptimConfig], float]
CHECK = function_check("position", "length", "optim")
SHRINK = 0.1  # ratio of the learning rates of successive periods of fairseq_cosine (its --lr-shrink)


@dataclass(frozen=True)
class Schedule:
    """The learning rate and the batch size of each step of a run."""

    optim: OptimConfig
    plan: Plan
    length: Length
    phases: Timeline | None = None
    """The phases of the run, each with its own ``optim``; None without any."""

    def batch_size(self, samples: int) -> int:
        """Samples of the step after ``samples`` samples."""
        return self.plan.batch_size(samples)

    def rate(self, step: int, samples: int) -> float:
        """Learning rate of the step after ``step`` steps and ``samples`` samples."""
        optim = self.optim
        begin = Reading()
        if self.phases:
            optim, begin = self.phases.schedule(samples)
        end = self.length.in_unit(optim.unit)
        before = begin.samples
        position = samples
        amount = self.batch_size(samples)
        if optim.unit == "steps":
            before = begin.step
            position = step
            amount = 1
        return learning_rate(position - before, amount, end and end - before, optim)


def learning_rate(position: float, size: float, length: float | None, optim: OptimConfig) -> float:
    """The rate of the step that begins at ``position`` and advances it by ``size``, in ``optim.unit``.

    ``length`` is the whole budget in that unit, or None if unknown; ``optim.schedule_length`` overrides it.
    """
    end = float(optim.schedule_length or length or 0)
    warmup = float(optim.warmup) if optim.warmup_fraction is None else optim.warmup_fraction * end
    if position < warmup:
        if optim.warmup_start is None:
            return optim.lr * min(position + size, warmup) / warmup
        rise = optim.lr - optim.warmup_start
        if optim.schedule == "fairseq_polynomial":  # fairseq divides first, which changes the last bit
            return optim.warmup_start + rise * (position / warmup)
        return optim.warmup_start + rise * position / warmup
    return shape(optim)(position, end, replace(optim, warmup=warmup, warmup_fraction=None))


def shape(optim: OptimConfig) -> Shape:
    """The function named by ``optim.schedule``."""
    schedule: Shape = lookup("optim.schedule", optim.schedule, SCHEDULES, CHECK)
    return schedule


def constant(position: float, length: float, optim: OptimConfig) -> float:
    """The learning rate stays at lr."""
    return optim.lr


def linear(position: float, length: float, optim: OptimConfig) -> float:
    """Fall in a straight line to min_lr (Megatron-core)."""
    return _between(optim, 1.0 - _done(position, length, optim))


def cosine(position: float, length: float, optim: OptimConfig) -> float:
    """Fall along half a cosine to min_lr (Megatron-core)."""
    return _between(optim, 0.5 * (math.cos(math.pi * _done(position, length, optim)) + 1.0))


def half_cosine(position: float, length: float, optim: OptimConfig) -> float:
    """Fall along the second half of a cosine, from the middle of lr and min_lr to min_lr (OLMo-core): the rest of a longer schedule."""
    return _between(optim, 0.5 * (math.cos(math.pi * 0.5 * (1.0 + _done(position, length, optim))) + 1.0))


def inverse_sqrt(position: float, length: float, optim: OptimConfig) -> float:
    """lr x sqrt(warmup / position), not below min_lr (Megatron-core)."""
    if position > length:
        return optim.min_lr
    return max(optim.min_lr, optim.lr * max(optim.warmup, 1) ** 0.5 / max(position, 1) ** 0.5)


def wsd(position: float, length: float, optim: OptimConfig) -> float:
    """Stay at lr, then fall to min_lr over the last ``wsd_decay`` (warm-up, stable, decay; Megatron-core).

    With ``period``, each period does so, and the next one begins at lr again (WSD-S; Wen et al. 2024).
    """
    if optim.period:
        length = optim.period
        position %= length
    if position > length:
        return optim.min_lr
    decay = optim.wsd_decay or max(1.0, length // 10)
    if position <= length - decay:
        return _between(optim, 1.0)
    done = (position - (length - decay)) / decay
    if optim.wsd_style == "inverse":
        return 1.0 / ((1.0 - done) / optim.lr + done / optim.min_lr)
    shapes = {
        "linear": 1.0 - done,
        "cosine": 0.5 * (math.cos(math.pi * done) + 1.0),
        "exponential": 2.0 * 0.5**done - 1.0,
        "minus_sqrt": 1.0 - math.sqrt(done),
    }
    return _between(optim, shapes[optim.wsd_style])


def megatron1_linear(position: float, length: float, optim: OptimConfig) -> float:
    """Megatron-LM v1.1.5: a line from lr towards 0 at length + warmup, cut off at min_lr."""
    return max(optim.lr * (length - _since(position, length, optim)) / length, optim.min_lr)


def megatron1_cosine(position: float, length: float, optim: OptimConfig) -> float:
    """Megatron-LM v1.1.5: half a cosine from lr towards 0, cut off at min_lr."""
    return max(optim.lr / 2.0 * (math.cos(math.pi * _since(position, length, optim) / length) + 1), optim.min_lr)


def megatron1_exponential(position: float, length: float, optim: OptimConfig) -> float:
    """Megatron-LM v1.1.5: half of lr is lost over the length, cut off at min_lr."""
    return max(optim.lr * math.exp(-0.693 * _since(position, length, optim) / length), optim.min_lr)


def fairseq_polynomial(position: float, length: float, optim: OptimConfig) -> float:
    """fairseq polynomial_decay: (1 - done)^power between lr and min_lr (its end_learning_rate)."""
    if position >= length:
        return optim.min_lr
    left = 1 - (position - optim.warmup) / (length - optim.warmup)
    return (optim.lr - optim.min_lr) * left**optim.power + optim.min_lr


def fairseq_inverse_sqrt(position: float, length: float, optim: OptimConfig) -> float:
    """fairseq inverse_sqrt: lr x sqrt(warmup) / sqrt(position)."""
    return optim.lr * optim.warmup**0.5 * position**-0.5


def fairseq_cosine(position: float, length: float, optim: OptimConfig) -> float:
    """fairseq cosine with periods (Loshchilov and Hutter 2017); with ``restarts`` off it stays at min_lr after the first."""
    period = float(optim.period or max(1.0, length - optim.warmup))
    here = position - optim.warmup
    if not optim.restarts and here >= period:
        return optim.min_lr
    number = math.floor(here / period)
    low, high = (rate * SHRINK**number for rate in (optim.min_lr, optim.lr))
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * (here - period * number) / period))


def _between(optim: OptimConfig, part: float) -> float:
    return optim.min_lr + part * (optim.lr - optim.min_lr)


def _done(position: float, length: float, optim: OptimConfig) -> float:
    """Fraction of the way from the end of the warm-up to the end, at most 1."""
    if position >= length:
        return 1.0
    return (position - optim.warmup) / (length - optim.warmup)


def _since(position: float, length: float, optim: OptimConfig) -> float:
    """Units since the warm-up; like v1.1.5, stops counting one warm-up length before the end."""
    return max(0.0, min(position, length - optim.warmup) - optim.warmup)
