"""How a step's samples are divided over processes and micro-batches, and how long a run is: pure arithmetic."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpclm.errors import ConfigError

if TYPE_CHECKING:
    from hpclm.config.schema import RunConfig


@dataclass(frozen=True)
class Rampup:
    """Batch-size ramp of Megatron-LM's --rampup-batch-size."""

    start: int
    increment: int
    samples: int


@dataclass(frozen=True)
class Plan:
    """How a run's batches are divided, for a given number of data-parallel replicas."""

    data: int
    global_size: int
    micro_size: int
    rampup: Rampup | None = None

    @classmethod
    def divide(cls, processes: int, global_size: int, micro_size: int, rampup: Rampup | None = None) -> "Plan":
        """A plan; ConfigError if the batch sizes are not multiples of micro-batch size x replicas."""
        unit = micro_size * processes
        sizes = {"batch.global_size": global_size}
        if rampup:
            sizes |= {"batch.rampup's start": rampup.start, "batch.rampup's increment": rampup.increment}
        wrong = [
            f"{name}={size} must be a multiple of batch.micro_size={micro_size} x {processes} data-parallel "
            f"replica{'s' * (processes != 1)} = {unit}"
            for name, size in sizes.items()
            if unit < 1 or size % unit
        ]
        if wrong:
            raise ConfigError(wrong)
        return cls(processes, global_size, micro_size, rampup)

    def batch_size(self, samples: int) -> int:
        """Samples in the step that begins after ``samples`` samples."""
        ramp = self.rampup
        if ramp is None or samples > ramp.samples or ramp.start == self.global_size:
            return self.global_size
        increments = (self.global_size - ramp.start) // ramp.increment
        level = int(samples / (ramp.samples / increments))
        return min(self.global_size, ramp.start + level * ramp.increment)

    def accumulation(self, samples: int) -> int:
        """Micro-batches per replica in that step."""
        return self.batch_size(samples) // (self.micro_size * self.data)

    def accumulations(self) -> list[int]:
        """Micro-batches per replica of every batch size of the run, ascending."""
        ramp = self.rampup
        sizes = range(ramp.start, self.global_size + 1, ramp.increment) if ramp else [self.global_size]
        return [size // (self.micro_size * self.data) for size in sizes]

    def samples_after(self, steps: int) -> int:
        """Samples consumed by the first ``steps`` steps."""
        done = samples = 0
        while done < steps and self.batch_size(samples) < self.global_size:
            samples += self.batch_size(samples)
            done += 1
        return samples + (steps - done) * self.global_size

    def steps_within(self, samples: int) -> int:
        """Number of whole steps in ``samples`` samples."""
        steps = used = 0
        while self.batch_size(used) < self.global_size and used + self.batch_size(used) <= samples:
            used += self.batch_size(used)
            steps += 1
        if self.batch_size(used) < self.global_size:
            return steps
        return steps + (samples - used) // self.global_size


@dataclass(frozen=True)
class Length:
    """Where a run ends; None if only budget.hours limits it."""

    steps: int | None
    samples: int | None

    def in_unit(self, unit: str) -> int | None:
        """The length in "steps" or "samples"."""
        return self.steps if unit == "steps" else self.samples


def run_length(config: "RunConfig", plan: Plan, samples_per_epoch: int | None) -> Length:
    """The end of the run by the tightest budget; ConfigError if that is before the first step.

    ``samples_per_epoch``: None if it is not known, so that epochs do not count.
    """
    budget = config.budget
    ends = [] if budget.steps is None else [budget.steps]
    samples = {"samples": budget.samples}
    samples["tokens"] = None if budget.tokens is None else budget.tokens // config.model.context
    samples["epochs"] = int(budget.epochs * samples_per_epoch) if budget.epochs and samples_per_epoch else None
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
    found = Length(steps, None if steps is None else plan.samples_after(steps))
    wrong = config.optim.outlasting(found.in_unit(config.optim.unit))
    if wrong:
        raise ConfigError(wrong)
    return found


def inside_warmup(config: "RunConfig", length: Length) -> str | None:
    """What to say of a run that ends before its warm-up does."""
    optim, end = config.optim, length.in_unit(config.optim.unit)
    warmup = optim.warmup or (optim.warmup_fraction or 0) * (optim.schedule_length or end or 0)
    if end is None or warmup < end:
        return None
    return f"the run ends after {end} {optim.unit}, inside its warm-up of {warmup:g} (optim.warmup): optim.lr is never reached"


def planned_inside_warmup(config: "RunConfig") -> str | None:
    """As ``inside_warmup``, before the data and so the length of an epoch are known; ConfigError if the budget is too short."""
    return inside_warmup(config, run_length(config, config.plan(config.parallel.model), None))
