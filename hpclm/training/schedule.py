"""The learning rate and the batch of a step, and what other settings make of them when a run resumes."""

import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpclm.checkpoint import Progress
from hpclm.config import OptimConfig, Plan, RunConfig, compose
from hpclm.config.length import run_length
from hpclm.config.plan import Length
from hpclm.errors import ConfigError
from hpclm.optim.schedules import learning_rate

log = logging.getLogger(__name__)
SAME = 1e-9  # relative difference of learning rates that only rounding makes


@dataclass(frozen=True)
class Schedule:
    """What the learning rate and the size of each batch follow."""

    optim: OptimConfig
    plan: Plan
    length: Length

    def batch_size(self, progress: Progress) -> int:
        """Samples of the next step."""
        return self.plan.batch_size(progress.samples)

    def rate(self, progress: Progress) -> float:
        """Learning rate of the next step."""
        by_step = self.optim.unit == "steps"
        position, amount = (progress.step, 1) if by_step else (progress.samples, self.batch_size(progress))
        return learning_rate(position, amount, self.length.in_unit(self.optim.unit), self.optim)


def of_attempt(out: Path, attempt: Mapping[str, Any], samples_per_epoch: int, progress: Progress) -> Schedule | None:
    """What an earlier attempt of the run would follow from ``progress`` on; None if its settings cannot be read."""
    with suppress(ConfigError, KeyError, TypeError):
        config: RunConfig = compose.of_run(out, [], attempt["config"])
        length = run_length(config, samples_per_epoch, progress.step, progress.samples)
        return Schedule(config.optim, config.plan(attempt["size"]), length)
    return None


def tell_changes(before: Schedule, now: Schedule, progress: Progress) -> None:
    """Warn of another learning rate or batch in the next step than the settings of the last attempt give, and of another end."""
    step, changes = progress.step + 1, []
    old, new = before.rate(progress), now.rate(progress)
    if not math.isclose(old, new, rel_tol=SAME):
        direction = "rises" if new > old else "falls"
        changes.append(f"the learning rate of step {step} {direction} from {old:.4g} to {new:.4g}")
    sizes = before.batch_size(progress), now.batch_size(progress)
    if sizes[0] != sizes[1]:
        changes.append(f"the batch of step {step} changes from {sizes[0]} to {sizes[1]} samples")
    if changes:
        ends = [_end(schedule.length) for schedule in (before, now)]
        end = f"; the run ends {ends[1]} instead of {ends[0]}" if ends[0] != ends[1] else ""
        log.warning("with the settings of the last attempt replaced, %s%s", " and ".join(changes), end)


def _end(length: Length) -> str:
    return "when its time is up" if length.steps is None else f"at step {length.steps}"
