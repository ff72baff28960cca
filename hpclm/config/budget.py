"""How long a run is, in steps and samples: pure arithmetic."""

from dataclasses import dataclass

from hpclm.config.plan import Plan
from hpclm.config.schema import RunConfig
from hpclm.errors import ConfigError


@dataclass(frozen=True)
class Length:
    """Where a run ends; None where only the clock says."""

    steps: int | None
    samples: int | None

    def in_unit(self, unit: str) -> int | None:
        """The length in "steps" or "samples"."""
        return self.steps if unit == "steps" else self.samples


def length(config: RunConfig, plan: Plan, samples_per_epoch: int) -> Length:
    """The first end among the budgets that are set; ConfigError when it comes before the first step."""
    budget = config.budget
    ends = [] if budget.steps is None else [budget.steps]
    samples = {"samples": budget.samples}
    samples["tokens"] = None if budget.tokens is None else budget.tokens // config.model.context
    samples["epochs"] = None if budget.epochs is None else int(budget.epochs * samples_per_epoch)
    for name, count in samples.items():
        if count is None:
            continue
        ends.append(plan.steps_within(count))
        if not ends[-1]:
            raise ConfigError(
                f"budget.{name}={getattr(budget, name)} is {count} samples of {config.model.context} tokens, "
                f"less than the first step's {plan.batch_size(0)}; raise it, or lower batch.global_size"
            )
    steps = min(ends, default=None)
    return Length(steps, None if steps is None else plan.samples_after(steps))
