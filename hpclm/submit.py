"""The verb ``hpclm submit``: check settings, then train on Slurm, on other machines with mpirun, or locally."""

import argparse
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from hpclm import cli, config, extras, files, shipped
from hpclm.config import JobConfig, RunConfig, show
from hpclm.config.job import TEMPLATES, seconds_of
from hpclm.config.length import planned_inside_warmup
from hpclm.diagnostics import report
from hpclm.errors import ConfigError, HpclmError, LockedError
from hpclm.launch import local, sbatch, script, send, sweep, visible
from hpclm.launch.options import set_in
from hpclm.node import gpus, notify, secrets
from hpclm.rundir import folder, submissions
from hpclm.rundir import runs as folders
from hpclm.rundir.status import span, status_of
from hpclm.terminal import say
from hpclm.training import records

# Command-line options -> job settings. Short options are sbatch's.
FLAGS = {
    ("--nodes", "-N"): "nodes",
    ("--gpus",): "gpus",  # no -G, because sbatch counts those per job
    ("--time", "-t"): "time",
    ("--partition", "-p"): "partition",
    ("--account", "-A"): "account",
    ("--qos", "-q"): "qos",
    ("--constraint", "-C"): "constraint",
    ("--exclude", "-x"): "exclude",
    ("--nodelist", "-w", "--include", "-i"): "nodelist",
    ("--mem",): "mem",
    ("--cpus-per-task", "-c"): "cpus_per_task",
    ("--job-name", "-J"): "name",
    ("--dependency", "-d"): "dependency",
    ("--template",): "template",
    ("--cluster",): "cluster",
    ("--hostfile", "-H"): "hostfile",
}
MODES = {
    "--dry-run": "print the job script, and write nothing",
    "--interactive": "start the processes in the current allocation (salloc)",
    "--debug": "run one process in the foreground, with additional checks",
}
STARTED_BY = {"local": "hpclm.launch.local", "mpirun": "hpclm.launch.mpi", "interactive": "hpclm.launch.srun"}
DEFAULT = shipped.folder("configs") / "debug.yaml"
METAVARS = {"nodes": "N", "gpus": "N", "cpus_per_task": "N", "hostfile": "FILE", "template": "NAME|FILE", "mem": "SIZE"}


def main(argv: list[str]) -> int:
    """``hpclm submit``."""
    parser = _parser()
    args = parser.parse_intermixed_args(argv)
    if args.ranks and not args.dry_run:
        parser.error("--ranks is for --dry-run")
    if args.pdb and not args.debug:
        parser.error("--pdb is for --debug")
    if args.back_to is not None and (args.debug or args.sweep or args.again):
        parser.error("--from is for a single run that is not running; it excludes --debug, --sweep and --again")
    runs = [_compose(args, variant, argv) for variant in sweep.variants(args.sweep)]
    command = secrets.Redactor().words(["hpclm", "submit", *argv])
    where = _where(args, runs[0].job)
    if len(runs) == 1 and where != "debug" and args.back_to is None and _is_toy(args):
        runs = [_not_done(runs[0])]
    if len(runs) > 1 and where != "slurm":
        raise ConfigError(f"--sweep needs Slurm, not {where}: start the runs one after another")
    for run in runs:
        check(run, where, args.again, args.back_to)
        if where == "slurm" and (short := planned_inside_warmup(run)):  # others start at once, and say so themselves
            say(f"warning: {short}", file=sys.stderr)
    if where == "slurm":
        visible.warn(runs[0])
    scripts = [_script(run) for run in runs] if where == "slurm" else []
    if where == "slurm" and len(runs) == 1 and args.back_to is None:
        refuse_done(runs[0])
    if where == "slurm":
        _say_where(runs)
    if args.ranks:
        return _ranks(runs, args.ranks, args.gpus_kind)
    if args.dry_run:
        return _show(where, runs, scripts)
    if where == "debug":
        return _debug(runs[0], args.pdb)
    if where != "slurm":
        return _here(where, runs, command, args.back_to)
    return _submit(runs, scripts, command, args.again, args.back_to)


def _parser() -> argparse.ArgumentParser:
    explained = show.docs(JobConfig)
    parser = cli.Parser(
        prog="hpclm submit",
        description="Train on Slurm, on the machines of a hostfile, or locally. Settings are checked before anything is "
        "submitted. The same command continues the run.",
        epilog=cli.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("settings", nargs="*", metavar="FILE | key=value", help="settings file or preset (default: debug), overrides")
    add("--config", metavar="FILE", help="the settings file, as an option")
    job = parser.add_argument_group("resources", "Each option overrides the setting job.NAME.")
    for flags, name in FLAGS.items():
        text = explained[name].partition(". ")[0].replace("%", "%%")
        job.add_argument(*flags, dest=f"job.{name}", metavar=METAVARS.get(name, "TEXT"), help=text)
    repeated: dict[str, Any] = dict(action="append", default=[])
    more = "another option of sbatch: reservation=course"
    job.add_argument("--sbatch", metavar="NAME[=VALUE]", help=more, **repeated)
    bad = "exclude nodes that failed the preflight checks of this run"
    job.add_argument("--exclude-bad", metavar="RUN", help=bad, **repeated)
    values = "submit a separate run for each value; for each combination if repeated"
    several = parser.add_argument_group("several runs")
    several.add_argument("--sweep", "--array", metavar="key=a,b,c", help=values, **repeated)
    how = parser.add_argument_group("how").add_mutually_exclusive_group()
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
    add("--from", dest="back_to", type=cli.step, metavar="STEP", help=back)
    return parser


def _compose(args: argparse.Namespace, variant: sweep.Variant, typed: Sequence[str]) -> RunConfig:
    """The settings of one run, with absolute paths; ``typed`` is the command line."""
    words = [*args.settings]
    if args.config:
        words.insert(0, args.config)
    if not any(not config.compose.is_override(word) for word in words):
        words.insert(0, str(DEFAULT))
    given = {key: value for key, value in vars(args).items() if key.startswith("job.") and value is not None}
    words += [f"{key}={value}" for key, value in given.items()]
    for word in args.sbatch:
        name, _, value = word.removeprefix("--").partition("=")
        words.append(f"job.options.{name}={value}")
    run = cli.settings([*words, *variant.overrides], typed)
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
        try:
            return str(Path(path).expanduser().absolute())
        except RuntimeError:  # ~NAME of a user that does not exist
            raise ConfigError(f"{path}: there is no such home folder") from None

    job = run.job
    job = replace(job, hostfile=job.hostfile and absolute(job.hostfile), venv=job.venv and absolute(job.venv))
    if job.template not in TEMPLATES:
        job = replace(job, template=absolute(job.template))
    run = replace(run, kill_switch=run.kill_switch and absolute(run.kill_switch))
    return replace(run, out=absolute(run.out), job=job, data=records.absolute(run.data))


def _where(args: argparse.Namespace, job: JobConfig) -> str:
    """How to run: slurm, local, mpirun, interactive or debug."""
    if args.debug or args.interactive:
        return "debug" if args.debug else "interactive"
    if job.cluster != "auto":
        return job.cluster
    if job.hostfile:
        return "mpirun"
    return "slurm" if args.dry_run or shutil.which("sbatch") else "local"


def check(run: RunConfig, where: str, again: bool = False, back_to: int | None = None) -> None:
    """ConfigError with every problem, before anything is written.

    ``again``: it will follow a queued job; ``back_to``: the step of the checkpoint to continue from.
    """
    from hpclm.launch import prechecks

    problems = secrets.problems(asdict(run)) + ([] if where == "debug" else run.missing())
    problems += run.engine.problems_on_cpu() + notify.missing(run.job.notify)
    if here := not (run.job.venv or run.job.conda or run.job.container or run.job.modules):
        problems += run.missing_libraries()
    if here and (where == "mpirun" or run.job.template == "mpirun"):
        problems += filter(None, [extras.missing("starting ranks with mpirun", "mpi4py")])
    processes = run.job.nodes * run.job.gpus
    try:
        if where in ("slurm", "local", "interactive") or (where == "mpirun" and not run.job.hostfile):
            run.plan(processes)
    except ConfigError as error:
        hint = f"; this job has job.nodes={run.job.nodes} x job.gpus={run.job.gpus} = {processes} processes"
        problems += [problem + hint for problem in error.problems]
    misplaced = _problems(lambda: folder.check(Path(run.out)))
    problems += visible.problems(run) if where == "slurm" else []
    problems += misplaced + (_problems(lambda: local.check(run)) if where == "local" else [])
    if where == "debug":  # always starts from scratch, with synthetic data if the run's are missing
        problems += _problems(lambda: prechecks.check(run, data=False))
    else:
        problems += _problems(lambda: prechecks.check(run, back_to=back_to, again=again, there=not misplaced))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


class DoneError(ConfigError):
    """The run has already done everything its settings ask for."""


def refuse_done(run: RunConfig) -> None:
    """DoneError if there is nothing left to do for this run."""
    out = Path(run.out)
    if not folders.is_run(out):
        return
    status = status_of(folders.read(out), None)
    if status.name != "done" and "as stop_at says" not in status.ending:
        return
    with suppress(ConfigError):
        before = config.load(out / "config.yaml")
        if (run.budget, run.stop_at) != (before.budget, before.stop_at):
            return
    raise DoneError(
        f"{out} is done: {status.ending}; extend it, for example with a larger budget.steps, go back with --from STEP, "
        "or choose another out"
    )


def _is_toy(args: argparse.Namespace) -> bool:
    """Whether the run is the toy model, in a run directory that was not chosen."""
    words = [*filter(None, [args.config]), *args.settings]
    chosen = {"out", "name"} & set(config.compose.named(words))
    return not chosen and [word for word in words if not config.compose.is_override(word)] in ([], ["debug"])


def _not_done(run: RunConfig) -> RunConfig:
    """``run``, in a directory of its own if it has been done before: runs/debug-2, or -3, …"""
    found, number = run, 1
    while True:
        try:
            refuse_done(found)
            return found
        except DoneError:
            number += 1
            found = replace(run, name=f"{run.name}-{number}", out=f"{run.out}-{number}")


def _say_where(runs: Sequence[RunConfig]) -> None:
    """Tell of runs that trained outside of Slurm, and are about to train in a job."""
    for out in (Path(run.out) for run in runs if folders.is_run(Path(run.out))):
        last = folders.read(out, brief=True).attempt
        if last and (not last.get("job_id") or last.get("launcher") == "local"):
            say(
                f"{out} trained on {last.get('host')} so far; from now on in a Slurm job (--cluster local: here)",
                file=sys.stderr,
            )


def _problems(look: Callable[[], object]) -> list[str]:
    try:
        look()
    except ConfigError as error:
        return error.problems
    return []


def _script(run: RunConfig) -> str:
    folders = [Path(prefix).parent for prefix in run.data.prefixes()]
    folders += [Path(file).parent for file in run.data.tokenizer_files]
    return script.render(run, Path(run.out) / "config.yaml", folders)


def _show(where: str, runs: Sequence[RunConfig], scripts: Sequence[str]) -> int:
    """Print the scripts, and sbatch's opinion if it is installed; or the command of mpirun."""
    if where == "mpirun":
        from hpclm.launch import mpi

        sys.stdout.write(mpi.preview(runs[0], Path(runs[0].out) / "config.yaml"))
        return 0
    if where != "slurm":
        raise ConfigError(f"--dry-run shows the script of a Slurm job; with job.cluster={where} there is none")
    for run, text in zip(runs, scripts, strict=True):
        sys.stdout.write(text)
        sys.stdout.flush()
        if shutil.which("sbatch"):
            say(sbatch.rehearse(text, set_in(text)), file=sys.stderr)
        if run.job.time:
            say(f"time limit: {_limit(run.job.time)}", file=sys.stderr)
    return 0


def _ranks(runs: Sequence[RunConfig], ranks: str, kind: str) -> int:
    """Print what some ranks of the run hold and send."""
    from hpclm.planning import ranks as traced  # it loads torch

    run = runs[0]
    if len(runs) > 1:
        raise ConfigError("--ranks is for one run, without --sweep")
    numbers = traced.chosen(ranks, run.job.nodes * run.job.gpus)
    for line in traced.report(run, numbers, gpus.known(kind)):
        say(line)
    return 0


def _here(where: str, runs: Sequence[RunConfig], command: list[str], back_to: int | None) -> int:
    """Train in processes started by this one."""
    run = runs[0]
    path = Path(run.out) / "config.yaml"
    with send.held(run, back_to):
        return int(import_module(STARTED_BY[where]).run(run, path, command=command))


def _debug(run: RunConfig, pdb: bool) -> int:
    """Train a few steps in this process."""
    from hpclm import train
    from hpclm.launch import debug

    return debug.run(run, lambda changed: train.start(changed, alone=True), pdb)


def _submit(
    runs: Sequence[RunConfig], scripts: Sequence[str], command: list[str], again: bool, back_to: int | None
) -> int:
    """Submit every run; one that fails because it is already queued or done does not affect the others."""
    code = 0
    for number, (run, text) in enumerate(zip(runs, scripts, strict=True)):
        if number:
            print()
        try:
            if back_to is None:
                refuse_done(run)
            job, new = send.send(run, text, command, again, back_to)
        except (DoneError, LockedError) as error:
            if len(runs) == 1:
                raise
            say(f"error: {error}", file=sys.stderr)
            code = code or error.exit_code
            continue
        except HpclmError:
            left = len(runs) - number
            if len(runs) > 1:
                print(
                    f"error: {left} of {len(runs)} runs were not submitted; repeat the command to continue",
                    file=sys.stderr,
                )
            raise
        out = files.typed(_short(run.out))
        state = "submitted" if new else "already queued: an earlier submission was interrupted"
        limit = f"; time limit {_limit(run.job.time)}" if run.job.time else ""
        say(f"job {job.job_id}: {run.job.nodes} x {run.job.gpus} processes, {state}{limit}")
        say(f"run directory  {run.out}\nlog            {job.log}")
        step = submissions.rollback(Path(run.out))
        if step is not None:
            earlier = (
                "" if back_to is not None else f", as requested earlier ({submissions.ROLLBACK} in the run directory)"
            )
            say(f"goes back to   step {step}{earlier}")
        say(f"follow         hpclm logs -f {out}\nstop           hpclm cancel {out}\nresume         hpclm resume {out}")
        sys.stdout.flush()
    return code


def _limit(time: str) -> str:
    """A time limit in words: Slurm reads 24:00 as 24 minutes."""
    seconds = seconds_of(time)
    return span(seconds) if math.isfinite(seconds) else "none"


def _short(out: str) -> str:
    """``out`` relative to the current folder, if it is inside."""
    path = Path(out)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else out


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
