"""``hpclm train``: train a model, or continue a run."""

import os
import sys

from hpclm.base.errors import ConfigError, UsageError
from hpclm.config.compose import keys_set
from hpclm.launch import process
from hpclm.node import processes
from hpclm.parser import DATA, EPILOG, Parser
from hpclm.preprocess import command_line

HONOURED = ("job.notify", "job.warn_seconds")
"""Settings of job that a training process reads. All others are for the program that starts it."""


def main(settings: list[str], resume_step: int | None, sweep: list[str], parallel: int | None, typed: list[str]) -> int:
    """Train a run, or all runs of a sweep."""
    if sweep and resume_step is not None:
        raise UsageError("--from is for a single run, without --sweep")
    if parallel and not sweep:
        raise UsageError("--parallel is for --sweep")
    run = None if sweep else command_line.planned(settings, typed)[0]
    of_job = [key for key in keys_set([*settings, *sweep]) if key.startswith("job.")]
    ignored = [key for key in of_job if not key.startswith(HONOURED)]
    if ignored:  # a file may have such settings, because hpclm submit may read the same file
        raise ConfigError(
            f"{', '.join(ignored)} would have no effect: hpclm train does not start jobs; use hpclm submit"
        )
    if run is None:
        from hpclm.launch import sweep as launcher  # with NumPy

        return launcher.train(settings, sweep, parallel or 1, typed)
    if command_line.names_data(settings):
        run = command_line.resolved_settings(settings, typed, process.check_before_dataset)
    commanded = sys.argv[-len(typed) :] == typed  # False for calls from a program, which may have started long ago
    began = processes.started(os.getpid()) if commanded else None
    return process.start(run, resume_step=resume_step, began=began)


def parser() -> Parser:
    """The parser of ``hpclm train``."""
    options = Parser(
        prog="hpclm train",
        description="Train a model, or one for each value of a setting. The same command continues what was stopped, killed or "
        "preempted.",
        epilog=f"{DATA}\n\n{EPILOG}",
    )
    options.add_settings("one settings file or preset, and overrides", files=True, nargs="+")
    options.add_from(". A requeued job does this only once")
    options.add_sweep("train")
    return options
