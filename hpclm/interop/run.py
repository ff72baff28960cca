"""Read weights from the checkpoint of a run, and write imported weights as a new run."""

import logging
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hpclm import config as configs
from hpclm.base import files
from hpclm.base.errors import ConfigError, unwritten
from hpclm.base.progress import Bar
from hpclm.checkpoint import CheckpointStore, Progress, Retention, directory
from hpclm.checkpoint.manifest import Manifest
from hpclm.checkpoint.settings_at import settings_at
from hpclm.config import DataConfig, ModelConfig, RunConfig, reading
from hpclm.config.fields import as_yaml
from hpclm.config.settings import UnplacedWord
from hpclm.data import tokenizer_folder
from hpclm.engine import Shard, StateSource
from hpclm.interop.rules import ConversionRule, check_depth, check_names, first_few, placements
from hpclm.preprocess import run_text
from hpclm.preprocess.run_text import RunText

log = logging.getLogger(__name__)


class TensorSource(Protocol):
    """The tensors of another format."""

    def names(self) -> set[str]:
        """Names of all tensors."""
        ...

    def read(self, name: str) -> Tensor:
        """The whole tensor with this ``name``."""
        ...


def finite(x: Tensor) -> bool:
    """Whether all values are finite, without the copy that isfinite() makes."""
    return all(math.isfinite(extreme.item()) for extreme in x.aminmax())


@dataclass(frozen=True)
class OnDemand(Sequence[Tensor]):
    """Tensors that are read on access, so that a layer's experts are not in memory twice."""

    source: TensorSource
    theirs: Sequence[str]

    def __len__(self) -> int:
        return len(self.theirs)

    def __getitem__(self, index: Any) -> Any:
        return self.source.read(self.theirs[index])


@dataclass(frozen=True)
class RunCheckpoint:
    """A checkpoint of a run."""

    run: Path
    folder: Path
    manifest: Manifest
    config: RunConfig
    ema: bool = False
    """Whether the weights are their average (optim.ema)."""

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return int(self.manifest.progress["step"])

    def text(self) -> RunText | None:
        """The text of the run; None, with a warning, if its tokenizer is unknown or its files are missing."""
        data = self.config.data
        if data.source != "indexed" and data.tokenizer is None and not (self.run / "tokenizer").is_dir():
            return None
        try:
            return run_text.of_run(self.run, data, self.config.model.vocab_size)
        except ConfigError as error:
            log.warning("exported without a tokenizer: %s", error)
            return None


def find_checkpoint(path: Path, overrides: list[str], ema: bool = False) -> RunCheckpoint:
    """The newest good checkpoint of the run ``path``, or the checkpoint ``path`` itself. ``ema``: with the average of its weights
    (optim.ema).

    ConfigError if it is not part of a run or has no average, NoCheckpointError if there is no good checkpoint.
    """
    run = directory.run_of(path)
    tokenizer_folder.refuse_second(run, overrides)
    folder, saved_manifest = directory.locate(path)
    config = settings_at(run, overrides, folder)
    if ema:
        saved_manifest = saved_manifest.averaged()
    return RunCheckpoint(run, folder, saved_manifest, config, ema)


@dataclass(frozen=True)
class ImportedMoments:
    """Adam's moments of imported weights."""

    sources: Mapping[str, TensorSource] = field(default_factory=dict)
    """Maps the name of a moment to its tensors."""
    steps: int = 0
    """Steps of the optimizer."""


NO_MOMENTS = ImportedMoments()


class ImportedWeights:
    """Imported weights, and the optimizer's moments if any: a ``StateSource`` that holds one weight in memory."""

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        rules: Iterable[ConversionRule],
        place: str,
        moments: ImportedMoments = NO_MOMENTS,
    ):
        """``place``: name of the source in errors.

        ConfigError if tensors are missing or unexpected.
        """
        check_depth(config, len(source.names()), place)
        self.rules = list(rules)
        self.source = source
        self.place = place
        self.moments = moments.sources
        self.steps = moments.steps
        self.shapes = {name: placement.shape for name, placement in placements(config).items()}
        check_names((name for rule in self.rules for name in rule.theirs), source.names(), place)
        trained = [name for rule in self.rules if _is_trained(rule) for name in rule.theirs]
        for moment in self.moments.values():
            check_names(trained, moment.names(), place)

    def tensors(self) -> Iterator[Shard]:
        """Every weight whole, in fp32, followed by its moments."""
        with Bar(self.rules, unit="weight", disable=None) as bar:
            for rule in bar:
                yield Shard.whole(f"model.{rule.ours}", self._converted(rule, self.source))
                for moment, source in self.moments.items() if _is_trained(rule) else ():
                    yield Shard.whole(f"optim.{moment}.{rule.ours}", self._converted(rule, source))

    def _converted(self, rule: ConversionRule, source: TensorSource) -> Tensor:
        where = f"{self.place}: {first_few(rule.theirs, 3)}"
        try:
            tensor = rule.join(OnDemand(source, rule.theirs))
        except RuntimeError as error:  # torch raises it for mismatched shapes
            raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from None
        if tuple(tensor.shape) != self.shapes[rule.ours]:
            raise ConfigError(
                f"{where} gives {rule.ours} of shape {tuple(tensor.shape)}, but the settings need {self.shapes[rule.ours]}"
            )
        tensor = tensor.to(torch.float32).contiguous()
        if not finite(tensor):
            named = (name for name in rule.theirs if not finite(source.read(name)))
            raise ConfigError(f"{self.place}: {next(named, where)}: values are not finite")
        return tensor

    def scalars(self) -> dict[str, Any]:
        """The optimizer's step count."""
        return {"optimizer_steps": self.steps}


def _is_trained(rule: ConversionRule) -> bool:
    """Whether gradients move the weight; the choice bias of a router moves without."""
    return not rule.ours.endswith(".choice_bias")


def settings_of(
    target: Path, model: ModelConfig, data: Mapping[str, Any], overrides: Sequence[str] = ()
) -> configs.RunConfig:
    """The settings of the run ``target``. ``overrides``: additional settings as key=value."""
    begun = configs.load(None, list(overrides))
    data_settings = replace(begun.data, **data) if overrides else DataConfig(**data)
    return replace(begun, name=target.name, out=str(target), model=model, data=data_settings)


def save(staging_dir: Path, config: configs.RunConfig, weights: StateSource, progress: Progress | None = None) -> None:
    """Write a run directory into ``staging_dir``, which will become ``config.out``, with a checkpoint of ``weights``.

    ``progress``: the checkpoint's; None: step 0.
    """
    configs.dump(config, staging_dir / "config.yaml")
    CheckpointStore(staging_dir / "checkpoints", Retention(), {}).save(weights, progress or Progress())


def save_beside(run: Path, target: Path, config: configs.RunConfig, weights: StateSource) -> None:
    """Write ``weights`` as the run ``target`` at step 0, with the settings ``config`` and the tokenizer of ``run``."""
    settings = replace(config, name=target.name, out=str(target))
    with fresh(target, mode=0o700) as staging_dir:
        copy_tokenizer(run, staging_dir)
        save(staging_dir, settings, weights)


def copy_tokenizer(run: Path, staging_dir: Path) -> None:
    """Copy the tokenizer of ``run``, if it has one. ConfigError or HpclmError if that fails."""

    def copy(source: str, target: str) -> None:
        try:
            shutil.copyfile(source, target)
        except OSError as error:  # copytree would collect these
            raise unwritten(error, target, "nothing was written") from None

    if (run / "tokenizer").is_dir():
        shutil.copytree(run / "tokenizer", staging_dir / "tokenizer", copy_function=copy)


def network(derived: Mapping[str, Any], overrides: list[str]) -> ModelConfig:
    """The network described by the ``derived`` model settings and the ``model.key=value`` overrides; ConfigError if it is invalid."""
    settings = [UnplacedWord(f"model.{name}={as_yaml(value)}") for name, value in derived.items()]
    return configs.load(None, [*settings, *overrides]).model


def located(error: ConfigError, source: Path) -> ConfigError:
    """``error`` with ``source`` before each problem, except problems that name the command line as their place."""
    typed = f"({reading.COMMAND_LINE})"
    return ConfigError([line if line.endswith(typed) else f"{source}: {line}" for line in error.problems])


@contextmanager
def fresh(target: Path, mode: int = 0o777, folder: bool = True) -> Iterator[Path]:
    """A staging directory that is renamed to ``target`` at the end of the block, or removed if the block fails.

    Without ``folder``, the path of a file that the block writes.
    """
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists; remove it, or choose another target")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        files.sweep(target)
        staging = files.aside(target)
        if folder:
            staging.mkdir(mode)
    except OSError as error:
        raise unwritten(error, target, "choose another place") from error
    try:
        yield staging
        for path in (*staging.rglob("*"), staging):
            files.sync(path)
        if target.exists():  # created by another process in the meantime
            raise ConfigError(f"{target} exists; remove it, or choose another target")
        staging.rename(target)
        files.sync(target.parent)
    except OSError as error:
        raise unwritten(error, target, "nothing was written") from error
    finally:
        if folder:
            shutil.rmtree(staging, ignore_errors=True)
        else:
            staging.unlink(missing_ok=True)
