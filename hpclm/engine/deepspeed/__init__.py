"""DeepSpeed: ZeRO (Rajbhandari et al. 2020), and its pipeline. The only folder that imports it."""

from hpclm.config import EngineSettings
from hpclm.config.deepspeed import stage_of
from hpclm.engine import Engine
from hpclm.node import environment
from hpclm.parallel.mesh import Compute


def build(config: EngineSettings, compute: Compute) -> Engine:
    """The engine for the settings' ZeRO stage and number of pipeline stages."""
    builds = config.optim.name == "cpu_adam" or config.engine.offload_folder is not None
    # DeepSpeed reads the environment when it is imported
    environment.for_deepspeed(compute.device.type, compute.device.index or 0, builds)
    from hpclm.engine.deepspeed.pipeline import PipelineEngine
    from hpclm.engine.deepspeed.zero import ReplicatedEngine, ZeroEngine

    if compute.mesh.pp.size > 1:
        return PipelineEngine(config, compute)
    if stage_of(config.engine):
        return ZeroEngine(config, compute)
    return ReplicatedEngine(config, compute)
