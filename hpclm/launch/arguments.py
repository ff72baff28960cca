"""The command line of ``hpclm submit``, and the settings that it gives: one run, or one for each value of a sweep."""

import argparse
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpclm import config, paths, shipped
from hpclm.config import JobConfig, RunConfig
from hpclm.config.compose import is_override
from hpclm.config.fields import docs
from hpclm.config.job import TEMPLATES
from hpclm.diagnostics import report
from hpclm.errors import ConfigError
from hpclm.node import environment
from hpclm.parser import EPILOG, Parser, completed, step
from hpclm.training import records

# Command-line options -> job settings. Short options are sbatch's.
FLAGS = {
    ("--nodes", "-N"): "nodes",
    ("--gpus",): "gpus",  # no -G, because sbatch counts those per job
    ("--time", "-t"): "time",
    ("--partition", "-p"): "partition",
    ("--account", "-A"): "options.account",
    ("--qos", "-q"): "options.qos",
    ("--constraint", "-C"): "options.constraint",
    ("--exclude", "-x"): "exclude",
    ("--nodelist", "-w", "--include", "-i"): "nodelist",
    ("--mem",): "mem",
    ("--cpus-per-task", "-c"): "cpus_per_task",
    ("--job-name", "-J"): "options.job-name",
    ("--dependency", "-d"): "options.dependency",
    ("--template",): "template",
    ("--cluster",): "cluster",
    ("--hostfile", "-H"): "hostfile",
}
MODES = {
    "--dry-run": "print the job script, and write nothing",
    "--interactive": "start the processes in the current allocation (salloc)",
    "--debug": "run one process in the foreground, with additional checks",
}
DEFAULT = shipped.folder("configs") / "debug.yaml"
METAVARS = {"nodes": "N", "gpus": "N", "cpus_per_task": "N", "hostfile": "FILE", "template": "NAME|FILE", "mem": "SIZE"}


@dataclass(frozen=True)
class Variant:
    """One run of a sweep."""

    overrides: tuple[str, ...] = ()
    suffix: str = ""
    """Added to the run's name and directory: -lr-0.001-seed-2."""


def parser() -> Parser:
    """The parser of ``hpclm submit``."""
    explained = docs(JobConfig)
    options = Parser(
        prog="hpclm submit",
        description="Train on Slurm, on the machines of a hostfile, or locally. Settings are checked before anything is "
        "submitted. The same command continues the run.",
        epilog=EPILOG,
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
    values = "submit a separate run for each value; for each combination if repeated"
    several = options.add_argument_group("several runs")
    several.add_argument("--sweep", "--array", metavar="key=a,b,c", help=values, **repeated)
    how = options.add_argument_group("how").add_mutually_exclusive_group()
    for name, text in MODES.items():
        how.add_argument(name, action="store_true", help=text)
    several_ranks = (
        "with --dry-run: build these ranks here, without a GPU, and trace a step, instead of printing the script"
    )
    add("--ranks", metavar="0,511", help=several_ranks)
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


def compose(args: argparse.Namespace, variant: Variant, typed: Sequence[str]) -> RunConfig:
    """The settings of one run, with absolute paths; ``typed`` is the command line."""
    words = [*args.settings]
    if args.config:
        words.insert(0, paths.literal(args.config))
    if not any(not config.compose.is_override(word) for word in words):
        words.insert(0, paths.literal(DEFAULT))
    given = {key: value for key, value in vars(args).items() if key.startswith("job.") and value is not None}
    words += [f"{key}={value}" for key, value in given.items()]
    for word in args.sbatch:
        name, _, value = word.removeprefix("--").partition("=")
        words.append(f"job.options.{name}={value}")
    run = environment.settings([*words, *variant.overrides], typed)
    if variant.suffix:
        run = replace(run, name=run.name + variant.suffix, out=run.out + variant.suffix)
    job, bad = run.job, report.bad_nodes(args.exclude_bad)
    if bad:
        between = "@" if job.hostfile else ","  # DeepSpeed's syntax, or Slurm's
        job = replace(job, exclude=between.join(dict.fromkeys([*filter(None, [job.exclude]), *bad])))
    return whole(replace(run, job=job))


def whole(run: RunConfig) -> RunConfig:
    """``run`` with absolute paths."""

    def absolute(path: str) -> str:
        return str(Path(path).absolute())

    job = run.job
    job = replace(job, hostfile=job.hostfile and absolute(job.hostfile), venv=job.venv and absolute(job.venv))
    if job.template not in TEMPLATES:
        job = replace(job, template=absolute(job.template))
    run = replace(run, kill_switch=run.kill_switch and absolute(run.kill_switch))
    return replace(run, out=absolute(run.out), job=job, data=records.absolute(run.data))


def variants(words: Sequence[str]) -> list[Variant]:
    """The runs for ``words``, each key=a,b,c; one without words. ConfigError if two would have the same name."""
    axes = [[(key, value) for value in values] for key, values in map(_axis, words)]
    found = [_variant(chosen) for chosen in itertools.product(*axes)]
    names = [(each.suffix, *(o for o in each.overrides if o.startswith(("out=", "name=")))) for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ConfigError(
            f"--sweep {' '.join(words)}: two runs would be called {''.join(twice).lstrip('-')}; change a value"
        )
    return found


def _axis(word: str) -> tuple[str, list[str]]:
    key, _, text = word.partition("=")
    values = list(_split(text))
    if not is_override(word) or not all(values):
        raise ConfigError(f"--sweep {word!r} is not key=a,b,c, such as optim.lr=1e-4,3e-4")
    return key.strip(), values


def _split(text: str) -> Iterator[str]:
    """``text`` split at commas, except inside brackets."""
    depth, part = 0, ""
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth <= 0:
            yield part.strip()
            part = ""
        else:
            part += character
    yield part.strip()


def _variant(chosen: Sequence[tuple[str, str]]) -> Variant:
    named = [(key.rpartition(".")[2], value) for key, value in chosen if key not in ("out", "name")]
    suffix = "".join(f"-{key}-{re.sub(r'[^A-Za-z0-9._+-]+', '_', value)}" for key, value in named)
    return Variant(tuple(f"{key}={value}" for key, value in chosen), suffix)
