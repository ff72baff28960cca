"""Rank runs by their losses, and find the runs that diverged."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np

from hpclm.base.errors import ExitCode
from hpclm.reporting.history import History

TAIL = 5  # a run diverged if at least this many steps at its end have no healthy loss
Runs = Mapping[str, History]


@dataclass(frozen=True)
class Standing:
    """The result of a run."""

    name: str
    best: float | None
    """The lowest validation loss, in nats per token."""
    best_step: int | None
    training: float | None
    """The mean training loss of the last ``over`` steps, in nats per token; None if the run diverged."""
    over: int
    diverged: int | None
    """The first step after the last healthy loss, if the run diverged."""
    bits_per_byte: float | None = None
    """On the validation data at ``best_step``; None if unknown."""

    def key(self, by_bits: bool) -> tuple[bool, bool, float]:
        """Sort key: by validation loss, or its bits per byte, or else by training loss; diverged runs come last."""
        best = self.bits_per_byte if by_bits else self.best
        losses = [loss for loss in (best, self.training, math.inf) if loss is not None]
        return self.diverged is not None, self.best is None, losses[0]


def ranked(runs: Runs) -> list[Standing]:
    """All runs, the best first. With different tokenizers, only bits per byte compare."""
    limit = healthy_limit(runs)
    standings = [_standing(name, history, limit) for name, history in runs.items()]
    by_bits = have_bits(standings)
    return sorted(standings, key=lambda entry: entry.key(by_bits))


def have_bits(standings: Sequence[Standing]) -> bool:
    """Whether every run with a validation loss has bits per byte, and there is such a run."""
    measured = [entry.bits_per_byte for entry in standings if entry.best is not None]
    return bool(measured) and None not in measured


def healthy_limit(runs: Runs) -> float:
    """The highest healthy loss: 10 % above the median run's first losses, or above its median loss if that is higher."""
    losses = [history.steps["loss"] for history in runs.values()]
    finite = [values[np.isfinite(values)] for values in losses if np.isfinite(values).any()]
    if not finite:
        return math.inf
    began = median_low([float(values[:3].max()) for values in finite])
    usual = median_low([_median(values) for values in finite])
    return 1.1 * max(began, usual)


def diverged(history: History, limit: float) -> int | None:
    """The first step after the last loss that was finite and at most ``limit``; None if the run did not diverge."""
    healthy = np.flatnonzero(history.steps["loss"] <= limit)
    tail = len(history.steps)
    if len(healthy):
        tail -= int(healthy[-1]) + 1
    stopped = bool(history.attempts) and history.attempts[-1].code == ExitCode.DIVERGED
    if tail >= TAIL or (stopped and tail):
        return int(history.steps["step"][-tail])
    return None


def validation(history: History, figure: str = "validation_loss") -> dict[int, float | None]:
    """Step -> a figure of evaluations, averaged over its parts; None if that of any part is unknown or not finite."""
    by_step: dict[int, list[float | None]] = {}
    for row in history.evaluations:
        by_step.setdefault(row["step"], []).append(row.get(figure))
    means: dict[int, float | None] = {}
    for step, losses in by_step.items():
        finite = [loss for loss in losses if loss is not None]
        means[step] = sum(finite) / len(finite) if len(finite) == len(losses) else None
    return means


def _standing(name: str, history: History, limit: float) -> Standing:
    since = diverged(history, limit)
    measured = [(loss, step) for step, loss in validation(history).items() if loss is not None]
    best, step = min(measured, default=(None, None))
    losses = [row["loss"] for row in history.recent if row.get("loss") is not None]
    training = sum(losses) / len(losses) if losses and since is None else None
    bits = None if step is None else validation(history, "validation_bits_per_byte")[step]
    return Standing(name, best, step, training, len(losses), since, bits)


def _median(values: np.ndarray) -> float:
    """The lower median, without sorting: there may be millions of values."""
    middle = (len(values) - 1) // 2
    return float(np.partition(values, middle)[middle])
