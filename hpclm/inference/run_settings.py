"""The settings of a run for using its model in a single process. Checks that the run's files exist before PyTorch is imported, which takes
seconds."""

from dataclasses import replace
from pathlib import Path

from hpclm.base.errors import ConfigError, NoCheckpointError
from hpclm.checkpoint import directory, manifest
from hpclm.checkpoint.settings_at import settings_at
from hpclm.config import EngineConfig, OptimConfig, ParallelConfig, RunConfig
from hpclm.config.optimizers import OPTIMIZERS, row
from hpclm.data import tokenizer_folder
from hpclm.rundir import config_history


def inference_settings(run: Path, overrides: list[str], checkpoint: Path | None = None) -> RunConfig:
    """The settings of the run in ``run`` at ``checkpoint``, or at its newest one, with key=value overrides, for a single process."""
    tokenizer_folder.refuse_second(run, overrides)
    config = for_inference(settings_at(run, overrides, checkpoint))
    size = config.batch.micro_size or config_history.micro_size(run) or 1  # no result depends on it
    return replace(config, batch=replace(config.batch, micro_size=size))


def for_inference(config: RunConfig) -> RunConfig:
    """``config`` for using the run's model in a single process."""
    kept = {name: getattr(config.engine, name) for name in ("device", "precision", "loss_chunk")}
    # the model needs no optimizer: offloaded state would not fit this engine, and a user's optimizer may be missing here
    optim = config.optim
    if row(optim.name).offloaded:
        optim = OptimConfig()
    if optim.name not in OPTIMIZERS:
        optim = replace(optim, name=OptimConfig.name, arguments={})
    data = config.data
    if data.order == "per_dataset":  # which is of training data; held-out data are read in mcore's order
        data = replace(data, order="mcore", phases=[], max_epochs=None)
    return replace(config, parallel=ParallelConfig(), engine=EngineConfig(**kept), optim=optim, data=data)


def check_saved(run: Path) -> None:
    """ConfigError or NoCheckpointError if ``run`` is not a checkpoint and has none, good or bad."""
    folder = run / "checkpoints"
    if (run / manifest.NAME).is_file():
        return
    if not folder.is_dir():
        raise ConfigError(f"{run} has no checkpoints; train first, with hpclm train")
    if not directory.steps(folder):
        raise NoCheckpointError(f"no good checkpoint in {folder}; train first, with hpclm train")


def saved_steps(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; NoCheckpointError without any."""
    folder = run / "checkpoints"
    steps = directory.steps(folder)
    if not steps:
        raise NoCheckpointError(f"no checkpoint in {folder}; train first, with hpclm train")
    return steps


def checked_settings(run: Path, overrides: list[str], reads_text: bool) -> RunConfig:
    """The settings of a run, after checking that it has a checkpoint. ``reads_text``: also check its tokenizer."""
    config = inference_settings(run, overrides)
    check_saved(run)
    if reads_text:
        tokenizer_folder.of_run(run, config.data)
    return config
