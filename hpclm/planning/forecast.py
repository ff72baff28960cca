"""Memory and speed of a run on a given kind of GPU."""

from dataclasses import dataclass, replace
from functools import cached_property

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig, RunConfig
from hpclm.model import count
from hpclm.node import gpus
from hpclm.node.gpus import Kind
from hpclm.planning import engines, layout, memory, optimizer, time
from hpclm.planning.engines import EngineCosts
from hpclm.planning.layout import Layout
from hpclm.planning.memory import Memory
from hpclm.planning.time import Step, Volume

GIB = 2**30


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run; its parts are computed on first use."""

    model: ModelConfig
    layout: Layout
    costs: EngineCosts
    kind: Kind

    @cached_property
    def memory(self) -> list[Memory]:
        """Memory of a GPU of each pipeline stage."""
        return memory.of_stages(self.model, self.layout, self.costs)

    @property
    def worst(self) -> int:
        """The stage that needs the most memory."""
        return max(range(len(self.memory)), key=lambda i: self.memory[i].total)

    @property
    def peak(self) -> Memory:
        """Memory of a GPU of the stage that needs the most."""
        return self.memory[self.worst]

    @property
    def room(self) -> str:
        """Whether it "fits", is "tight" (fits only if the allocator releases its overhead) or "does not fit"."""
        have = self.kind.memory * GIB
        if self.peak.total <= have:
            return "fits"
        return "tight" if self.peak.tensors + memory.PROCESS <= have else "does not fit"

    @cached_property
    def step(self) -> Step | None:
        """Seconds of a step; None in fp32, because its peak rates are unknown."""
        kind = optimizer.kind(self.costs.optim)
        optim = self.costs.optim
        of_matrices = kind.cost(optim, [(1, 1)]).element if kind.matrices else 0
        if max(self.costs.element, of_matrices) > 2:
            return None
        return time.step(self.model, self.layout, self.costs, self.kind)

    @cached_property
    def volumes(self) -> list[Volume]:
        """Bytes that a GPU of each pipeline stage sends per step."""
        return time.volumes(self.model, self.layout, self.costs)

    @property
    def volume(self) -> Volume:
        """Bytes that a GPU of the busiest stage sends per step."""
        return time.busiest(self.volumes)

    @property
    def samples(self) -> int:
        """Number of samples per step."""
        return self.layout.data * self.layout.micro_size * self.layout.accumulation

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all GPUs."""
        if self.step is None:
            return None
        return self.samples * self.model.context / self.step.total

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
        if not rate:
            return None
        peak = self.kind.peak
        if self.costs.fp8:
            peak *= count.fp8_gain(self.model)
        return rate * flops / (self.layout.gpus * peak)


def predict(run: RunConfig, kind: Kind) -> Forecast:
    """The forecast for ``run`` on job.nodes x job.gpus GPUs; ConfigError if the layout does not fit that number."""
    shape = layout.layout_of(run)
    engine = run.engine
    if engine.name == "fsdp2" and shape.ranks == 1:  # with one rank, fsdp2 shards nothing and equals the native engine
        engine = replace(engine, name="native", zero_stage=0)
    optimizer.check_user_optimizer(run)
    if engine.fp8 and not kind.fp8 and engine.device != "cpu":
        raise ConfigError(
            f"engine.fp8={engine.fp8} needs a GPU that multiplies FP8; these do: {', '.join(gpus.with_fp8())}"
        )
    costs = engines.costs(engine, element(run, kind), run.parallel, run.optim)
    return Forecast(run.model, shape, replace(costs, memory=kind.memory * GIB), kind)


def element(run: RunConfig, kind: Kind) -> int:
    """Bytes per activation for engine.precision; auto is bf16 on GPUs that support it."""
    precision = run.engine.precision
    return 4 if precision == "fp32" or (precision == "auto" and not kind.bf16) else 2
