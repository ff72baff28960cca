"""Loss-spike detection: whether a run's loss is where it usually is, and its steps change the weights.

The usual loss is the median of the last WINDOW steps that were not spikes. The deviation is 1.4826 times the median absolute
deviation, an estimate of the standard deviation for normal noise. A step is a spike if its loss exceeds the usual loss by
more than FACTOR deviations and by more than ``rise`` nats. Spikes do not enter the median, so a spike lasts until the loss
recovers, however long that takes. Nothing is flagged before LEAST steps are known.

All of this depends only on the losses, so it is the same on every rank.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

WINDOW = 100
LEAST = 8
FACTOR = 10.0


@dataclass(frozen=True)
class Health:
    """Health of a run after a step; stored in checkpoints."""

    loss: float | None = None
    """Of the step; None if it was not finite."""
    usual: float | None = None
    deviation: float | None = None
    spiking_since: int | None = None
    """First step of the spike that the run is in."""
    skipped_in_a_row: int = 0
    """Consecutive steps up to this one that were skipped because loss or gradients were not finite; not counting those
    skipped while the fp16 loss scale searches for its value."""

    @classmethod
    def of(cls, saved: Any) -> "Health":
        """Health from a checkpoint; healthy if the checkpoint has no valid record."""
        if not isinstance(saved, Mapping):
            return cls()
        fields: dict[str, Any] = {}
        for name in ("loss", "usual", "deviation"):
            value: Any = saved.get(name)
            if type(value) in (int, float) and abs(value) < 1e300:
                fields[name] = float(value)
        for name in ("spiking_since", "skipped_in_a_row"):
            value = saved.get(name)
            if type(value) is int and value >= 0:
                fields[name] = value
        return cls(**fields)

    @property
    def good(self) -> bool:
        """Whether a checkpoint of this state is healthy."""
        return self.spiking_since is None and not self.skipped_in_a_row

    def row(self) -> dict[str, int]:
        """The fields for metrics.jsonl."""
        return {} if self.spiking_since is None else {"spiking_since": self.spiking_since}

    def describe(self) -> str:
        """What is wrong, in words; "" if healthy."""
        said = []
        if self.spiking_since is not None:
            now = "not finite" if self.loss is None else f"{self.loss:.4g}"
            usual = "" if self.usual is None else f", usually {self.usual:.4g}"
            said.append(f"loss spike since step {self.spiking_since}: {now}{usual}")
        if self.skipped_in_a_row:
            many = self.skipped_in_a_row
            said.append(f"the last {many} steps were skipped" if many > 1 else "the last step was skipped")
        return "; ".join(said)


@dataclass(frozen=True)
class Watch:
    """Tracks health from step to step."""

    rise: float
    """Nats; 0: no spike detection."""
    health: Health = Health()
    recent: tuple[float, ...] = ()
    """Losses of the last steps that were not spikes."""

    def after(self, step: int, loss: float, skipped: bool) -> "Watch":
        """The watch after a step; ``skipped``: it was skipped, and not because the loss scale is searching."""
        in_a_row = self.health.skipped_in_a_row + 1 if skipped else 0
        if not math.isfinite(loss):
            return replace(self, health=replace(self.health, loss=None, skipped_in_a_row=in_a_row))
        before = self.health
        spike = self.rise > 0 and is_spike(loss, before.usual, before.deviation, self.rise)
        since = (before.spiking_since or step) if spike else None
        recent = self.recent if spike else (*self.recent, loss)[-WINDOW:]
        usual, deviation = before.usual, before.deviation
        if len(recent) >= LEAST:
            usual = median(recent)
            deviation = 1.4826 * median(abs(each - usual) for each in recent)
        return replace(self, health=Health(loss, usual, deviation, since, in_a_row), recent=recent)


def is_spike(loss: float, usual: float | None, deviation: float | None, rise: float) -> bool:
    """Whether ``loss`` is far above the usual loss; False while that is unknown."""
    if usual is None or deviation is None:
        return False
    return loss - usual > max(FACTOR * deviation, rise)
