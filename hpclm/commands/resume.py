"""``hpclm resume``: submit runs again with their settings and the size of their last jobs, optionally with changes."""

import argparse
from pathlib import Path
from typing import Any

from hpclm import cli
from hpclm.base import paths
from hpclm.base.errors import UsageError
from hpclm.launch import resume
from hpclm.node import environment
from hpclm.parser import SEVERAL, Parser
from hpclm.rundir import runs


def main(run: str, runs_folder: Path, resume_step: str | None, rest: list[str]) -> int:
    """Submit runs again. ``rest``: more runs, then changes."""
    named, changes = resume.split([run, *rest], runs_folder)
    if resume_step is not None:
        changes = ["--from", resume_step, *changes]
    chosen = [runs.read_run(out) for out in runs.choose(named, runs_folder)]
    if len(chosen) > 1 and "--from" in changes:
        raise UsageError("--from takes one run: several runs have different steps")
    return resume.resume(chosen, changes, _check, cli.function("submit"))


def _check(words: list[str]) -> None:
    """ConfigError, or exit code 2, for words that ``hpclm submit`` refuses for any run."""
    options = cli.parser("submit")
    options.prog = "hpclm resume"

    def check(config: str, settings: list[str], job: list[str], **others: Any) -> None:
        environment.settings_with_site([paths.literal(config), *settings, *job], words)

    options.call(check, words)


def parser() -> Parser:
    """The parser of ``hpclm resume``."""
    options = Parser(
        prog="hpclm resume",
        intermixed=False,
        usage="hpclm resume [-h] [--runs FOLDER] RUN [RUN ...] [--from STEP] [option of hpclm submit ...] [key=value ...]",
        description="Submit runs again: each continues from its last checkpoint, with its own settings and as many nodes and GPUs as "
        "before. Everything after the runs changes that, and is passed to hpclm submit: hpclm resume RUN --nodes 4",
        epilog="--from STEP continues from an older checkpoint (hpclm checkpoints RUN lists them); newer ones are set aside.",
    )
    options.add_run(SEVERAL)
    options.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="what to change, as hpclm submit takes it"
    )
    options.add_argument("--from", dest="resume_step", metavar="STEP", help=argparse.SUPPRESS)  # for --from before RUN
    return options
