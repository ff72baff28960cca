"""Keeps a run stable: loss-spike detection, the reaction to steps that are not finite, and the loss scale of fp16.

A spike is a loss far above the usual one. The usual loss is the median of the last WINDOW steps that were not spikes. The deviation is
1.4826 times the median absolute deviation, an estimate of the standard deviation for normal noise. A step is a spike if its loss exceeds
the usual loss by more than FACTOR deviations and by more than ``rise`` nats. Spikes do not enter the median, so a spike lasts until the
loss recovers, however long that takes. Nothing is flagged before MIN_STEPS steps are known.

All of this depends only on the losses, so it is the same on every rank.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from hpclm.base.errors import DivergedError
from hpclm.config import OptimConfig, ScalerConfig

WINDOW = 100
MIN_STEPS = 8
FACTOR = 10.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Health:
    """Health of a run after a step; stored in checkpoints."""

    loss: float | None = None
    """Loss of the step; None if it was not finite."""
    usual: float | None = None
    deviation: float | None = None
    spiking_since: int | None = None
    """First step of the current spike."""
    skipped_in_a_row: int = 0
    """Latest consecutive steps that were not finite, and so skipped, except while the fp16 loss scale searches for its value."""

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
        if self.spiking_since is None:
            return {}
        return {"spiking_since": self.spiking_since}

    def describe(self) -> str:
        """Description of the problem; "" if healthy."""
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
        """The watch after a step. ``skipped``: whether the step was skipped for another reason than a searching loss scale."""
        in_a_row = self.health.skipped_in_a_row + 1 if skipped else 0
        if not math.isfinite(loss):
            return replace(self, health=replace(self.health, loss=None, skipped_in_a_row=in_a_row))
        before = self.health
        spike = self.rise > 0 and is_spike(loss, before.usual, before.deviation, self.rise)
        since = None
        recent = self.recent
        if spike:  # does not enter ``recent``, or it would become the usual loss after half a window
            since = before.spiking_since or step
        else:
            recent = (*recent, loss)[-WINDOW:]
        usual = before.usual
        deviation = before.deviation
        if len(recent) >= MIN_STEPS:
            usual = median(recent)
            deviation = 1.4826 * median(abs(value - usual) for value in recent)
        return replace(self, health=Health(loss, usual, deviation, since, in_a_row), recent=recent)


def is_spike(loss: float, usual: float | None, deviation: float | None, rise: float) -> bool:
    """Whether ``loss`` is far above the usual loss; False while that is unknown."""
    if usual is None or deviation is None:
        return False
    return loss - usual > max(FACTOR * deviation, rise)


class NonfiniteGuard:
    """Counts skipped steps, logs them and loss spikes, and stops the run if the settings require it."""

    def __init__(self, optim: OptimConfig, skipped: int = 0, health: Health = Health()):
        """``skipped`` and ``health``: from the checkpoint that the run resumes from."""
        self.optim = optim
        self.skipped = skipped
        self._watch = Watch(optim.spike, health)

    @property
    def health(self) -> Health:
        """Health after the last observed step."""
        return self._watch.health

    @property
    def in_a_row(self) -> int:
        """Number of consecutive skipped steps so far."""
        return self.health.skipped_in_a_row

    def observe(self, step: int, loss: float, skipped: bool, searching: bool) -> Health:
        """Record the outcome of a step, and log the beginning and end of a loss spike. ``searching``: the loss scale can still fall."""
        before = self.health
        if not (skipped and searching and math.isfinite(loss)):
            self._watch = self._watch.after(step, loss, skipped)
        now = self.health
        if now.spiking_since is not None and before.spiking_since is None:
            log.warning(
                "%s; until the loss recovers, new checkpoints do not replace older healthy ones; hpclm resume with --from "
                "goes back to one of these",
                now.describe(),
            )
        elif now.spiking_since is None and before.spiking_since is not None:
            log.info(
                "step %d: the loss has recovered to %.4g; the spike began at step %d", step, loss, before.spiking_since
            )
        return now

    def check(self, step: int, loss: float, norm: float, skipped: bool, searching: bool) -> None:
        """Act on an observed step; DivergedError ends the run."""
        if not skipped:
            return
        self.skipped += 1
        if searching and math.isfinite(loss):
            log.info("step %d skipped: fp16 overflow, the loss scale adapts", step)
            return
        what = f"step {step}: loss {loss}, gradient norm {norm}"
        if self.in_a_row >= self.optim.nonfinite_limit:
            count = f"{self.in_a_row} steps in a row were not finite" if self.in_a_row > 1 else "1 step was not finite"
            raise DivergedError(f"{what}; {count} (optim.nonfinite_limit)")
        log.warning("%s; skipped, %d so far", what, self.skipped)

    def check_end(self, step: int, held_out: Iterable[float | None] = ()) -> None:
        """DivergedError if a run that ends at ``step`` has only skipped steps recently: no later step can show a recovery. One skipped
        step is enough if a loss in ``held_out``, on held-out data, is not finite either."""
        enough = min(self.optim.nonfinite_limit, OptimConfig.nonfinite_limit)
        also = ""
        if any(loss is None or not math.isfinite(loss) for loss in held_out):
            enough = 1
            also = "the loss on held-out data is not finite either; "
        if self.in_a_row >= enough:
            raise DivergedError(
                f"the run ends at step {step}, and its last {self.in_a_row} steps were skipped because loss or gradients were not finite; "
                f"{also}the model learned nothing from them, and nothing is saved"
            )


@dataclass(frozen=True)
class LossScale:
    """The scale of the next step, and the counters that decide its next change."""

    value: float
    hysteresis: int
    good_steps: int = 0

    @classmethod
    def first(cls, config: ScalerConfig) -> "LossScale":
        """The initial scale."""
        return cls(config.initial, config.hysteresis)

    @classmethod
    def of(cls, saved: Mapping[str, Any] | None, config: ScalerConfig) -> "LossScale":
        """The saved scale (its `vars`), or the initial one if none was saved; within the current limits of ``config``."""
        if not saved:
            return cls.first(config)
        scale = cls(**saved)
        # current settings apply: a resumed run may have new ones
        value = max(scale.value, config.minimum)
        hysteresis = min(scale.hysteresis, config.hysteresis)
        return replace(scale, value=value, hysteresis=hysteresis)

    def after(self, overflow: bool, config: ScalerConfig) -> "LossScale":
        """The scale after a step."""
        if overflow:
            if self.hysteresis > 1:
                return replace(self, hysteresis=self.hysteresis - 1, good_steps=0)
            return LossScale(max(self.value / 2, config.minimum), self.hysteresis)
        good = self.good_steps + 1
        if good >= config.window:  # above it if a resumed run has lowered scaler.window
            return LossScale(self.value * 2, config.hysteresis)
        hysteresis = config.hysteresis if config.consecutive else self.hysteresis
        return replace(self, good_steps=good, hysteresis=hysteresis)
