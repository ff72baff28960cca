"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018).

With hysteresis it behaves like DeepSpeed's and Megatron's; with hysteresis 1 like fairseq's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpclm.config import ScalerConfig


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
        """The saved scale (``vars`` of it), or the initial one if none was saved; within the limits that ``config`` sets now."""
        if not saved:
            return cls.first(config)
        scale = cls(**saved)
        value, hysteresis = max(scale.value, config.minimum), min(scale.hysteresis, config.hysteresis)
        return replace(scale, value=value, hysteresis=hysteresis)

    def after(self, overflow: bool, config: ScalerConfig) -> "LossScale":
        """The scale after a step."""
        if overflow:
            if self.hysteresis > 1:
                return replace(self, hysteresis=self.hysteresis - 1, good_steps=0)
            return LossScale(max(self.value / 2, config.minimum), self.hysteresis)
        good = self.good_steps + 1
        if good >= config.window:  # more than it where a resumed run has lowered scaler.window
            return LossScale(self.value * 2, config.hysteresis)
        return replace(self, good_steps=good, hysteresis=config.hysteresis if config.consecutive else self.hysteresis)
