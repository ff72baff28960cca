"""The verb ``hpclm resume``: submit a run again, by its own settings and its last job's choices, with changes if any."""

import argparse
import shlex
from importlib import import_module
from pathlib import Path

from hpclm import cli
from hpclm.errors import ConfigError, LockedError
from hpclm.job import runs as folders
from hpclm.job.runs import Run
from hpclm.job.standing import Standing, look

PATIENCE = 5.0  # seconds squeue may take
EXTENDS = ("budget", "stop_at")  # settings that give a run that is done more to do


def main(argv: list[str]) -> int:
    """``hpclm resume``."""
    parser = argparse.ArgumentParser(
        prog="hpclm resume",
        usage="hpclm resume [-h] [--runs FOLDER] RUN [option of hpclm submit ...] [key=value ...]",
        description="Submit a run again: it goes on from its last checkpoint, by its own settings and with as many nodes and "
        "GPUs as before. Everything after RUN changes that and is passed to hpclm submit: hpclm resume RUN --nodes 4",
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where runs are (default: runs)"
    )
    parser.add_argument("run", help="run directory, or its name below --runs")
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="what to change, as hpclm submit takes it"
    )
    args = parser.parse_args(argv)
    run = folders.read(folders.resolve(args.run, args.runs))
    may_start(look([run], PATIENCE)[0], args.rest)
    code: int | None = import_module("hpclm.submit").main(words(run, args.rest))
    return code or 0


def may_start(standing: Standing, changes: list[str]) -> None:
    """LockedError when the run waits or runs, ConfigError when there is nothing left to do or nothing to start from."""
    out, where = standing.run.out, standing.where()
    if standing.live:
        raise LockedError(
            f"{out} is {standing.name}{f' ({where})' if where else ''}; wait for it, or end it: hpclm cancel {shlex.quote(str(out))}"
        )
    if standing.name == "done" and not any(word.startswith(EXTENDS) for word in changes):
        raise ConfigError(
            f"{out} is done: {standing.ending}; to go on, give it more to do: hpclm resume {shlex.quote(str(out))} budget.steps=..."
        )
    if not (out / "config.yaml").is_file():
        raise ConfigError(f"{out} has no config.yaml; start it with hpclm submit")


def words(run: Run, changes: list[str]) -> list[str]:
    """The arguments of hpclm submit that submit ``run`` again: ``changes`` come last, so that they win."""
    out = run.out.absolute()
    return ["--config", str(out / "config.yaml"), *before(run, changes), f"out={out}", *changes]


def before(run: Run, changes: list[str]) -> list[str]:
    """The size and place of the last job, where they are not changed; of a run that was started by hand, of its processes."""

    def said(name: str) -> bool:
        return any(word == f"--{name}" or word.startswith((f"--{name}=", f"job.{name}=")) for word in changes)

    if run.submissions:
        last = run.submissions[-1]
        choices = {"cluster": last.cluster, "nodes": str(last.nodes), "gpus": str(last.tasks_per_node)}
    else:
        attempt = run.attempt
        nodes = len(attempt.get("hosts") or [1])
        size = int(attempt.get("size") or 1)
        choices = {"nodes": str(nodes), "gpus": str(max(1, size // nodes))}
    return [word for name, value in choices.items() if not said(name) for word in (f"--{name}", value)]


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
