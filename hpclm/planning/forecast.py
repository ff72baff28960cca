"""Memory and speed of a run on a given kind of GPU."""

from dataclasses import dataclass, replace
from functools import cached_property

from hpclm.config import ModelConfig, RunConfig
from hpclm.model import count
from hpclm.node.gpus import Kind
from hpclm.planning import code, layout, memory, time
from hpclm.planning.code import Code
from hpclm.planning.layout import Layout
from hpclm.planning.memory import Memory
from hpclm.planning.time import Step, Volume

GIB = 2**30


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run; its parts are computed on first use."""

    model: ModelConfig
    layout: Layout
    code: Code
    kind: Kind

    @cached_property
    def memory(self) -> list[Memory]:
        """Memory of a GPU of each pipeline stage."""
        return memory.each(self.model, self.layout, self.code)

    @cached_property
    def worst(self) -> int:
        """The stage that needs the most memory."""
        return max(range(len(self.memory)), key=lambda i: self.memory[i].total)

    def tensors(self, stage: int) -> float:
        """Bytes of a GPU's tensors, without the process and the allocator's overhead."""
        return (self.memory[stage].total - self.code.fixed) / (1 + self.code.slack)

    @property
    def room(self) -> str:
        """ "fits", "tight" (only if the allocator releases its overhead), or "does not fit"."""
        need, have = self.memory[self.worst].total, self.kind.memory * GIB
        if need <= have:
            return "fits"
        return "tight" if self.tensors(self.worst) + self.code.fixed <= have else "does not fit"

    @cached_property
    def step(self) -> Step | None:
        """Seconds of a step; None in fp32, for which no peak rates are known."""
        return None if self.code.element > 2 else time.step(self.model, self.layout, self.code, self.kind)

    @cached_property
    def volumes(self) -> list[Volume]:
        """Bytes that a GPU of each pipeline stage sends per step."""
        return time.volumes(self.model, self.layout, self.code)

    @cached_property
    def volume(self) -> Volume:
        """Bytes that a GPU of the busiest stage sends per step."""
        return time.volume(self.model, self.layout, self.code)

    @property
    def samples(self) -> int:
        """Samples per step."""
        return self.layout.data * self.layout.micro_size * self.layout.accumulation

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all GPUs."""
        return self.samples * self.model.context / self.step.total if self.step else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation (Chowdhery et al. 2022, appendix B)."""
        return self._used(count.flops_per_token(self.model))

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation, which includes recomputation (Korthikanti et al. 2022, section 6.3)."""
        return self._used(count.flops_per_token(self.model) + count.recompute_flops(self.model, self.layout.recompute))

    def _used(self, flops: float) -> float | None:
        rate = self.tokens_per_second
        return rate * flops / (self.layout.gpus * self.kind.peak) if rate else None


def of(run: RunConfig, kind: Kind) -> Forecast:
    """The forecast for ``run`` on job.nodes x job.gpus GPUs; ConfigError if the layout does not fit that number."""
    where = layout.of(run)
    own = code.of(run.engine, element(run, kind), where.pipeline, run.optim.name)
    own = own if run.engine.loss_chunk else replace(own, memory=kind.memory * GIB)
    return Forecast(run.model, where, own, kind)


def element(run: RunConfig, kind: Kind) -> int:
    """Bytes per activation for engine.precision; auto is bf16 on GPUs that support it."""
    precision = run.engine.precision
    return 4 if precision == "fp32" or (precision == "auto" and not kind.bf16) else 2
