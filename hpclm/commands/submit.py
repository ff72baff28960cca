"""``hpclm submit``: train on Slurm, on the machines of a hostfile, or locally."""

import argparse
import re
from typing import Any

from hpclm.base import paths
from hpclm.base.errors import UsageError
from hpclm.config import JobConfig
from hpclm.config.fields import docs
from hpclm.config.sbatch import OPTIONS, Option
from hpclm.launch import submit
from hpclm.launch.arguments import SubmitRequest
from hpclm.parser import DATA, EPILOG, Parser, completed, setting

DEEPSPEEDS = {"nodelist": ("--include", "-i")}
"""Option of sbatch -> DeepSpeed's names for it."""


def _flags(option: Option) -> tuple[str, ...]:
    """The names of an option of sbatch in hpclm submit."""
    names = [f"--{option.name}", *DEEPSPEEDS.get(option.name, ())]
    if option.short:
        names.insert(1, f"-{option.short}")
    return tuple(names)


FLAGS = {_flags(option): option.key.removeprefix("job.") for option in OPTIONS.values() if option.offered} | {
    ("--gpus",): "gpus",  # not -G, which is per job in sbatch
    ("--template",): "template",
    ("--cluster",): "cluster",
    ("--hostfile", "-H"): "hostfile",
}
"""Options -> settings of job."""
MODES = {
    "--dry-run": "print the job script, and write nothing",
    "--interactive": "start the processes in the current allocation (salloc)",
    "--debug": "run one process in the foreground, with additional checks",
}
METAVARS = {"nodes": "N", "gpus": "N", "cpus_per_task": "N", "hostfile": "FILE", "template": "NAME|FILE", "mem": "SIZE"}


def main(**values: Any) -> int:
    """Submit or start the runs; returns the exit code."""
    return submit.start(request(**values))


def request(settings: list[str], config: str | None, job: list[str], **options: Any) -> SubmitRequest:
    """The request for one job or several; UsageError for options that exclude each other."""
    files = [paths.literal(config)] if config else []
    asked = SubmitRequest(settings=[*files, *settings], options=job, **options)
    if asked.ranks and not asked.dry_run:
        raise UsageError("--ranks is for --dry-run")
    if asked.pdb and not asked.debug:
        raise UsageError("--pdb is for --debug")
    if asked.resume_step is not None and (asked.debug or asked.sweep or asked.again):
        raise UsageError("--from is for a single run that is not running; it excludes --debug, --sweep and --again")
    return asked


def parser() -> Parser:
    """The parser of ``hpclm submit``."""
    explained = docs(JobConfig)
    options = Parser(
        prog="hpclm submit",
        description="Train on Slurm, on the machines of a hostfile, or locally. Settings are checked before anything is "
        "submitted. The same command continues the run.",
        epilog=f"{DATA}\n\n{EPILOG}",
        allow_abbrev=False,
    )
    add = options.add_argument
    options.add_settings("settings file or preset (default: debug), overrides", files=True)
    add("--config", type=paths.option, metavar="FILE", help="the settings file, as an option")
    job = options.add_argument_group("resources", "Each option overrides the setting job.NAME.")
    for flags, name in FLAGS.items():
        text = explained.get(name, f"job.{name}").partition(". ")[0].replace("%", "%%")
        job.add_argument(*flags, **setting(f"job.{name}"), metavar=METAVARS.get(name, "TEXT"), help=text)
    more = "another option of sbatch: reservation=course"
    job.add_argument("--sbatch", **setting("job.options") | {"type": _of_sbatch}, metavar="NAME[=VALUE]", help=more)
    bad = "exclude nodes that failed the preflight checks of this run, or corrupted its state"
    nodes: dict[str, Any] = dict(type=paths.option, action="append", default=[], metavar="RUN")
    completed(job.add_argument("--exclude-bad", **nodes, help=bad), "runs")
    options.add_sweep()
    how = options.add_argument_group("how").add_mutually_exclusive_group()
    for name, text in MODES.items():
        how.add_argument(name, action="store_true", help=text)
    several_ranks = (
        "with --dry-run: build these ranks here, without a GPU, and trace a step, instead of printing the script"
    )
    add("--ranks", type=_ranks, metavar="0,511", help=several_ranks)
    options.add_gpus_kind("with --ranks: kind of GPU, for batch.micro_size=auto (H100)")
    add("--pdb", action="store_true", help="with --debug: start Python's debugger at an exception")
    add("--again", action="store_true", help="submit even if a job of the run is queued, to continue after it")
    options.add_from()
    return options


def _of_sbatch(text: str) -> str:
    name, _, value = text.removeprefix("--").partition("=")
    return f"job.options.{name}={value}"


def _ranks(text: str) -> str:
    if not re.fullmatch(r"\s*\d+\s*(-\s*\d+\s*)?(,\s*\d+\s*(-\s*\d+\s*)?)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be ranks such as 0,511 or 0-3")
    return text
