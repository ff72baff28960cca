"""The division of a step's samples over processes and micro-batches, and the length of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

from hpclm.base.errors import ConfigError
from hpclm.base.terminal import many


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
        per_replica, left = divmod(global_size, max(processes, 1))
        fits = f"; batch.micro_size={gcd(per_replica, micro_size)} fits"
        if left:
            fits = f"; batch.global_size={-(-global_size // max(unit, 1)) * unit} fits"
        if rampup:
            fits = ""
        wrong = [
            f"{name}={size} must be a multiple of batch.micro_size={micro_size} x {many(processes, 'data-parallel replica')} = "
            f"{unit}{fits}"
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
        """Micro-batches per replica in the step that begins after ``samples`` samples."""
        return self.batch_size(samples) // (self.micro_size * self.data)

    def accumulations(self) -> list[int]:
        """Micro-batches per replica for every batch size of the run, ascending."""
        ramp = self.rampup or Rampup(self.global_size, 1, 0)
        sizes = range(ramp.start, self.global_size + 1, ramp.increment)
        return [size // (self.micro_size * self.data) for size in sizes]

    def samples_after(self, steps: int, begin: int = 0) -> int:
        """Samples consumed ``steps`` steps after ``begin`` samples."""
        done = 0
        samples = begin
        while done < steps and self.batch_size(samples) < self.global_size:
            samples += self.batch_size(samples)
            done += 1
        return samples + max(0, steps - done) * self.global_size

    def steps_within(self, samples: int, begin: int = 0) -> int:
        """Number of whole steps from ``begin`` samples to ``samples`` samples; negative if ``begin`` is past them."""
        steps = 0
        used = begin
        while self.batch_size(used) < self.global_size and used + self.batch_size(used) <= samples:
            used += self.batch_size(used)
            steps += 1
        return steps + (samples - used) // self.batch_size(used)


@dataclass(frozen=True)
class Length:
    """Where a run ends; None if only budget.hours limits it."""

    steps: int | None
    samples: int | None

    def in_unit(self, unit: str) -> int | None:
        """The length in ``unit``, "steps" or "samples"."""
        return self.steps if unit == "steps" else self.samples


@dataclass(frozen=True)
class Reading:
    """How far a run has read when a phase begins."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    sources: Mapping[str, Sequence[int]] | None = field(default_factory=dict)
    """By the hash of a dataset: the position in its order, and the samples and tokens read of it; None if not computed yet."""


@dataclass(frozen=True)
class Position:
    """Where an attempt begins."""

    step: int = 0
    samples: int = 0
    read: tuple[Reading, ...] = ()
    """The beginning of each phase that the run has read from."""
