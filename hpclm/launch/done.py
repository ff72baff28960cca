"""Whether a run has already done everything that its settings ask for."""

from contextlib import suppress
from pathlib import Path

from hpclm import config
from hpclm.config import RunConfig
from hpclm.errors import ConfigError
from hpclm.rundir import runs as folders
from hpclm.rundir.status import status_of


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
    ending, before = ending_of(run)
    return ending if before is None or same_length(run, before) else ""


def ending_of(run: RunConfig) -> tuple[str, RunConfig | None]:
    """How the run in the directory of ``run`` has completed, empty if it has not; and its settings, if they can be read."""
    out, before = Path(run.out), None
    if not folders.is_run(out):
        return "", None
    status = status_of(folders.read(out), None)
    with suppress(ConfigError):
        before = config.load(out / "config.yaml")
    return status.ending or "done" if status.name == "done" or "(stop_at)" in status.ending else "", before


def same_length(run: RunConfig, before: RunConfig) -> bool:
    """Whether the two runs end at the same step, even if one has trained with larger batches."""
    sizes, then = ((of.batch.global_size, of.batch.rampup) for of in (run, before))
    return (run.budget, run.stop_at) == (before.budget, before.stop_at) and (sizes == then or run.stop_at is not None)
