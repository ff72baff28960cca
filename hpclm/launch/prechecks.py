"""Checks of everything that a start would refuse, as far as they need no GPU and no other processes; before a run is queued."""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    run: RunConfig, data: bool = True, resume_step: int | None = None, queued: bool = False, continues: bool = False
) -> None:
    """ConfigError with every problem.

    ``data``: whether the run reads the data in its settings; ``resume_step``: the step of the checkpoint to continue from;
    ``queued``: it will follow a job in the queue; ``continues``: its directory may contain a run to continue.
    """
    problems: list[str] = []

    def collect(check: Callable[[], Any]) -> Any:
        try:
            return check()
        except ConfigError as error:
            problems.extend(error.problems)

    collect(lambda: _check_names(run))
    source: Source | None = None
    if data and not run.missing():
        from hpclm.data import sources  # imports NumPy

        source = collect(lambda: sources.check(run, run.plan(run.parallel.model)))
    collect(lambda: _check_init_from(run, source))
    if continues:
        collect(lambda: _check_history(run, source, resume_step, queued))
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
            loaded = lookup(kind, name, table, import_module(module).CHECK)
            if kind == "engine.name":
                from hpclm.engine import check_supports

                check_supports(run.engine, run.parallel, run.optim, loaded)


def _check_init_from(run: RunConfig, source: "Source | None") -> None:
    """ConfigError if the run cannot start from checkpoint.init_from; PyTorch is loaded only for that."""
    if run.checkpoint.init_from is None or "dependency" in run.job.options:  # a job before it may make the checkpoint
        return
    from hpclm.checkpoint.fingerprint import fingerprint
    from hpclm.checkpoint.init_from import check_init_from

    check_init_from(run, None if source is None else fingerprint(run, source))


def _check_history(run: RunConfig, source: "Source | None", resume_step: int | None, queued: bool) -> None:
    """ConfigError if the settings do not fit the run's checkpoints, or a job of it that has saved nothing yet."""
    out, path = Path(run.out), Path(run.out) / "config.yaml"
    if resume_step is not None or os.path.lexists(out / "checkpoints"):
        from hpclm.checkpoint import resumable  # with NumPy

        checkpoint = resumable.candidate(out, resume_step)
        resumable.check(checkpoint, run, source)
        if checkpoint:
            return
    if queued and path.is_file():
        from hpclm.checkpoint.fingerprint import check_fingerprint, fingerprint

        check_fingerprint(path, fingerprint(config.load(path), None), fingerprint(run, None))
