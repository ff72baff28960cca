"""Where a run ends, by its budgets; and whether that is inside its warm-up."""

from hpclm.base.errors import ConfigError
from hpclm.config.plan import Length
from hpclm.config.schema import RunConfig

MAX_SAMPLES = 2**53 - 1  # samples; larger integers do not mean the same to every program that reads JSON


def run_length(config: RunConfig, samples_per_epoch: int | None, step: int = 0, consumed: int = 0) -> Length:
    """The end of the run by the tightest budget, after ``step`` steps of ``consumed`` samples; ConfigError if it has room for no step.

    ``samples_per_epoch``: None if it is not known, so that epochs do not count.
    """
    budget, plan = config.budget, config.plan(config.parallel.smallest)
    ends = [] if budget.steps is None else [budget.steps]
    samples = {"samples": budget.samples}
    samples["tokens"] = None if budget.tokens is None else budget.tokens // config.model.context
    samples["epochs"] = int(budget.epochs * samples_per_epoch) if budget.epochs and samples_per_epoch else None
    for name, count in samples.items():
        if count is None:
            continue
        ends.append(max(0, step + plan.steps_within(count, consumed)))
        if count < plan.batch_size(0):
            raise ConfigError(
                f"budget.{name}={getattr(budget, name)} is {count} samples of {config.model.context} tokens, "
                f"less than the first step's {plan.batch_size(0)}; raise it, or lower batch.global_size"
            )
    steps = min(ends, default=None)
    length = Length(steps, None if steps is None else plan.samples_after(steps - step, consumed))
    if (length.samples or 0) > MAX_SAMPLES:
        raise ConfigError(
            f"the budget is {length.samples} samples: {steps} steps of batch.global_size={config.batch.global_size}; at most "
            f"{MAX_SAMPLES} samples can be counted, so lower the budget"
        )
    wrong = config.optim.outlasting(length.in_unit(config.optim.unit))
    if wrong:
        raise ConfigError(wrong)
    return length


def inside_warmup(config: RunConfig, length: Length) -> str | None:
    """A warning if the run ends before its warm-up; else None."""
    optim, end = config.optim, length.in_unit(config.optim.unit)
    warmup = optim.warmup or (optim.warmup_fraction or 0) * (optim.schedule_length or end or 0)
    if end is None or warmup < end:
        return None
    return f"the run ends after {end} {optim.unit}, inside its warm-up of {warmup:g} (optim.warmup): optim.lr is never reached"
