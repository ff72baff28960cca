"""Whether a start of a run would do anything: it may have done all that its settings ask for, or diverged with them."""

from contextlib import suppress
from pathlib import Path

from hpclm import config
from hpclm.config import RunConfig
from hpclm.errors import ConfigError
from hpclm.launch import arguments
from hpclm.rundir import runs as folders
from hpclm.rundir.state import State, state_of

COPIES = ("name", "out", "job", "cluster", "log", "profile", "checkpoint")
"""Settings that may differ between two attempts which give the same result."""


class DoneError(ConfigError):
    """The run has already done everything its settings ask for."""


def refuse_done(run: RunConfig) -> None:
    """DoneError if there is nothing left to do for this run."""
    if ending := nothing_left(run):
        raise DoneError(
            f"{run.out} is done: {ending}; extend it, for example with a larger budget.steps, go back with --from STEP, "
            "or choose another out"
        )


def nothing_left(run: RunConfig) -> str:
    """How the run in the directory of ``run`` has completed; empty if it has not, or if ``run`` is longer or shorter."""
    status, before = before_it(run)
    ending = status.finished if status else ""
    return ending if before is None or same_length(run, before) else ""


def diverged(run: RunConfig) -> str:
    """How the run has diverged, or lacked memory, with these very settings, so that it would again; empty if it has not."""
    status, before = before_it(run)
    if status is None or before is None or not status.diverged:
        return ""
    differing = run.diff(arguments.whole(before))
    return status.diverged if all(key.partition(".")[0] in COPIES for key in differing) else ""


def before_it(run: RunConfig) -> tuple[State | None, RunConfig | None]:
    """What has become of the run in the directory of ``run``, and its settings, if they can be read; None without a run."""
    out = Path(run.out)
    before = None
    if not folders.is_run(out):
        return None, None
    with suppress(ConfigError):
        before = config.load(out / "config.yaml")
    return state_of(folders.read(out), None), before


def same_length(run: RunConfig, before: RunConfig) -> bool:
    """Whether the two runs end at the same step, even if one has trained with larger batches."""
    sizes, then = ((of.batch.global_size, of.batch.rampup) for of in (run, before))
    return (run.budget, run.stop_at) == (before.budget, before.stop_at) and (sizes == then or run.stop_at is not None)
