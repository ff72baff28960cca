"""``hpclm train``: train a model, or continue a run."""

import argparse
import os
import sys

from hpclm.config.compose import named
from hpclm.datasets import command_line
from hpclm.errors import ConfigError
from hpclm.launch import process
from hpclm.node import processes
from hpclm.parser import DATA, EPILOG, Parser, step

HONOURED = ("job.notify", "job.warn_seconds")
"""Settings of the section job that a training process follows; all others are for what starts it."""


def main(argv: list[str]) -> int:
    """``hpclm train``."""
    options = parser()
    args = options.parse_intermixed_args(argv)
    if args.sweep and args.resume_step is not None:
        options.error("--from is for a single run, without --sweep")
    if args.parallel and not args.sweep:
        options.error("--parallel is for --sweep")
    settings = None if args.sweep else command_line.planned(args.settings, argv)[0]
    ignored = [
        key for key in named([*args.settings, *args.sweep]) if key.startswith("job.") and not key.startswith(HONOURED)
    ]
    if ignored:  # in a file it is for hpclm submit, which may read the same file
        raise ConfigError(
            f"{', '.join(ignored)} would have no effect: hpclm train does not start jobs; use hpclm submit"
        )
    if settings is None:
        from hpclm.launch import sweep  # with NumPy

        return sweep.train(args.settings, args.sweep, args.parallel or 1, argv)
    if command_line.names_data(args.settings):
        settings = command_line.settings(args.settings, argv, process.check_before_dataset)
    commanded = sys.argv[-len(argv) :] == argv  # otherwise a program, which may be old, calls the verb
    began = processes.started(os.getpid()) if commanded else None
    return process.start(settings, resume_step=args.resume_step, began=began)


def parser() -> Parser:
    """The parser of ``hpclm train``."""
    options = Parser(
        prog="hpclm train",
        description="Train a model, or one for each value of a setting. The same command continues what was stopped, killed or "
        "preempted.",
        epilog=f"{DATA}\n\n{EPILOG}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    files = "one settings file or preset, and overrides"
    options.add_settings(files, "presets", nargs="+", metavar="FILE | key=value")
    options.add_argument(
        "--from",
        dest="resume_step",
        type=step,
        metavar="STEP",
        help="continue from the checkpoint of this step; newer ones are set aside, not deleted. A requeued job does "
        "this only once",
    )
    options.add_sweep("train")
    return options
