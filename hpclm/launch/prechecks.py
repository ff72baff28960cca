"""Checks of everything that a start would refuse, as far as they need no GPU and no other processes; before a run is queued."""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from hpclm import config
from hpclm.config import RunConfig
from hpclm.config.engine import ENGINES
from hpclm.config.model import BLOCKS
from hpclm.config.optim import SCHEDULES
from hpclm.errors import ConfigError
from hpclm.registry import lookup

if TYPE_CHECKING:
    from hpclm.data.sources import Source


def check(
    run: RunConfig, data: bool = True, back_to: int | None = None, again: bool = False, there: bool = False
) -> None:
    """ConfigError with every problem.

    ``data``: whether the run reads the data in its settings; ``back_to``: the step of the checkpoint to continue from;
    ``again``: it will follow a job in the queue; ``there``: whether its directory may contain a run to continue.
    """
    found: list[Source | None] = []
    looks: list[Callable[[], object]] = [lambda: _check_names(run)]
    if data and not run.missing():
        from hpclm.data import sources  # imports NumPy

        looks.append(lambda: found.append(sources.check(run, run.plan(run.parallel.model))))
    looks.append(lambda: _check_init_from(run, found[0] if found else None))
    if there:
        looks.append(lambda: _check_history(run, found[0] if found else None, back_to, again))
    problems: list[str] = []
    for look in looks:
        try:
            look()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def _check_names(run: RunConfig) -> None:
    """ConfigError if the user's own code, package.module:Name, cannot be loaded."""
    names: list[tuple[str, str, Mapping[str, str], str]] = [
        ("model.block", run.model.block, BLOCKS, "hpclm.model.gpt"),
        ("optim.schedule", run.optim.schedule, SCHEDULES, "hpclm.optim.schedules"),
        ("engine.name", run.engine.name, ENGINES, "hpclm.engine"),
    ]
    for kind, name, table, module in names:
        if name not in table:  # hpclm's own are there, and some take seconds to load
            found = lookup(kind, name, table, import_module(module).CHECK)
            if kind == "engine.name":
                from hpclm.engine import check_supports

                check_supports(run, found)


def _check_init_from(run: RunConfig, source: "Source | None") -> None:
    """ConfigError if the run cannot start from the checkpoints in its settings; PyTorch is loaded only for those."""
    begins = run.checkpoint.init_from is not None and run.job.dependency is None  # or a job before it may make them
    if not begins and run.checkpoint.resume != "never":
        return
    from hpclm.checkpoint.fingerprint import fingerprint
    from hpclm.checkpoint.init_from import check_init_from

    check_init_from(run, None if source is None else fingerprint(run, source))


def _check_history(run: RunConfig, source: "Source | None", back_to: int | None, again: bool) -> None:
    """ConfigError if the settings do not fit the run's checkpoints, or a job of it that has saved nothing yet."""
    out, path = Path(run.out), Path(run.out) / "config.yaml"
    if back_to is not None or os.path.lexists(out / "checkpoints"):
        from hpclm.checkpoint import resumable  # with NumPy

        found = resumable.candidate(out, back_to)
        resumable.check(found, run, source)
        if found:
            return
    if again and path.is_file():
        from hpclm.checkpoint.fingerprint import check_fingerprint, fingerprint

        check_fingerprint(path, fingerprint(config.load(path), None), fingerprint(run, None))
