"""The arguments of hpclm's functions as settings of a run."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from hpclm import cli, config
from hpclm.config import RunConfig
from hpclm.config.fields import as_yaml, flattened, required, type_of
from hpclm.errors import ConfigError

Base = RunConfig | str | os.PathLike[str]
"""Settings, or the name of a preset, a settings file or a run directory."""
Change = str | Mapping[str, Any]
"""``"optim.lr=1e-3"``, or ``{"optim.lr": 1e-3}``, or ``{"optim": {"lr": 1e-3}}``."""


@dataclass(frozen=True)
class Options:
    """Settings that have a keyword; None: as the base says."""

    steps: int | None = None
    lr: float | None = None
    seed: int | None = None
    out: str | os.PathLike[str] | None = None
    device: str | None = None
    nodes: int | None = None
    gpus: int | None = None
    time: str | None = None
    partition: str | None = None

    def changes(self) -> Iterator[Change]:
        """They by their names in settings files. ``steps`` replaces the base's budget."""
        if self.steps is not None:
            yield {"budget": {"steps": self.steps, **dict.fromkeys(("samples", "tokens", "epochs", "hours"))}}
        names = {"lr": "optim.lr", "seed": "seed", "out": "out", "device": "engine.device"}
        names |= {name: f"job.{name}" for name in ("nodes", "gpus", "time", "partition")}
        yield {key: value for name, key in names.items() if (value := getattr(self, name)) is not None}


def compose(base: Base, changes: Iterable[Change]) -> RunConfig:
    """The settings ``base`` with changes on top, in their order; or ConfigError with every problem."""
    if isinstance(base, RunConfig):
        return config.changed(base, words(changes))
    if not isinstance(base, (str, os.PathLike)):
        raise ConfigError(
            "the first argument must be a preset, a settings file, a run or settings, and changes come after it, as in "
            f'hpclm.train("debug", {{"model.layers": 6}}); it is {type(base).__name__}'
        )
    return cli.settings([os.fspath(base), *words(changes)])


def words(changes: Iterable[Change]) -> list[str]:
    """Changes as words of a command line."""
    typed: list[str] = []
    for change in changes:
        if isinstance(change, str):
            typed.append(change)
        elif not isinstance(change, Mapping):
            raise ConfigError(
                f'a change must be a mapping such as {{"optim.lr": 1e-3}}, or "optim.lr=1e-3", not {type(change).__name__}'
            )
        else:
            typed += [f"{key}={_text(key, value)}" for key, value in flattened(dict(change)).items()]
    return typed


def _text(key: str, value: Any) -> str:
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    kind, value = type_of(key), value.item() if hasattr(value, "item") else value  # NumPy's numbers as Python's
    if (kind is str and value is None) or (required(kind) is str and isinstance(value, bool)):
        raise ConfigError(f"{key}={value!r} must be text, in quotes")
    try:
        return str(value) if required(kind) is str and value is not None else as_yaml(value)
    except yaml.YAMLError:
        raise ConfigError(
            f"{key}: settings are text, numbers, lists and mappings, not {type(value).__name__}"
        ) from None
