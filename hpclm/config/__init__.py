"""The settings of a run: typed, frozen, checked before anything starts."""

from hpclm.config.compose import changed, dump, from_cli, load, of_run
from hpclm.config.data import DataConfig
from hpclm.config.engine import EngineConfig, ParallelConfig
from hpclm.config.job import ClusterConfig, JobConfig
from hpclm.config.model import ModelConfig
from hpclm.config.monitoring import EvaluateConfig, LogConfig
from hpclm.config.optim import OptimConfig, ScalerConfig
from hpclm.config.plan import Plan
from hpclm.config.schema import BatchConfig, BudgetConfig, CheckpointConfig, EngineSettings, RunConfig

__all__ = [
    "BatchConfig",
    "BudgetConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "DataConfig",
    "EngineConfig",
    "EngineSettings",
    "EvaluateConfig",
    "JobConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "Plan",
    "RunConfig",
    "ScalerConfig",
    "changed",
    "dump",
    "from_cli",
    "load",
    "of_run",
]
