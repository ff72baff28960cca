"""``hpclm.sweep``, ``hpclm.compare`` and ``hpclm.report``: several runs."""

import math
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpclm import extras, files, paths, terminal
from hpclm.api import live, options, values
from hpclm.api.checked import checked
from hpclm.api.dataset import Data
from hpclm.api.functions import composed
from hpclm.api.options import Base, Change, Options
from hpclm.api.run import PATIENCE, Report, Run
from hpclm.config import RunConfig
from hpclm.config.checks import shown
from hpclm.config.fields import as_yaml
from hpclm.errors import ConfigError, HpclmError, Interrupted
from hpclm.launch.jobs import States
from hpclm.rundir import runs as run_folders

if TYPE_CHECKING:
    from pandas import DataFrame

Runs = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A run or several, by their objects, directories, names below runs, or patterns of these."""


@checked
def sweep(
    base: Base,
    values: Mapping[str, Any] | str,
    *changes: Change,
    data: Data | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    steps: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    out: str | os.PathLike[str] | None = None,
    device: str | None = None,
    parallel: int | None = None,
) -> list[Run]:
    """Train a run for each value of a setting, or for each combination of several, one after another in this process.

    >>> runs = hpclm.sweep("small", {"optim.lr": [1e-3, 3e-3]}, data="text.jsonl", steps=200)
    >>> hpclm.compare(runs)
    >>> hpclm.report(runs)

    The same call continues a sweep that was stopped: runs that are done are skipped. All settings are checked before the first run
    starts. A run that fails does not end the others: its error is printed, and its `status` says so.

    Args:
        base: as for `hpclm.train`, like all arguments that are not listed here.
        values: the values of each setting, as {"optim.lr": [1e-3, 3e-3], "seed": [1, 2]}, which is four runs, or "optim.lr=1e-3,3e-3".
        changes: settings of all runs.
        out: the common part of the run directories (out); by default runs/NAME. Each ends in its values: runs/small-lr-0.001.
        parallel: train so many runs at a time, in processes of their own, each on its own GPU or its share of the CPU cores, instead of
            in this process.

    Returns:
        The runs, in the order of the values.

    Raises:
        ConfigError: everything that is wrong with the settings of any run.
        KeyboardInterrupt: after a signal; the run that trained has saved, and no other was started.
    """
    from hpclm.launch import arguments
    from hpclm.launch import sweep as launcher

    if parallel is not None and parallel < 1:
        raise ConfigError(f"parallel={parallel} must be at least 1")
    live.check_main_thread("hpclm.sweep")
    launcher.check_alone()
    axes = _axes(values)
    variants = arguments.combinations(axes, f"the sweep over {', '.join(key for key, _ in axes)}")
    keywords = Options(steps, lr, seed, out, device)
    for variant in variants:  # before a dataset is written
        options.compose(base, [*keywords.changes(), *changes, *variant.overrides])
    composed_runs = [
        arguments.varied(composed(base, (*changes, *variant.overrides), data, tokenizer, keywords), variant)
        for variant in variants
    ]
    runs = launcher.checked(composed_runs)
    if parallel is not None:
        _train_in_processes(runs, parallel)
    else:
        _train_here(runs)
    return [Run(run.out) for run in runs]


@checked
def compare(runs: Runs) -> "DataFrame":
    """A pandas DataFrame with a row for each run, the best first: the settings in which they differ, under their names, and `status`,
    `steps`, `loss` (of the last step), `training_loss` (the mean of the last steps), `validation_loss` (the best), `tokens_per_second`.

    >>> hpclm.compare(runs).plot.scatter("optim.lr", "validation_loss")

    Losses are in nats per token. `diverged` is the step from which a run's loss was not healthy.

    Args:
        runs: runs, their directories, names below runs, or patterns such as "small-lr-*".
    """
    from hpclm.reporting import comparison

    if problem := extras.missing("hpclm.compare", "pandas"):
        raise ConfigError(problem)
    from pandas import DataFrame

    return DataFrame(comparison.rows(States(PATIENCE).of([run_folders.read(path) for path in _paths(runs)])))


@checked
def report(
    runs: Runs,
    output: str | os.PathLike[str] | None = None,
    images: bool = False,
    samples: str | None = None,
) -> Report:
    """Write a page that compares runs, the best first, and show it in a notebook; see `hpclm report`.

    >>> hpclm.report(runs)
    >>> hpclm.report("small-lr-*", output="rates.html")

    Args:
        runs: runs, their directories, names below runs, or patterns such as "small-lr-*".
        output: the page; by default report.html in the current folder, or in the run directory of a single run.
        images: also write the charts as images beside it.
        samples: a text that their models continue.
    """
    from hpclm.reporting.page import Sampler, write

    chosen = _paths(runs)
    if output is not None:
        path = Path(paths.expanded(os.fspath(output)))
    else:
        path = chosen[0] / "report.html" if len(chosen) == 1 else Path("report.html")
    with live.computing() if samples else warnings.catch_warnings():
        sampler: Sampler | None = None
        if samples is not None:
            from hpclm.inference.samples import samples_of_runs

            sampler = samples_of_runs
        return Report(write(chosen, path, images, samples, sampler)[0])


def _axes(swept: Mapping[str, Any] | str) -> list[tuple[str, list[tuple[str, str]]]]:
    """The settings of a sweep with their values, each as text and as it is in a run's name."""
    from hpclm.launch import arguments

    if isinstance(swept, str):
        key, listed = arguments.axis(swept)
        return [(key, [(value, value) for value in listed])]
    if not isinstance(swept, Mapping) or not swept:
        raise ConfigError(
            f'the second argument must be a mapping such as {{"optim.lr": [1e-3, 3e-3]}}, not {shown(swept)}'
        )
    with options.readable("the mapping of values"):
        return [*_flat_axes(swept, "")]


def _flat_axes(swept: Mapping[Any, Any], section: str) -> Iterable[tuple[str, list[tuple[str, str]]]]:
    for key, listed in swept.items():
        name = f"{section}{values.scalar(key)}"
        if not options.KEY.fullmatch(name):
            raise ConfigError(f"unknown setting {shown(name)}")
        if isinstance(listed, Mapping):
            yield from _flat_axes(listed, f"{name}.")
            continue
        try:
            elements = list(listed) if isinstance(listed, range) else values.elements(listed)
        except values.UnfitError:
            raise ConfigError(
                f"{name} must have a list of values, not {shown(listed)}; a setting of all runs comes after the mapping"
            ) from None
        if not elements:
            raise ConfigError(f"{name} has no values")
        yield name, [(_value(name, element), _in_name(element)) for element in elements]


def _value(key: str, value: Any) -> str:
    """One value of a swept setting, as a command line has it."""
    if isinstance(value, Mapping):  # of a whole section
        try:
            return as_yaml(values.setting(value))
        except (values.UnfitError, RecursionError):
            raise ConfigError(f"{key}: {shown(value)} has values that are no settings") from None
    [word] = options.words([{key: value}])
    return word.partition("=")[2]


def _in_name(value: Any) -> str:
    """A value as it is in the name of its run."""
    plain = values.setting(value)
    if isinstance(plain, Mapping):
        return "-".join(f"{key}-{_in_name(inner)}" for key, inner in plain.items())
    if isinstance(plain, float) and math.isfinite(plain):
        return f"{plain:.6g}"
    return plain if isinstance(plain, str) else as_yaml(plain)


def _train_here(runs: list[RunConfig]) -> None:
    """Train runs in this process, one after another."""
    from hpclm.launch.arguments import whole
    from hpclm.launch.done import diverged, nothing_left

    for number, run in enumerate(runs, 1):
        title = f"run {number} of {len(runs)}  {files.shown(run.out)}"
        if ending := nothing_left(run):
            terminal.say(f"{title}: {ending}; skipped", file=sys.stderr)
        elif ending := diverged(whole(run)):
            terminal.say(f"{title}: {ending}; not started again with the same settings", file=sys.stderr)
        else:
            terminal.say(title, file=sys.stderr)
            try:
                live.train(run, None)
            except HpclmError as error:
                terminal.say(f"{title}: {terminal.line(error)}", file=sys.stderr)


def _train_in_processes(runs: list[RunConfig], parallel: int) -> None:
    """Train runs in processes of their own, ``parallel`` at a time."""
    from hpclm.launch import sweep as launcher
    from hpclm.launch.arguments import whole

    at_once = min(parallel, len(runs))
    shares = launcher.shares(at_once, 1, launcher.gpus_here(runs) if at_once > 1 else 0)
    left, _ = launcher.train_all([whole(run) for run in runs], launcher.train_words, shares)
    if left:
        raise Interrupted(f"{len(left)} of {len(runs)} runs are not done; run the same call again to continue")


def _paths(runs: Runs) -> list[Path]:
    """The run directories of ``runs``."""
    single = isinstance(runs, (str, os.PathLike)) or getattr(runs, "ndim", None) == 0
    try:
        given: Iterable[Any] = [runs] if single else list(runs)  # type: ignore[arg-type]
        names = [values.path(run) for run in given]
    except (TypeError, values.UnfitError):
        wrong = shown(runs)
        raise ConfigError(f"runs={wrong} must be runs, their directories or names, or patterns of these") from None
    if not names:
        raise ConfigError("runs is empty; give at least one run")
    return run_folders.choose(map(paths.expanded, names), run_folders.RUNS)
