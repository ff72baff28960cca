"""Find out whether a start of a run is useful: the run may be done already, or have diverged with the same settings."""

from contextlib import suppress
from pathlib import Path

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.config import RunConfig
from hpclm.launch import arguments
from hpclm.rundir import runs as folders
from hpclm.rundir.state import State, state_of

COPIES = ("name", "out", "job", "cluster", "log", "profile", "checkpoint")
"""Names and sections of settings that do not affect the result of an attempt."""


class DoneError(ConfigError):
    """The run has already done everything its settings ask for."""


def refuse_done(run: RunConfig) -> None:
    """DoneError if nothing is left to do for this run."""
    ending = nothing_left(run)
    if ending:
        raise DoneError(
            f"{run.out} is done: {ending}; extend it, for example with a larger budget.steps, go back to an earlier step "
            "(--from STEP, or resume_step=STEP in Python), or choose another out"
        )


def nothing_left(run: RunConfig) -> str:
    """How the run in the directory of ``run`` was completed; empty if it was not, or if ``run`` is longer or shorter."""
    status, before = before_it(run)
    if status is None or (before is not None and not same_length(run, before)):
        return ""
    return status.finished


def diverged(run: RunConfig) -> str:
    """How the run has diverged or run out of memory with the same settings; empty if it has not."""
    status, before = before_it(run)
    if status is None or before is None or not status.diverged:
        return ""
    same = {key.partition(".")[0] for key in run.diff(arguments.whole(before))} <= {*COPIES}
    return status.diverged if same else ""


def before_it(run: RunConfig) -> tuple[State | None, RunConfig | None]:
    """The state of the run in the directory of ``run``, None without a run; and its settings, None if they cannot be read."""
    out = Path(run.out)
    before = None
    if not folders.is_run(out):
        return None, None
    with suppress(ConfigError):
        before = config.load(out / "config.yaml")
    return state_of(folders.read_run(out), None), before


def same_length(run: RunConfig, before: RunConfig) -> bool:
    """Whether the two runs end at the same step."""
    if (run.budget, run.stop_at) != (before.budget, before.stop_at):
        return False
    sizes = (run.batch.global_size, run.batch.rampup)
    return run.stop_at is not None or sizes == (before.batch.global_size, before.batch.rampup)
