"""Several runs in order: the best first."""

import math
from dataclasses import dataclass

from hpclm.reporting import curves
from hpclm.reporting.curves import Runs
from hpclm.reporting.history import History


@dataclass(frozen=True)
class Standing:
    """How far a run got."""

    name: str
    best: float | None
    """The lowest validation loss, nats per token."""
    best_step: int | None
    training: float | None
    """Mean training loss of the last ``over`` steps, nats per token; None where the run diverged."""
    over: int
    diverged: int | None
    """The step from which on it was not healthy."""

    @property
    def key(self) -> tuple[bool, bool, float]:
        """Sorts by validation loss, then by training loss; runs that diverged come last."""
        figure = self.training if self.best is None else self.best
        return self.diverged is not None, self.best is None, math.inf if figure is None else figure


def ranked(runs: Runs) -> list[Standing]:
    """All runs, the best first."""
    limit = curves.ceiling(runs)
    return sorted((standing(name, history, limit) for name, history in runs.items()), key=lambda each: each.key)


def ordered(runs: Runs) -> Runs:
    """The runs, the best first: the order of their colours."""
    return {each.name: runs[each.name] for each in ranked(runs)}


def standing(name: str, history: History, limit: float) -> Standing:
    """How a run stands; ``limit``: the highest healthy loss."""
    diverged = curves.diverged(history, limit)
    held_out = [(loss, step) for step, loss in curves.validation(history).items() if loss is not None]
    best, step = min(held_out, default=(None, None))
    losses = [row["loss"] for row in history.recent if row.get("loss") is not None]
    training = sum(losses) / len(losses) if losses and diverged is None else None
    return Standing(name, best, step, training, len(losses), diverged)
