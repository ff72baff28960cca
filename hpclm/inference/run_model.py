"""Load a trained model from its run directory, for evaluation and generation."""

import logging
from pathlib import Path
from typing import Any, Protocol

from hpclm.base.errors import ConfigError
from hpclm.checkpoint import directory
from hpclm.checkpoint.fingerprint import tokenizer_clash
from hpclm.checkpoint.manifest import Manifest, Progress
from hpclm.checkpoint.tensors import CheckpointTensors
from hpclm.config import DataConfig, EngineConfig, ModelConfig
from hpclm.inference import run_settings
from hpclm.model import gpt
from hpclm.model.loss import TokenLoss
from hpclm.model.stack import Execution, Stack
from hpclm.node import environment, hardware
from hpclm.parallel.mesh import Compute

log = logging.getLogger(__name__)


class TrainedModel(Protocol):
    """The settings that the model of a run depends on when it is loaded into one process."""

    @property
    def model(self) -> ModelConfig:
        """The shape of the network."""
        ...

    @property
    def data(self) -> DataConfig:
        """Settings that name the run's tokenizer."""
        ...

    @property
    def engine(self) -> EngineConfig:
        """The device, the precision, and the chunk size of the loss."""
        ...

    @property
    def seed(self) -> int:
        """Seed for the random numbers that a user-defined block draws when it is built."""
        ...

    def modules(self) -> set[str]:
        """Top-level modules of the user's code."""
        ...


def place(config: TrainedModel) -> Compute:
    """The device, type and mesh of a single process; prepares the device."""
    if config.modules():
        environment.for_code_that_may_compile()
    device = hardware.device(config.engine, 0)
    hardware.set_matmul(device)
    dtype = hardware.compute_type(config.engine, device)
    slow = hardware.slow_type(device, dtype)
    if slow:
        log.warning("%s", slow)
    return Compute(device, dtype)


def load_model(
    run: Path, config: TrainedModel, tokenizer: dict[str, Any] | None, compute: Compute, ema: bool = False
) -> tuple[Stack, Progress]:
    """The model of the newest good checkpoint in evaluation mode, and its progress; NoCheckpointError without one.

    ``tokenizer``: fingerprint of the tokenizer in use, if known; ConfigError if the model was trained with another. ``ema``: with the
    average of the weights (optim.ema); ConfigError without one.
    """
    run_settings.check_saved(run)
    return load_checkpoint(*directory.newest(run / "checkpoints"), config, tokenizer, compute, ema)


def load_checkpoint(
    checkpoint: Path,
    manifest: Manifest,
    config: TrainedModel,
    tokenizer: dict[str, Any] | None,
    compute: Compute,
    ema: bool = False,
) -> tuple[Stack, Progress]:
    """The model of the checkpoint in the folder ``checkpoint``; see ``load_model``."""
    if ema:
        manifest = manifest.averaged()
    clash = tokenizer_clash(manifest.fingerprint, tokenizer)
    if clash:
        raise ConfigError(f"{checkpoint}: {clash[0]}; use the run's own data.tokenizer and data.prefix")
    layers = gpt.layers(config.model, config.engine, compute.dtype, config.seed)
    stack = Stack(config.model, layers, compute.dtype, execution=Execution(TokenLoss(config.engine.loss_chunk)))
    with CheckpointTensors(checkpoint, manifest) as saved:
        names = [name for name in saved.shapes() if name.startswith("model.")]
        stack.load_weights({name.removeprefix("model."): saved.whole(name) for name in names})
    return stack.to(compute.device).eval(), Progress.of(manifest.progress)
