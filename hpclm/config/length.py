"""Where a run's budgets end it, and whether its warm-up is over by then."""

from hpclm.base.errors import ConfigError
from hpclm.config.phases import Timeline
from hpclm.config.plan import Length, Position
from hpclm.config.schema import RunConfig

MAX_SAMPLES = 2**53 - 1  # programs that read JSON numbers as floats round larger integers


def run_length(config: RunConfig, samples_per_epoch: int | None, position: Position = Position()) -> Length:  # noqa: B008 (it is immutable)
    """The end of the run by its tightest budget, for an attempt that begins at ``position``.

    ``samples_per_epoch``: None if unknown; budget.epochs then sets no end. ConfigError if the budget has room for no step.
    """
    budget = config.budget
    plan = config.plan(config.parallel.smallest)
    epochs = None
    if budget.epochs and samples_per_epoch:
        epochs = int(budget.epochs * samples_per_epoch)
    tokens = budget.tokens and budget.tokens // config.model.context
    for name, count in {"samples": budget.samples, "tokens": tokens, "epochs": epochs}.items():
        if count is not None and count < plan.batch_size(0):
            raise ConfigError(
                f"budget.{name}={getattr(budget, name)} is {count} samples of {config.model.context} tokens, "
                f"less than the first step's {plan.batch_size(0)}; raise it, or lower batch.global_size"
            )
    length = _end(Timeline(config, position), epochs)
    if length.samples is not None and length.samples > MAX_SAMPLES:
        raise ConfigError(
            f"the budget is {length.samples} samples: {length.steps} steps of batch.global_size={config.batch.global_size}; at most "
            f"{MAX_SAMPLES} samples can be counted, so lower the budget"
        )
    wrong = config.optim.outlasting(length.in_unit(config.optim.unit))
    if wrong:
        raise ConfigError(wrong)
    return length


def _end(timeline: Timeline, epochs: int | None) -> Length:
    """The end of a run. ``epochs``: budget.epochs in samples."""
    budget = timeline.run.budget
    begins = timeline.begins
    step = timeline.position.step
    samples = timeline.position.samples
    phase = timeline.phase(samples)
    while True:
        settings = timeline.settings[phase]
        plan = settings.plan(settings.parallel.smallest)
        ends = [count for count in (budget.samples, epochs) if count is not None]
        if budget.tokens is not None:
            ends.append(samples + (budget.tokens - timeline.tokens(samples)) // settings.model.context)
        counts = [plan.steps_within(end, samples) for end in ends]
        if budget.steps is not None:
            counts.append(budget.steps - step)
        if not counts:
            return Length(None, None)
        steps = min(counts)
        phase += 1
        if phase == len(begins) or step + steps < begins[phase].step:
            return Length(max(0, step + steps), plan.samples_after(steps, samples))
        step = begins[phase].step
        samples = begins[phase].samples


def inside_warmup(config: RunConfig, length: Length) -> str | None:
    """A warning if the run ends before its warm-up does; else None."""
    optim = config.optim
    end = length.in_unit(optim.unit)
    warmup = optim.warmup or (optim.warmup_fraction or 0) * (optim.schedule_length or end or 0)
    if end is None or warmup < end:
        return None
    return f"the run ends after {end} {optim.unit}, inside its warm-up of {warmup:g} (optim.warmup): optim.lr is never reached"
