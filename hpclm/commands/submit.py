"""``hpclm submit``: train on Slurm, on the machines of a hostfile, or locally."""

import argparse
import re
from collections.abc import Sequence
from typing import Any

from hpclm import paths
from hpclm.config import JobConfig
from hpclm.config.fields import docs
from hpclm.config.sbatch import OPTIONS
from hpclm.launch import submit
from hpclm.launch.arguments import Request
from hpclm.node.gpus import kind_named
from hpclm.parser import DATA, EPILOG, Parser, completed, step

DEEPSPEEDS = {"nodelist": ("--include", "-i")}
"""DeepSpeed's names of options of sbatch."""
FLAGS = {
    **{
        (
            f"--{option.name}",
            *([f"-{option.short}"] if option.short else []),
            *DEEPSPEEDS.get(option.name, ()),
        ): option.key.removeprefix("job.")
        for option in OPTIONS.values()
        if option.offered
    },
    ("--gpus",): "gpus",  # no -G, because sbatch counts those per job
    ("--template",): "template",
    ("--cluster",): "cluster",
    ("--hostfile", "-H"): "hostfile",
}
"""Command-line options -> settings of job."""
MODES = {
    "--dry-run": "print the job script, and write nothing",
    "--interactive": "start the processes in the current allocation (salloc)",
    "--debug": "run one process in the foreground, with additional checks",
}
METAVARS = {"nodes": "N", "gpus": "N", "cpus_per_task": "N", "hostfile": "FILE", "template": "NAME|FILE", "mem": "SIZE"}


def main(argv: list[str]) -> int:
    """``hpclm submit``."""
    return submit.start(request(argv))


def request(argv: Sequence[str]) -> Request:
    """What the arguments ask for; exits with 2 if they are contradictory."""
    options = parser()
    args = options.parse_intermixed_args(argv)
    if args.ranks and not args.dry_run:
        options.error("--ranks is for --dry-run")
    if args.ranks:
        with options.mistakes():
            kind_named(args.gpus_kind)
    if args.pdb and not args.debug:
        options.error("--pdb is for --debug")
    if args.resume_step is not None and (args.debug or args.sweep or args.again):
        options.error("--from is for a single run that is not running; it excludes --debug, --sweep and --again")
    job = [f"{key}={value}" for key, value in vars(args).items() if key.startswith("job.") and value is not None]
    for word in args.sbatch:
        name, _, value = word.removeprefix("--").partition("=")
        job.append(f"job.options.{name}={value}")
    return Request(
        settings=[*([paths.literal(args.config)] if args.config else []), *args.settings],
        options=job,
        typed=argv,
        **{name: getattr(args, name) for name in ("sweep", "exclude_bad", "dry_run", "interactive", "debug", "pdb")},
        **{name: getattr(args, name) for name in ("parallel", "ranks", "gpus_kind", "again", "resume_step")},
    )


def parser() -> Parser:
    """The parser of ``hpclm submit``."""
    explained = docs(JobConfig)
    options = Parser(
        prog="hpclm submit",
        description="Train on Slurm, on the machines of a hostfile, or locally. Settings are checked before anything is "
        "submitted. The same command continues the run.",
        epilog=f"{DATA}\n\n{EPILOG}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = options.add_argument
    files = "settings file or preset (default: debug), overrides"
    options.add_settings(files, "presets", metavar="FILE | key=value")
    add("--config", type=paths.option, metavar="FILE", help="the settings file, as an option")
    job = options.add_argument_group("resources", "Each option overrides the setting job.NAME.")
    for flags, name in FLAGS.items():
        text = explained.get(name, f"job.{name}").partition(". ")[0].replace("%", "%%")
        job.add_argument(*flags, dest=f"job.{name}", metavar=METAVARS.get(name, "TEXT"), help=text)
    repeated: dict[str, Any] = dict(action="append", default=[])
    more = "another option of sbatch: reservation=course"
    job.add_argument("--sbatch", metavar="NAME[=VALUE]", help=more, **repeated)
    bad = "exclude nodes that failed the preflight checks of this run, or corrupted its state"
    completed(job.add_argument("--exclude-bad", type=paths.option, metavar="RUN", help=bad, **repeated), "runs")
    options.add_sweep()
    how = options.add_argument_group("how").add_mutually_exclusive_group()
    for name, text in MODES.items():
        how.add_argument(name, action="store_true", help=text)
    several_ranks = (
        "with --dry-run: build these ranks here, without a GPU, and trace a step, instead of printing the script"
    )
    add("--ranks", type=_ranks, metavar="0,511", help=several_ranks)
    add(
        "--gpus-kind",
        default="H100",
        metavar="KIND",
        help="with --ranks: kind of GPU, for batch.micro_size=auto (H100)",
    )
    add("--pdb", action="store_true", help="with --debug: start Python's debugger at an exception")
    add("--again", action="store_true", help="submit even if a job of the run is queued, to continue after it")
    back = "continue from the checkpoint of this step; newer ones are set aside, not deleted"
    add("--from", dest="resume_step", type=step, metavar="STEP", help=back)
    return options


def _ranks(text: str) -> str:
    if not re.fullmatch(r"\s*\d+\s*(-\s*\d+\s*)?(,\s*\d+\s*(-\s*\d+\s*)?)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be ranks such as 0,511 or 0-3")
    return text
