"""The settings of a run: typed, frozen, checked before anything starts."""

from hpclm.config.compose import dump, from_cli, load
from hpclm.config.data import DataConfig
from hpclm.config.job import ClusterConfig, JobConfig
from hpclm.config.plan import Plan
from hpclm.config.schema import (
    BatchConfig,
    BudgetConfig,
    CheckpointConfig,
    EngineConfig,
    EvaluateConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScalerConfig,
)

__all__ = [
    "BatchConfig",
    "BudgetConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "DataConfig",
    "EngineConfig",
    "EvaluateConfig",
    "JobConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "Plan",
    "RunConfig",
    "ScalerConfig",
    "dump",
    "from_cli",
    "load",
]
