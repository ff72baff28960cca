"""Submit a run again, with its settings, the size of its last job, and optional changes."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hpclm.base import files, paths
from hpclm.base.errors import ConfigError, LockedError
from hpclm.base.terminal import say
from hpclm.launch.jobs import States
from hpclm.launch.schedulers import slurm_commands as slurm
from hpclm.node import failures
from hpclm.rundir import runs as folders
from hpclm.rundir.runs import RunFacts
from hpclm.rundir.state import State

PATIENCE = 5.0  # seconds for squeue to answer
SETTING = re.compile(r"[A-Za-z_][\w.-]*\s*=")
EXTENDS = ("batch", "budget", "stop_at", "--from")
"""Beginnings of the changes that let a finished run continue."""


def resume(
    chosen: Sequence[RunFacts],
    changes: list[str],
    check: Callable[[list[str]], None],
    submit: Callable[[list[str]], int],
) -> int:
    """Submit the runs ``chosen`` again, with ``changes``; returns the exit code.

    ``check`` and ``submit`` take the arguments of hpclm submit. ``check`` raises ConfigError for wrong arguments, and is called
    before the state of a run is considered.
    """
    per_run = failures.PerRunErrors(len(chosen))
    for number, status in enumerate(States(PATIENCE).of(chosen), start=1):
        with per_run:
            folders.check_own(status.run.out, "resumed")
            if changes and (status.run.out / "config.yaml").is_file():
                check(words(status.run, changes))
            may_start(status, changes)
            code = submit(words(status.run, changes))
            if code:  # the run trained here, in the foreground
                left = len(chosen) - number
                if left:
                    say(f"{files.shown(status.run.out)} ended with {code}; the {left} runs after it are not started")
                return code
    return per_run.code


def split(given: list[str], runs: Path) -> tuple[list[str], list[str]]:
    """Split arguments into names of runs and changes; changes begin with the first option or setting."""
    for number, word in enumerate(given[1:], start=1):
        if word.startswith("-") or (SETTING.match(word) and not any(map(folders.is_run, (Path(word), runs / word)))):
            return [given[0], *map(paths.expanded, given[1:number])], given[number:]
    return [given[0], *map(paths.expanded, given[1:])], []


def may_start(status: State, changes: list[str]) -> None:
    """LockedError if the run is waiting or running, ConfigError if it is done or has no config.yaml."""
    out = status.run.out
    if status.live:
        where = f" ({status.where()})" if status.where() else ""
        raise LockedError(f"{out} is {status.name}{where}; wait for it, or end it: hpclm cancel {files.typed(out)}")
    if status.finished and not any(word.startswith(EXTENDS) for word in changes):
        if status.name == "done":
            way = f"hpclm resume {files.typed(out)} budget.steps=..., or go back: --from STEP"
            raise ConfigError(f"{out} is done: {status.ending}; to continue, extend it: {way}")
        raise ConfigError(f"{out} {status.ending}; to continue: hpclm resume {files.typed(out)} stop_at=null")
    if not (out / "config.yaml").is_file():
        raise ConfigError(f"{out} has no config.yaml; start it with hpclm submit")


def _names_clusters(run: RunFacts, changes: list[str]) -> bool:
    """Whether the next job's settings, or the user's environment variables, choose its Slurm clusters."""
    from hpclm.config import compose  # loads OmegaConf

    if slurm.clusters() or any(re.match(r"(--sbatch=|job\.options\.)?clusters=", word) for word in changes):
        return True
    with suppress(ConfigError):  # hpclm submit reports wrong settings
        return "clusters" in (compose.flat_of_run(run.out).get("job.options") or {})
    return False


def words(run: RunFacts, changes: list[str]) -> list[str]:
    """The arguments of hpclm submit that submit ``run`` again, with the cluster and size of its last job, if any.

    ``changes`` come last, and so override the others.
    """
    if run.submissions:
        last = run.submissions[-1]
        choices = {"cluster": last["cluster"], "nodes": last["nodes"], "gpus": last["tasks_per_node"]}
        if last.get("slurm_cluster") and not _names_clusters(run, changes):
            changes = ["--sbatch", f"clusters={last['slurm_cluster']}", *changes]
    else:
        nodes = int(run.attempt.get("nodes") or 1)
        choices = {"nodes": nodes, "gpus": max(1, int(run.attempt.get("size") or 1) // nodes)}
        if run.attempt and nodes == 1 and not run.attempt.get("job_id"):
            choices = {"cluster": "local", **choices}
    changed = [name for name in choices for word in changes if re.match(rf"--{name}(=|$)|job\.{name}=", word)]
    kept = [word for name, value in choices.items() if name not in changed for word in (f"--{name}", str(value))]
    out = run.out.absolute()
    return ["--config", paths.literal(out / "config.yaml"), *kept, f"out={paths.literal(out)}", *changes]
