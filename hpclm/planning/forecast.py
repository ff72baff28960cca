"""What a run will need and how fast it will be on GPUs of a kind."""

from dataclasses import dataclass
from functools import cached_property

from hpclm.cluster.kinds import Kind
from hpclm.config import ModelConfig, RunConfig
from hpclm.model import count
from hpclm.planning import code, layout, memory, time
from hpclm.planning.code import Code
from hpclm.planning.layout import Layout
from hpclm.planning.memory import Memory
from hpclm.planning.time import Step, Volume

GIB = 2**30


@dataclass(frozen=True)
class Forecast:
    """A run's settings and what follows from them. Only the parts that are asked for are computed."""

    model: ModelConfig
    layout: Layout
    code: Code
    kind: Kind

    @cached_property
    def memory(self) -> list[Memory]:
        """Of a GPU of each pipeline stage."""
        return memory.each(self.model, self.layout, self.code)

    @cached_property
    def worst(self) -> int:
        """The stage that needs most memory."""
        return max(range(len(self.memory)), key=lambda i: self.memory[i].total)

    @property
    def room(self) -> str:
        """fits; tight, where it does if the allocator gives back what it keeps beside tensors; or does not fit."""
        need, have = self.memory[self.worst].total, self.kind.memory * GIB
        if need <= have:
            return "fits"
        tensors = (need - self.code.fixed) / (1 + self.code.slack)
        return "tight" if tensors + self.code.fixed <= have else "does not fit"

    @cached_property
    def step(self) -> Step | None:
        """Seconds of a step; None in fp32, for which the kinds have no peak."""
        return None if self.code.element > 2 else time.step(self.model, self.layout, self.code, self.kind)

    @cached_property
    def volume(self) -> Volume:
        """Bytes that a GPU sends in a step."""
        return time.volume(self.model, self.layout, self.code)

    @property
    def samples(self) -> int:
        """In a step."""
        return self.layout.data * self.layout.micro_size * self.layout.accumulation

    @property
    def tokens_per_second(self) -> float | None:
        """Of all GPUs."""
        return self.samples * self.model.context / self.step.total if self.step else None

    @property
    def mfu(self) -> float | None:
        """Part of the peak that the model's own arithmetic uses (Chowdhery et al. 2022, appendix B)."""
        return self._used(count.flops_per_token(self.model))

    @property
    def hfu(self) -> float | None:
        """The same with what is computed again (Korthikanti et al. 2022, section 6.3)."""
        return self._used(count.flops_per_token(self.model) + count.flops_again(self.model, self.layout.recompute))

    def _used(self, flops: float) -> float | None:
        rate = self.tokens_per_second
        return rate * flops / (self.layout.gpus * self.kind.peak) if rate else None


def of(run: RunConfig, kind: Kind) -> Forecast:
    """The forecast for ``run`` on job.nodes x job.gpus GPUs; ConfigError when the layout does not divide them."""
    where = layout.of(run)
    return Forecast(run.model, where, code.of(run.engine, element(run, kind), where.pipeline), kind)


def element(run: RunConfig, kind: Kind) -> int:
    """Bytes of an activation: engine.precision, of which auto is bf16 where the GPU multiplies it."""
    precision = run.engine.precision
    return 4 if precision == "fp32" or (precision == "auto" and not kind.bf16) else 2
