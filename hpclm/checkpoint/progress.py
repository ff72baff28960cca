"""How far a run has trained."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpclm.optim.health import Health


@dataclass(frozen=True)
class Progress:
    """How far a run has trained: its only training state outside the engine."""

    step: int = 0
    samples: int = 0  # consumed
    seconds: float = 0.0  # of training, over all attempts
    skipped: int = 0  # steps that were skipped as not finite
    planned: int | None = None  # samples that the sample order was built for
    health: Health = field(default_factory=Health)

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "Progress":
        """Progress from a checkpoint."""
        return cls(**{**saved, "health": Health.of(saved.get("health"))})
