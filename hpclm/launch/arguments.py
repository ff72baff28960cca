"""The arguments of ``hpclm submit``, and the settings of its runs: one run, or one for each combination of a sweep."""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpclm.base import paths, shipped
from hpclm.base.errors import ConfigError
from hpclm.config import RunConfig, data
from hpclm.config.settings import is_override
from hpclm.diagnostics import report
from hpclm.preprocess import command_line

if TYPE_CHECKING:
    from hpclm.preprocess.text_dataset import NamedDataset

DEFAULT = shipped.folder("configs") / "debug.yaml"


@dataclass(frozen=True)
class SubmitRequest:
    """The arguments of ``hpclm submit``."""

    settings: Sequence[str]
    """A settings file or preset, if any, and key=value."""
    options: Sequence[str] = ()
    """The options for the job, as job.key=value. They override ``settings``."""
    typed: Sequence[str] = ()
    """All arguments, for messages and the record of the run."""
    sweep: Sequence[str] = ()
    """Settings with several values, each as key=a,b,c."""
    parallel: int | None = None
    """The number of runs of a sweep that train on this machine at the same time."""
    exclude_bad: Sequence[str] = ()
    """Run directories. Nodes that these runs found bad are excluded."""
    dry_run: bool = False
    interactive: bool = False
    debug: bool = False
    pdb: bool = False
    ranks: str | None = None
    """Ranks to simulate, instead of showing a script."""
    gpus_kind: str = "H100"
    again: bool = False
    resume_step: int | None = None


@dataclass(frozen=True)
class Variant:
    """One run of a sweep."""

    overrides: tuple[str, ...] = ()
    suffix: str = ""
    """Added to the run's name and directory: -lr-0.001-seed-2."""


def compose(
    request: SubmitRequest,
    variant: Variant,
    check: Callable[[RunConfig, "NamedDataset"], None] = lambda run, dataset: None,
) -> RunConfig:
    """The settings of one run, with absolute paths.

    Unless it is a --dry-run, the text of data= is tokenized into a dataset after ``check``.
    """
    words = [*request.settings, *request.options]
    if all(is_override(word) for word in request.settings):  # without a settings file
        words.insert(0, paths.literal(DEFAULT))
    words += variant.overrides
    if request.dry_run:
        run, _ = command_line.planned(words, request.typed)
    else:
        run = command_line.resolved_settings(words, request.typed, check)
    run = varied(run, variant)
    job = run.job
    bad = report.bad_nodes(request.exclude_bad)
    if bad:
        between = "@" if job.hostfile else ","  # DeepSpeed's syntax, or Slurm's
        job = replace(job, exclude=between.join(dict.fromkeys([*filter(None, [job.exclude]), *bad])))
    return whole(replace(run, job=job))


def varied(run: RunConfig, variant: Variant) -> RunConfig:
    """``run``, which has the settings of ``variant``, with the variant's name and directory."""
    return replace(run, name=run.name + variant.suffix, out=run.out + variant.suffix)


def unwritten(request: SubmitRequest, runs: Sequence[RunConfig]) -> list[str]:
    """The datasets (data.prefix of ``runs``) that would be written from the text of data= but for --dry-run."""
    words = [*request.settings, *(word for variant in variants(request.sweep) for word in variant.overrides)]
    if not (request.dry_run and command_line.names_data(words)):
        return []
    prefixes = dict.fromkeys(run.data.prefix or "" for run in runs)
    return [prefix for prefix in prefixes if not Path(f"{prefix}.idx").exists()]


def whole(run: RunConfig) -> RunConfig:
    """``run`` with absolute paths."""

    def absolute(path: str) -> str:
        return str(Path(path).absolute())

    job = run.job
    job = replace(job, hostfile=job.hostfile and absolute(job.hostfile), venv=job.venv and absolute(job.venv))
    run = replace(run, kill_switch=run.kill_switch and absolute(run.kill_switch))
    return replace(run, out=absolute(run.out), job=job, data=data.absolute(run.data))


def variants(words: Sequence[str]) -> list[Variant]:
    """The runs for ``words``, each key=a,b,c; one run without words. ConfigError if two would have the same name."""
    axes = [(key, [(value, value) for value in values]) for key, values in map(axis, words)]
    return combinations(axes, f"--sweep {' '.join(words)}")


def combinations(axes: Sequence[tuple[str, Sequence[tuple[str, str]]]], typed: str) -> list[Variant]:
    """A run for each combination of the values in ``axes``.

    ``axes``: for each setting, its values, and how each value appears in the run's name. ``typed``: the user's input,
    for messages. ConfigError if two runs would have the same name.
    """
    keys = [key for key, _ in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{typed}: {key} is given twice; put all its values together")
    chosen = [[(key, *value) for value in values] for key, values in axes]
    every = [_variant(combination) for combination in itertools.product(*chosen)]
    names = [(variant.suffix, *(o for o in variant.overrides if o.startswith(("out=", "name=")))) for variant in every]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{typed}: two runs would be called {''.join(name).lstrip('-')}; change a value")
    return every


def axis(word: str) -> tuple[str, list[str]]:
    """The setting of key=a,b,c and its values; ConfigError for anything else."""
    key, _, text = word.partition("=")
    values = list(_split(text))
    if not is_override(word) or not all(values):
        raise ConfigError(f"--sweep {word!r} is not key=a,b,c, such as optim.lr=1e-4,3e-4")
    return key.strip(), values


def _split(text: str) -> Iterator[str]:
    """``text`` split at commas, except inside brackets."""
    depth = 0
    part = ""
    for character in text:
        if character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and depth <= 0:
            yield part.strip()
            part = ""
        else:
            part += character
    yield part.strip()


def _variant(chosen: Sequence[tuple[str, str, str]]) -> Variant:
    """The run with these settings: key, value, and the value's form in the run's name."""
    named = [(key.rpartition(".")[2], name) for key, _, name in chosen if key not in ("out", "name")]
    suffix = "".join(f"-{key}-{re.sub(r'[^A-Za-z0-9._+-]+', '_', name)}" for key, name in named)
    return Variant(tuple(f"{key}={value}" for key, value, _ in chosen), suffix)
