"""The part of a run's settings that an engine sees."""

from dataclasses import dataclass, field

from hpclm.config.engine import EngineConfig, ParallelConfig
from hpclm.config.model import ModelConfig
from hpclm.config.optim import OptimConfig, ScalerConfig
from hpclm.config.plan import Plan


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is made from, besides a mesh, a device and a type; RunConfig.for_engine() makes it."""

    model: ModelConfig
    plan: Plan
    optim: OptimConfig = field(default_factory=OptimConfig)
    scaler: ScalerConfig = field(default_factory=ScalerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    seed: int = 1234
    loss_norm: str = "token"
    """As batch.loss_norm."""
    timers: bool = False
    """As log.timers."""
    file_mb: float = 16.0
    """As checkpoint.file_mb."""
    saves: bool = True
    """As checkpoint.enabled."""
    in_place: bool = True
    """Whether backward passes may add to the fp32 gradients in place, where the engine and the device can."""
