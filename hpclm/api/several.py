"""``hpclm.sweep``, ``hpclm.compare`` and ``hpclm.report``: several runs."""

import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpclm.api import live
from hpclm.api.checked import PATH, UnfitError, checked, fitted, plain, positive
from hpclm.api.dataset import Data
from hpclm.api.options import Base, Change, RunKeywords, leaves, readable, word
from hpclm.api.run import PATIENCE, Report, Run
from hpclm.base import extras, files, paths, terminal
from hpclm.base.errors import ConfigError, HpclmError, Interrupted
from hpclm.config import RunConfig
from hpclm.config.checks import shown
from hpclm.config.fields import as_word
from hpclm.launch.jobs import States
from hpclm.rundir import runs as run_folders

if TYPE_CHECKING:
    from pandas import DataFrame

Runs = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""One run or several: Run objects, directories, names below runs, or patterns of names."""


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

    The same call continues a stopped sweep and skips finished runs. All settings are checked before the first run starts. If a run
    fails, its error is printed, its `status` is "failed", and the others continue.

    Args:
        base: see `hpclm.train`, also for all arguments that are not listed here.
        values: the values of each setting: {"optim.lr": [1e-3, 3e-3], "seed": [1, 2]} for four runs, or "optim.lr=1e-3,3e-3".
        changes: settings of all runs.
        out: the common part of the run directories (out); by default runs/NAME. Each ends in its values: runs/small-lr-0.001.
        parallel: number of runs to train at a time, in separate processes with separate GPUs or CPU cores. None: train in this
            process.

    Returns:
        The runs, in the order of the values.

    Raises:
        ConfigError: all problems with the settings of any run.
        KeyboardInterrupt: after a signal; the current run has saved, and no other run was started.
    """
    from hpclm.launch import arguments
    from hpclm.launch import sweep as launcher

    positive(parallel=parallel)
    live.check_main_thread("hpclm.sweep")
    launcher.check_alone()
    axes = _axes(values)
    variants = arguments.combinations(axes, f"the sweep over {', '.join(key for key, _ in axes)}")
    options = RunKeywords(steps, lr, seed, out, device, data=data, tokenizer=tokenizer)
    for variant in variants:  # refuse wrong settings before a dataset is written
        options.compose(base, [*changes, *variant.overrides])
    composed = [options.run(base, [*changes, *variant.overrides]) for variant in variants]
    runs = launcher.checked([arguments.varied(run, variant) for run, variant in zip(composed, variants, strict=True)])
    if parallel is not None:
        _train_in_processes(runs, parallel)
    else:
        _train_here(runs)
    return [Run(run.out) for run in runs]


@checked
def compare(runs: Runs) -> "DataFrame":
    """A pandas DataFrame with a row for each run, the best first.

    Its columns are the settings that differ between the runs, and `status`, `steps`, `loss` (last step), `training_loss` (mean of the
    last steps), `validation_loss` (the best), its `bits_per_byte` and `tokens_per_second`.

    >>> hpclm.compare(runs).plot.scatter("optim.lr", "validation_loss")

    Losses are in nats per token. `diverged` is the first step of an unhealthy loss.

    Args:
        runs: runs, their directories, names below runs, or patterns such as "small-lr-*".
    """
    from hpclm.reporting import comparison

    if problem := extras.missing("hpclm.compare", "pandas"):
        raise ConfigError(problem)
    from pandas import DataFrame

    return DataFrame(comparison.rows(States(PATIENCE).of([run_folders.read_run(path) for path in _paths(runs)])))


@checked
def report(runs: Runs, output: str | os.PathLike[str] | None = None, samples: str | None = None) -> Report:
    """Write a page that compares runs, the best first, and show it in a notebook; see `hpclm report`.

    >>> hpclm.report(runs)
    >>> hpclm.report("small-lr-*", output="rates.html")

    Args:
        runs: runs, their directories, names below runs, or patterns such as "small-lr-*".
        output: the page, or a folder for the page and images of its charts; by default report.html in the current folder, or in the run
            directory of a single run.
        samples: a text that their models continue.
    """
    chosen = _paths(runs)
    if output is None:
        output = chosen[0] / "report.html" if len(chosen) == 1 else "report.html"
    return Report.written(chosen, output, samples)


def _axes(swept: Mapping[str, Any] | str) -> list[tuple[str, list[tuple[str, str]]]]:
    """The settings of a sweep, each with its values as pairs: the text of the setting, and the text in a run's name."""
    from hpclm.launch import arguments

    if isinstance(swept, str):
        key, listed = arguments.axis(swept)
        return [(key, [(value, value) for value in listed])]
    if not isinstance(swept, Mapping) or not swept:
        raise ConfigError(
            f'the second argument must be a mapping such as {{"optim.lr": [1e-3, 3e-3]}}, not {shown(swept)}'
        )
    with readable("the mapping of values"):
        return [_axis(key, listed) for key, listed in leaves(swept)]


def _axis(key: str, listed: Any) -> tuple[str, list[tuple[str, str]]]:
    """A setting of a sweep with its values; see _axes."""
    try:
        elements = list(listed) if isinstance(listed, range) else plain(listed)
    except UnfitError:
        elements = None
    if not isinstance(elements, list):
        raise ConfigError(
            f"{key} must have a list of values, not {shown(listed)}; pass settings that all runs share after the mapping"
        )
    if not elements:
        raise ConfigError(f"{key} has no values")
    return key, [(word(key, element), _in_name(element)) for element in elements]


def _in_name(value: Any) -> str:
    if isinstance(value, Mapping):
        return "-".join(f"{key}-{_in_name(inner)}" for key, inner in value.items())
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    return as_word(value)


def _train_here(runs: list[RunConfig]) -> None:
    from hpclm.launch.arguments import whole
    from hpclm.launch.done import diverged, nothing_left

    for number, run in enumerate(runs, 1):
        title = f"run {number} of {len(runs)}  {files.shown(run.out)}"
        done = nothing_left(run)
        if done:
            terminal.say(f"{title}: {done}; skipped", file=sys.stderr)
            continue
        failed = diverged(whole(run))
        if failed:
            terminal.say(f"{title}: {failed}; not started again with the same settings", file=sys.stderr)
            continue
        terminal.say(title, file=sys.stderr)
        try:
            live.train(run, None)
        except HpclmError as error:
            terminal.say(f"{title}: {terminal.line(error)}", file=sys.stderr)


def _train_in_processes(runs: list[RunConfig], parallel: int) -> None:
    """Train each run in a separate process, ``parallel`` at a time."""
    from hpclm.launch import sweep as launcher
    from hpclm.launch.arguments import whole

    at_once = min(parallel, len(runs))
    shares = launcher.shares_here(at_once, 1, runs)
    left, _ = launcher.train_all([whole(run) for run in runs], launcher.train_words, shares)
    if left:
        raise Interrupted(f"{len(left)} of {len(runs)} runs are not done; run the same call again to continue")


def _paths(runs: Runs) -> list[Path]:
    single = isinstance(runs, (str, os.PathLike)) or getattr(runs, "ndim", None) == 0
    try:
        given: Iterable[Any] = [runs] if single else list(runs)  # type: ignore[arg-type]
        names = [fitted(run, PATH) for run in given]
    except (TypeError, UnfitError):
        wrong = shown(runs)
        raise ConfigError(f"runs={wrong} must be runs, their directories or names, or patterns of these") from None
    if not names:
        raise ConfigError("runs is empty; give at least one run")
    return run_folders.choose(map(paths.expanded, names), run_folders.RUNS)
