"""The settings of checkpoints."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hpclm.config.checks import Checked, at_least


@dataclass(frozen=True)
class CheckpointConfig(Checked):
    """Saving and resuming."""

    every: int = 1000
    """Steps between saves; 0: only when leaving. The last step is saved too."""
    minutes: float | None = None
    """Minutes after which a save is due even if checkpoint.every steps are not done."""
    background: bool = True
    """Write while training goes on: a copy of the state is taken in the CPU's memory, 12 bytes for each parameter that this
    process holds. false: training waits until the disk has it."""
    keep_last: int = 3
    """Newest regular checkpoints that are kept; at least 2, so that one can go bad. One that is made because a signal, stop or
    exit_minutes ends the attempt does not count: it stays beside them until the next regular one."""
    keep_every: int = 0
    """Keep the checkpoints of steps that are a multiple of this, too; 0: none."""
    keep_best: int = 0
    """Keep this many with the lowest validation loss, too. It counts where a step is evaluated and saved."""
    resume: Literal["auto", "require", "never"] = "auto"
    """auto: go on from the newest good checkpoint, if there is one; require: or exit 66; never: refuse a folder that has any."""
    init_from: str | None = None
    """Run directory, or folder of one checkpoint, whose weights a new run begins with: for fine-tuning. Optimizer, step and
    data begin anew."""
    grace_seconds: float = 30.0
    """Seconds between a TERM and the end: the partition's GraceTime, or Slurm's KillWait. A save that would take longer is
    not begun. Of USR1 and USR2 it is job.warn_seconds."""

    def problems(self) -> Iterator[str]:
        """What cannot work in the checkpoint settings."""
        yield from at_least(0, "checkpoint", every=self.every, keep_every=self.keep_every, keep_best=self.keep_best)
        yield from at_least(2, "checkpoint", keep_last=self.keep_last)
        for name, value in (("minutes", self.minutes), ("grace_seconds", self.grace_seconds)):
            if value is not None and not value > 0:
                yield f"checkpoint.{name}={value} must be more than 0"
        if self.init_from is not None and self.resume == "require":
            yield "checkpoint.init_from begins a new run, and checkpoint.resume=require refuses to; leave one of them out"
