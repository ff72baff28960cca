"""The Weights & Biases sink. W&B reads WANDB_MODE=offline, WANDB_ENTITY, WANDB_API_KEY and its other variables."""

from collections.abc import Sequence

import wandb

from hpclm.node import environment
from hpclm.sinks import Row, RunInfo, figures
from hpclm.sinks.names import TrackerNames, is_key

OTHER_SESSION = ("SERVICE", "RUN_ID", "SWEEP_ID", "SWEEP_PARAM_PATH", "LAUNCH", "RESUME", "RESUME_FROM", "FORK_FROM")
"""Suffixes of WANDB_... variables that a sweep's agent or another session leaves in a shell. They would send rows to another run."""


class WandbSink:
    """A run in W&B. W&B keeps its files, including those of an offline run, in the folder wandb of the run directory."""

    def __init__(self, run: RunInfo) -> None:
        """Create or resume the run."""
        environment.forget(f"WANDB_{name}" for name in OTHER_SESSION)
        self._names = TrackerNames(is_key)
        self.substitutes = self._names.substitutes
        self.run = wandb.init(
            project=run.project,
            id=run.id,
            name=run.name,
            dir=str(run.out),
            config=dict(run.settings),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def send(self, rows: Sequence[Row], before: int) -> None:
        """Send rows by number, because W&B ignores a step that is not above the last one; charts use ``step``."""
        for place, row in enumerate(rows, before):
            numbers = {self._names(name): value for name, value in figures(row).items()}
            self.run.log({**numbers, "step": row["step"]}, step=place)

    def close(self, code: int) -> None:
        """Upload the remaining rows, and set the run's state."""
        self.run.finish(exit_code=code)
