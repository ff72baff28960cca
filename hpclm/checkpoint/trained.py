"""A run's model, taken from its newest good checkpoint: to measure it, or to let it write."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hpclm import config as configs
from hpclm.checkpoint import shelf
from hpclm.checkpoint.identity import tokenizer_clash
from hpclm.checkpoint.progress import Progress
from hpclm.checkpoint.tensors import Tensors
from hpclm.config import EngineConfig, ParallelConfig, RunConfig
from hpclm.errors import ConfigError
from hpclm.model import gpt
from hpclm.model.loss import TokenLoss
from hpclm.model.stack import Stack


def settings(run: Path, overrides: list[str]) -> RunConfig:
    """The settings that the run in folder ``run`` was started with, and key=value words on top."""
    path = run / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{run} is not a run directory: it has no config.yaml")
    config = configs.load(path, overrides)
    kept = {name: getattr(config.engine, name) for name in ("device", "precision", "matmul", "loss_chunk")}
    return replace(config, parallel=ParallelConfig(), engine=EngineConfig(**kept))  # what follows runs in one process


def model(
    run: Path, config: RunConfig, tokenizer: dict[str, Any] | None, device: torch.device, dtype: torch.dtype
) -> tuple[Stack, Progress]:
    """The trained model in evaluation mode, and how far it was trained; NoCheckpointError when nothing good is saved.

    ``tokenizer``: identity of the one that makes its input, where that is known; ConfigError where the model learned another.
    """
    folder = run / "checkpoints"
    if not folder.is_dir():
        raise ConfigError(f"{run} has no checkpoints; train first, with hpclm train")
    found, manifest = shelf.newest(folder)
    clash = tokenizer_clash(manifest.identity, tokenizer)
    if clash:
        raise ConfigError(f"{found}: {clash}; leave data.tokenizer and data.prefix as the run had them")
    stack = Stack(
        config.model,
        gpt.layers(config.model, config.engine, dtype, config.seed),
        dtype,
        loss=TokenLoss(config.engine.loss_chunk),
    )
    with Tensors(found, manifest) as saved:
        names = [name for name in saved.shapes() if name.startswith("model.")]
        stack.load_weights({name.removeprefix("model."): saved.whole(name) for name in names})
    return stack.to(device).eval(), Progress(**manifest.progress)
