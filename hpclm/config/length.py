"""Where a run's budgets end it, and whether its warm-up is over by then."""

from hpclm.base.errors import ConfigError
from hpclm.config.plan import Length
from hpclm.config.schema import RunConfig

MAX_SAMPLES = 2**53 - 1  # programs that read JSON numbers as floats round larger integers


def run_length(config: RunConfig, samples_per_epoch: int | None, step: int = 0, consumed: int = 0) -> Length:
    """The end of the run by its tightest budget, after ``step`` steps with ``consumed`` samples.

    ``samples_per_epoch``: None if unknown; budget.epochs then sets no end. ConfigError if the budget has room for no step.
    """
    budget = config.budget
    plan = config.plan(config.parallel.smallest)
    samples: dict[str, int] = {}
    if budget.samples is not None:
        samples["samples"] = budget.samples
    if budget.tokens is not None:
        samples["tokens"] = budget.tokens // config.model.context
    if budget.epochs and samples_per_epoch:
        samples["epochs"] = int(budget.epochs * samples_per_epoch)
    for name, count in samples.items():
        if count < plan.batch_size(0):
            raise ConfigError(
                f"budget.{name}={getattr(budget, name)} is {count} samples of {config.model.context} tokens, "
                f"less than the first step's {plan.batch_size(0)}; raise it, or lower batch.global_size"
            )
    ends = [max(0, step + plan.steps_within(count, consumed)) for count in samples.values()]
    if budget.steps is not None:
        ends.append(budget.steps)
    if not ends:
        return Length(None, None)
    steps = min(ends)
    end = plan.samples_after(steps - step, consumed)
    if end > MAX_SAMPLES:
        raise ConfigError(
            f"the budget is {end} samples: {steps} steps of batch.global_size={config.batch.global_size}; at most "
            f"{MAX_SAMPLES} samples can be counted, so lower the budget"
        )
    length = Length(steps, end)
    wrong = config.optim.outlasting(length.in_unit(config.optim.unit))
    if wrong:
        raise ConfigError(wrong)
    return length


def inside_warmup(config: RunConfig, length: Length) -> str | None:
    """A warning if the run ends before its warm-up does; else None."""
    optim = config.optim
    end = length.in_unit(optim.unit)
    warmup = optim.warmup or (optim.warmup_fraction or 0) * (optim.schedule_length or end or 0)
    if end is None or warmup < end:
        return None
    return f"the run ends after {end} {optim.unit}, inside its warm-up of {warmup:g} (optim.warmup): optim.lr is never reached"
