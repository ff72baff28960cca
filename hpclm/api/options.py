"""Turn the keywords and changes of hpclm's functions into settings of a run."""

import inspect
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hpclm import config
from hpclm.api import dataset
from hpclm.api.checked import PATH, UnfitError, fitted, plain
from hpclm.api.dataset import Data
from hpclm.base.errors import ConfigError
from hpclm.base.registry import into_a_file
from hpclm.config import RunConfig
from hpclm.config.checks import shown
from hpclm.config.fields import as_word, required, type_of, type_text
from hpclm.config.settings import UnplacedWord
from hpclm.node import environment
from hpclm.rundir import folder

Base = RunConfig | str | os.PathLike[str]
"""Settings, or the name of a preset, a settings file or a run directory."""
Change = str | Mapping[str, Any]
"""``"optim.lr=1e-3"``, or ``{"optim.lr": 1e-3}``, or ``{"optim": {"lr": 1e-3}}``."""
KEY = re.compile(r"[A-Za-z_][\w.-]*")


@dataclass(frozen=True)
class RunKeywords:
    """The keywords of hpclm.settings, train, submit and sweep that describe the run; None: the base's setting."""

    steps: int | None = None
    lr: float | None = None
    seed: int | None = None
    out: str | os.PathLike[str] | None = None
    device: str | None = None
    nodes: int | None = None
    gpus: int | None = None
    time: str | None = None
    partition: str | None = None
    data: Data | None = None
    tokenizer: str | os.PathLike[str] | None = None
    settings: ClassVar[Mapping[str, str]] = {
        "lr": "optim.lr",
        "seed": "seed",
        "out": "out",
        "device": "engine.device",
        "nodes": "job.nodes",
        "gpus": "job.gpus",
        "time": "job.time",
        "partition": "job.partition",
    }

    def changes(self) -> Iterator[Change]:
        """The keywords as settings. ``steps`` replaces the base's budget."""
        if self.steps is not None:
            yield {"budget": {"steps": self.steps, **dict.fromkeys(("samples", "tokens", "epochs", "hours"))}}
        for name, key in self.settings.items():
            value = getattr(self, name)
            if value is not None:
                yield {key: value}

    def compose(self, base: Base, changes: Iterable[Change], of_data: Iterable[str] = ()) -> RunConfig:
        """``base`` overridden by the keywords, then ``of_data``, then ``changes``; ConfigError with every problem."""
        overrides = words([*self.changes(), *of_data, *changes])
        if isinstance(base, RunConfig):
            return config.changed(base, overrides)
        if not isinstance(base, (str, os.PathLike)):
            raise ConfigError(
                "the first argument must be a preset, a settings file, a run or settings, followed by changes, as in "
                f'hpclm.train("debug", {{"model.layers": 6}}); it is {type(base).__name__}'
            )
        try:
            path = fitted(base, PATH)
        except UnfitError:
            raise ConfigError(f"the first argument, {shown(base)}, cannot be the name of a file") from None
        return environment.settings_with_site([path, *overrides])

    def run(self, base: Base, changes: Iterable[Change]) -> RunConfig:
        """The settings of ``compose`` with those of ``data``, after a text has been written as a dataset."""
        run = self.compose(base, changes)
        if self.data is None:
            if self.tokenizer is not None:
                raise ConfigError(f"tokenizer={os.fspath(self.tokenizer)!r} has no effect without data=")
            return run
        folder.check_run_directory(Path(run.out))  # refuse a wrong folder before a dataset is written
        dataset.refuse_second(self.data, words(changes))
        with environment.preserved():
            of_data = dataset.data_settings(self.data, self.tokenizer, run)
        return self.compose(base, changes, of_data)


def words(changes: Iterable[Change]) -> list[str]:
    """Changes as key=value words."""
    typed: list[str] = []
    for change in changes:
        if isinstance(change, str):
            typed.append(UnplacedWord(str.__str__(change)))
        elif isinstance(change, Mapping):
            with readable("a change"):
                given = list(leaves(change))
                typed += [UnplacedWord(f"{key}={word(key, value)}") for key, value in given]
                twice = {key for key, count in Counter(key for key, _ in given).items() if count > 1}
                if twice:
                    raise ConfigError([f"{key} is set twice; leave one out" for key in sorted(twice)])
        else:
            raise ConfigError(
                f'a change must be a mapping such as {{"optim.lr": 1e-3}}, or "optim.lr=1e-3", not {type(change).__name__}'
            )
    return typed


def leaves(change: Mapping[Any, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of a nested mapping, and their values."""
    for name, value in change.items():
        key = f"{section}{plain(name)}"
        if not KEY.fullmatch(key):
            raise ConfigError(f"unknown setting {shown(key)}")
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def word(key: str, value: Any) -> str:
    """The value of a setting as text for a key=value word."""
    try:
        value_of_setting = plain(value)
    except UnfitError as error:
        for given in value if isinstance(value, (list, tuple)) else [value]:
            if inspect.isclass(given) or inspect.isfunction(given):
                module, name = given.__module__, given.__qualname__
                way_out = into_a_file(name) if module == "__main__" else f"give its name, '{module}:{name}'"
                raise ConfigError(f"{key}: {way_out}") from None
        raise ConfigError(f"{key}: settings are text, numbers, lists and mappings, not {error}") from None
    kind = type_of(key)
    if kind == list[str] and isinstance(value_of_setting, list):
        is_wrong = not all(map(_is_text, value_of_setting))
    elif value_of_setting is None:
        is_wrong = kind is str
    else:
        is_wrong = required(kind) is str and not _is_text(value_of_setting)
    if is_wrong:
        raise ConfigError(f"{key} must be {type_text(kind)}, not {shown(value)}")
    is_text = required(kind) is str and value_of_setting is not None
    return str(value_of_setting) if is_text else as_word(value_of_setting)


def _is_text(value: Any) -> bool:
    """Whether a value can be text. Numbers can; True cannot, nor nan, which is pandas' missing value."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, (str, int)) and not isinstance(value, bool)


@contextmanager
def readable(what: str) -> Iterator[None]:
    """ConfigError, which begins with ``what``, if the block cannot read a value."""
    try:
        yield
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply, or contains itself") from None
    except (
        Exception
    ) as error:  # such as a missing value in omegaconf, a tensor without data, or a number too long for text
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"{what} cannot be read: {type(error).__name__}: {reason}") from None
