"""``hpclm resume``: submit runs again, with their settings and the size of their last jobs, and with changes if any."""

import argparse

from hpclm import cli, paths
from hpclm.launch import resume
from hpclm.node import environment
from hpclm.parser import SEVERAL, Parser
from hpclm.rundir import runs


def main(argv: list[str]) -> int:
    """``hpclm resume``."""
    options = parser()
    args = options.parse_args(argv)
    named, changes = resume.split([args.run, *args.rest], args.runs)
    changes = [*(["--from", args.resume_step] if args.resume_step is not None else []), *changes]
    chosen = [runs.read(out) for out in runs.choose(named, args.runs)]
    if len(chosen) > 1 and "--from" in changes:
        options.error("--from takes one run: several runs have different steps")
    return resume.resume(chosen, changes, _check, cli.function("submit"))


def _check(words: list[str]) -> None:
    """ConfigError, or the end with 2, for arguments of ``hpclm submit`` that no run takes."""
    options = cli.parser("submit")
    options.prog = "hpclm resume"
    args = options.parse_intermixed_args(words)
    job = [f"{key}={value}" for key, value in vars(args).items() if key.startswith("job.") and value is not None]
    environment.settings([paths.literal(args.config), *args.settings, *job], words)


def parser() -> Parser:
    """The parser of ``hpclm resume``."""
    options = Parser(
        prog="hpclm resume",
        usage="hpclm resume [-h] [--runs FOLDER] RUN [RUN ...] [--from STEP] [option of hpclm submit ...] [key=value ...]",
        description="Submit runs again: each continues from its last checkpoint, with its own settings and as many nodes and GPUs as "
        "before. Everything after the runs changes that, and is passed to hpclm submit: hpclm resume RUN --nodes 4",
        epilog="--from STEP continues from an older checkpoint (hpclm checkpoints RUN lists them); newer ones are set aside.",
    )
    options.add_runs_folder()
    options.add_run(SEVERAL)
    options.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="what to change, as hpclm submit takes it"
    )
    options.add_argument("--from", dest="resume_step", metavar="STEP", help=argparse.SUPPRESS)  # before RUN, too
    return options
