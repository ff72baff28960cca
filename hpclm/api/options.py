"""The arguments of hpclm's functions as settings of a run."""

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hpclm import config
from hpclm.api import values
from hpclm.config import RunConfig
from hpclm.config.checks import shown
from hpclm.config.fields import as_yaml, required, type_of, type_text
from hpclm.errors import ConfigError
from hpclm.node import environment

Base = RunConfig | str | os.PathLike[str]
"""Settings, or the name of a preset, a settings file or a run directory."""
Change = str | Mapping[str, Any]
"""``"optim.lr=1e-3"``, or ``{"optim.lr": 1e-3}``, or ``{"optim": {"lr": 1e-3}}``."""
KEY = re.compile(r"[A-Za-z_][\w.-]*")


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
        """These options, keyed by their setting names. ``steps`` replaces the base's budget."""
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
    try:
        return environment.settings([values.path(base), *words(changes)])
    except values.UnfitError:
        raise ConfigError(f"the first argument, {shown(base)}, cannot be the name of a file") from None


def words(changes: Iterable[Change]) -> list[str]:
    """Changes as words of a command line."""
    typed: list[str] = []
    for change in changes:
        if isinstance(change, str):
            typed.append(values.text(change))
        elif isinstance(change, Mapping):
            typed += _read(change)
        else:
            raise ConfigError(
                f'a change must be a mapping such as {{"optim.lr": 1e-3}}, or "optim.lr=1e-3", not {type(change).__name__}'
            )
    return typed


def _read(change: Mapping[Any, Any]) -> list[str]:
    with readable("a change"):
        return list(_assignments(change))


@contextmanager
def readable(what: str) -> Iterator[None]:
    """ConfigError, which begins with ``what``, for values that cannot be read in the block."""
    try:
        yield
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply, or in itself") from None
    except Exception as error:  # an omegaconf mapping lacks a value, a tensor its data, a number is too long for text
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"{what} cannot be read: {type(error).__name__}: {reason}") from None


def _assignments(change: Mapping[Any, Any], section: str = "") -> Iterator[str]:
    """The settings of a mapping as words of a command line."""
    for key, value in change.items():
        name = f"{section}{values.scalar(key)}"
        if not KEY.fullmatch(name):
            raise ConfigError(f"unknown setting {shown(name)}")
        if isinstance(value, Mapping) and value:
            yield from _assignments(value, f"{name}.")
        else:
            yield f"{name}={_text(name, value)}"


def _text(key: str, value: Any) -> str:
    try:
        plain = values.setting(value)
    except values.UnfitError as error:
        raise ConfigError(f"{key}: settings are text, numbers, lists and mappings, not {error}") from None
    kind = type_of(key)
    listed = kind == list[str] and isinstance(plain, list)
    inner = plain if listed else [plain] if required(kind) is str else []
    if any(not _is_text(part) and (part is not None or listed or kind is str) for part in inner):
        raise ConfigError(f"{key} must be {type_text(kind)}, not {shown(value)}")
    return str(plain) if (required(kind) is str and plain is not None) or isinstance(plain, str) else as_yaml(plain)


def _is_text(value: Any) -> bool:
    """Whether a value may stand for text; True or nan, which pandas has where there is none, hardly does."""
    return (isinstance(value, (str, int)) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )
