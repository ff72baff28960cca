"""A start of a run that has nothing left to train: what its settings would change is refused, not recorded."""

from pathlib import Path

from hpclm.config.compose import of_run
from hpclm.config.schema import RunConfig
from hpclm.errors import ConfigError

TRAINING = ("optim", "scaler", "batch", "budget", "seed")
"""Settings that have no effect without a further step; those of evaluations, logs and checkpoints may have one."""


def check_finished(run: RunConfig, step: int, end: int | None) -> None:
    """ConfigError if the newest checkpoint, of ``step``, is at the last step, ``end``, or past it, and ``run`` has other settings
    of training than its config.yaml."""
    if end is None or step < end:
        return
    try:
        before = of_run(Path(run.out), ())
    except ConfigError:  # there is none that could be compared
        return
    changes = {key: now for key, (now, _) in run.diff(before).items() if key.split(".")[0] in TRAINING}
    changes.pop("batch.micro_size", None)  # chosen anew on other GPUs
    if step == end:  # another budget of the same length
        changes = {key: now for key, now in changes.items() if not key.startswith("budget.")}
    if changes:
        named = ", ".join(f"{key}={value}" for key, value in changes.items())
        raise ConfigError(
            f"{run.out} is at step {step} and its budget ends at step {end}, so {named} would have no effect; raise the budget, go back "
            "with --from STEP, or start another run with another out="
        )
