"""Run directories: the checkpoint to take weights from, and a new one that weights are put into."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from hpclm import config as configs
from hpclm.checkpoint import CheckpointStore, Progress, Retention, manifest, shelf
from hpclm.checkpoint.manifest import BadCheckpoint, Manifest
from hpclm.config import DataConfig, ModelConfig, RunConfig
from hpclm.config.compose import as_yaml
from hpclm.engine import Shard
from hpclm.errors import ConfigError, NoCheckpointError
from hpclm.interop.rules import Rule, check_names, forms

log = logging.getLogger(__name__)


class Source(Protocol):
    """Where another format's tensors come from."""

    def names(self) -> set[str]:
        """Names of all of them."""
        ...

    def read(self, name: str) -> Tensor:
        """One of them."""
        ...


@dataclass(frozen=True)
class Found:
    """A checkpoint of a run."""

    run: Path
    folder: Path
    manifest: Manifest
    config: RunConfig

    @property
    def step(self) -> int:
        """Steps that its weights were trained for."""
        return int(self.manifest.progress["step"])


def is_run(path: Path) -> bool:
    """Whether ``path`` is a run directory, or one checkpoint's folder."""
    return (path / "checkpoints").is_dir() or (path / manifest.NAME).is_file()


def find(path: Path, overrides: list[str]) -> Found:
    """The newest good checkpoint of the run ``path``, or the checkpoint ``path`` itself.

    ConfigError where it belongs to no run, NoCheckpointError where nothing good is there.
    """
    if (path / manifest.NAME).is_file():
        run = path.absolute().parent.parent
        config = _settings(run, overrides)
        try:
            known = manifest.read(path)
            manifest.verify(path, known)
        except BadCheckpoint as reason:
            raise NoCheckpointError(f"checkpoint {path} is bad: {reason}; take another of {run}") from None
        return Found(run, path, known, config)
    config = _settings(path, overrides)
    folder, known = shelf.newest(path / "checkpoints")
    return Found(path, folder, known, config)


def _settings(run: Path, overrides: list[str]) -> RunConfig:
    path = run / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{run} is not a run directory: it has no config.yaml")
    return configs.load(path, overrides)


class Weights:
    """What a checkpoint store saves of a network that comes from another format: the weights, and nothing else."""

    def __init__(
        self, config: ModelConfig, source: Source, rules: Iterable[Rule], place: str, spare: Iterable[str] = ()
    ):
        """``place`` names the source in errors; ``spare`` are tensors there that no weight needs.

        ConfigError where tensors are missing, or more are there.
        """
        self.rules, self.source, self.place = list(rules), source, place
        self.shapes = {name: form.shape for name, form in forms(config).items()}
        check_names((name for rule in self.rules for name in rule.theirs), source.names() - set(spare), place)

    def tensors(self) -> Iterator[Shard]:
        """Every weight whole, in fp32."""
        with tqdm(self.rules, unit="weight", disable=None) as bar:
            for rule in bar:
                try:
                    tensor = rule.join([self.source.read(name) for name in rule.theirs])
                except RuntimeError as error:  # torch's word for shapes that do not go together
                    raise ConfigError(f"{self.place}: {', '.join(rule.theirs)}: {str(error).splitlines()[0]}") from None
                if tuple(tensor.shape) != self.shapes[rule.ours]:
                    raise ConfigError(
                        f"{self.place}: {', '.join(rule.theirs)} makes {rule.ours} {tuple(tensor.shape)}, and the settings "
                        f"need {self.shapes[rule.ours]}"
                    )
                yield Shard.whole(f"model.{rule.ours}", tensor.to(torch.float32).contiguous())

    def scalars(self) -> dict[str, Any]:
        """No step of an optimizer was done."""
        return {"optimizer_steps": 0, "loss_scale": None}


def save(draft: Path, target: Path, model: ModelConfig, data: Mapping[str, Any], weights: Weights) -> None:
    """Make ``draft``, which will be ``target``, a run directory whose checkpoint at step 0 holds ``weights``."""
    config = RunConfig(name=target.name, out=str(target), model=model, data=DataConfig(**data))
    configs.dump(config, draft / "config.yaml")
    CheckpointStore(draft / "checkpoints", Retention(), {}).save(weights, Progress())  # type: ignore[arg-type]


def network(derived: Mapping[str, Any], words: list[str]) -> ModelConfig:
    """The network of ``derived`` model settings and ``model.key=value`` words on top; ConfigError where it cannot be."""
    other = [word for word in words if not word.startswith("model.")]
    if other:
        raise ConfigError(f"{other[0]}: an import takes model.… settings only; the others are for hpclm train")
    return configs.load(None, [*(f"model.{name}={as_yaml(value)}" for name, value in derived.items()), *words]).model
