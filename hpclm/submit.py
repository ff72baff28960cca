"""The verb ``hpclm submit``: settings are composed and checked, and then trained with on Slurm, on other machines, or here."""

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path

from hpclm import cli, config, record
from hpclm.cluster import secrets
from hpclm.config import JobConfig, RunConfig
from hpclm.config.job import TEMPLATES
from hpclm.errors import ConfigError, HpclmError, LockedError
from hpclm.job import exclusion, folder, local, sbatch, script, send, sweep
from hpclm.job.options import options

# Option of the command line -> setting of the job. Short letters are sbatch's.
FLAGS = {
    ("--nodes", "-N"): "nodes",
    ("--gpus",): "gpus",  # no -G, which is the whole job's number to sbatch
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
DEFAULT = Path(__file__).parents[1] / "configs" / "debug.yaml"
METAVARS = {"nodes": "N", "gpus": "N", "cpus_per_task": "N", "hostfile": "FILE", "template": "NAME|FILE", "mem": "SIZE"}


def main(argv: list[str]) -> int:
    """``hpclm submit``."""
    parser = _parser()
    args = parser.parse_intermixed_args(argv)
    if args.pdb and not args.debug:
        parser.error("--pdb is for --debug")
    runs = [_compose(args, variant) for variant in sweep.variants(args.sweep)]
    command = secrets.Redactor().words(["hpclm", "submit", *argv])
    where = _where(args, runs[0].job)
    if len(runs) > 1 and where != "slurm":
        raise ConfigError(f"--sweep submits to Slurm, and this is {where}: start the runs one after another")
    for run in runs:
        check(run, where)
    scripts = [_script(run) for run in runs] if where == "slurm" else []
    if args.dry_run:
        return _show(where, runs, scripts)
    if where == "debug":
        return _debug(runs[0], args.pdb)
    if where != "slurm":
        return _here(where, runs, command)
    return _submit(runs, scripts, command, args.again)


def _parser() -> argparse.ArgumentParser:
    explained = config_docs()
    parser = argparse.ArgumentParser(
        prog="hpclm submit",
        description="Train on Slurm, on the machines of a host file, or here. Settings are checked before anything is "
        "submitted. The same command again goes on with the run.",
        epilog=cli.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "settings",
        nargs="*",
        metavar="FILE | key=value",
        help="one settings file (none: configs/debug.yaml), and overrides",
    )
    add("--config", metavar="FILE", help="the settings file, said in another way")
    job = parser.add_argument_group("what to ask for", "Each is short for a setting, job.NAME=, and goes before it.")
    for flags, name in FLAGS.items():
        text = explained[name].partition(". ")[0].replace("%", "%%")
        job.add_argument(*flags, dest=f"job.{name}", metavar=METAVARS.get(name, "TEXT"), help=text)
    job.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="any other option of sbatch: reservation=course",
    )
    job.add_argument(
        "--exclude-bad",
        action="append",
        default=[],
        metavar="RUN",
        help="not on nodes that preflight found bad in this run",
    )
    several = parser.add_argument_group("several runs")
    several.add_argument(
        "--sweep",
        "--array",
        action="append",
        default=[],
        metavar="key=a,b,c",
        help="a run, with a directory and a job of its own, for each value; given twice: for each combination",
    )
    how = parser.add_argument_group("how").add_mutually_exclusive_group()
    how.add_argument(
        "--dry-run", action="store_true", help="print the script that would be submitted, and write nothing"
    )
    how.add_argument(
        "--interactive", action="store_true", help="start the processes in this allocation (salloc), here and now"
    )
    how.add_argument(
        "--debug", action="store_true", help="one process in the foreground, in which everything is checked"
    )
    add("--pdb", action="store_true", help="with --debug: look at a fault of the program in Python's debugger")
    add("--again", action="store_true", help="submit although a job of the run is in the queue, to go on after it")
    return parser


def config_docs() -> dict[str, str]:
    """What each setting of a job does."""
    from hpclm.config import show

    return show.docs(JobConfig)


def _compose(args: argparse.Namespace, variant: sweep.Variant) -> RunConfig:
    """The settings of one run, whole: paths in them mean the same anywhere."""
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
    run = cli.settings([*words, *variant.overrides])
    if variant.suffix:
        run = replace(run, name=run.name + variant.suffix, out=run.out + variant.suffix)
    job, bad = run.job, exclusion.bad_nodes(args.exclude_bad)
    if bad:
        between = "@" if job.hostfile else ","  # DeepSpeed's syntax, or Slurm's
        job = replace(job, exclude=between.join(dict.fromkeys([*filter(None, [job.exclude]), *bad])))
    return whole(replace(run, job=job))


def whole(run: RunConfig) -> RunConfig:
    """``run`` with paths that mean the same from any folder."""

    def absolute(path: str) -> str:
        return str(Path(path).expanduser().absolute())

    job = run.job
    job = replace(job, hostfile=job.hostfile and absolute(job.hostfile), venv=job.venv and absolute(job.venv))
    if job.template not in TEMPLATES:
        job = replace(job, template=absolute(job.template))
    return replace(run, out=absolute(run.out), job=job, data=record.absolute(run.data))


def _where(args: argparse.Namespace, job: JobConfig) -> str:
    """slurm, local, mpirun, interactive or debug."""
    if args.debug or args.interactive:
        return "debug" if args.debug else "interactive"
    if job.cluster != "auto":
        return job.cluster
    if job.hostfile:
        return "mpirun"
    return "slurm" if args.dry_run or shutil.which("sbatch") else "local"


def check(run: RunConfig, where: str) -> None:
    """ConfigError with everything that cannot work, before anything is written."""
    problems = secrets.problems(asdict(run)) + ([] if where == "debug" else run.missing())
    processes = run.job.nodes * run.job.gpus
    try:
        if where in ("slurm", "local", "interactive") or (where == "mpirun" and not run.job.hostfile):
            run.plan(processes)
    except ConfigError as error:
        hint = f"; this job has job.nodes={run.job.nodes} x job.gpus={run.job.gpus} = {processes} processes"
        problems += [problem + hint for problem in error.problems]
    looks = [lambda: folder.check(Path(run.out)), *[lambda: _check_data(run)] * (where != "debug")]
    looks += [lambda: local.check(run)] * (where == "local")
    for look in looks:
        try:
            look()
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise ConfigError(problems)


def _check_data(run: RunConfig) -> None:
    """ConfigError unless the datasets and the tokenizer are there and fit the model."""
    if run.data.source == "indexed" and not run.missing():
        from hpclm.data import sources

        sources.build(run)


def _script(run: RunConfig) -> str:
    folders = [Path(prefix).parent for prefix in run.data.prefixes()]
    folders += [Path(file).parent for file in run.data.tokenizer_files]
    return script.render(run, Path(run.out) / "config.yaml", folders)


def _show(where: str, runs: Sequence[RunConfig], scripts: Sequence[str]) -> int:
    """Print the scripts, and what sbatch would say to them where it is installed."""
    if where != "slurm":
        raise ConfigError(f"--dry-run shows the script of a Slurm job; with job.cluster={where} there is none")
    for run, text in zip(runs, scripts, strict=True):
        sys.stdout.write(text)
        sys.stdout.flush()
        if shutil.which("sbatch"):
            print(sbatch.rehearse(text, options(run, Path(run.out))), file=sys.stderr)
    return 0


def _here(where: str, runs: Sequence[RunConfig], command: list[str]) -> int:
    """Train in processes that are started from here."""
    run = runs[0]
    path = Path(run.out) / "config.yaml"
    with send.held(run):
        return int(import_module(f"hpclm.job.{where}").run(run, path, command=command))


def _debug(run: RunConfig, pdb: bool) -> int:
    """Train a few steps in this process."""
    from hpclm import train
    from hpclm.job import debug

    return debug.run(run, lambda changed: train.start(changed, alone=True), pdb)


def _submit(runs: Sequence[RunConfig], scripts: Sequence[str], command: list[str], again: bool) -> int:
    """Put every run into the queue; one that is there already does not keep the others out."""
    code = 0
    for number, (run, text) in enumerate(zip(runs, scripts, strict=True)):
        if number:
            print()
        try:
            job, new = send.send(run, text, command, again)
        except LockedError as error:
            if len(runs) == 1:
                raise
            print(f"error: {error}", file=sys.stderr)
            code = error.exit_code
            continue
        except HpclmError:
            left = len(runs) - number
            if len(runs) > 1:
                print(f"error: {left} of {len(runs)} runs are not submitted; the same command goes on", file=sys.stderr)
            raise
        out = shlex.quote(_short(run.out))
        state = "submitted" if new else "was in the queue already: an earlier submission was interrupted"
        print(f"job {job.job_id}: {run.job.nodes} x {run.job.gpus} processes, {state}")
        print(f"run directory  {run.out}\nlog            {job.log}")
        print(
            f"follow         hpclm logs -f {out}\nstop           hpclm cancel {out}\nresume         hpclm resume {out}"
        )
        sys.stdout.flush()
    return code


def _short(out: str) -> str:
    """``out`` as it may be typed here."""
    path = Path(out)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else out


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
