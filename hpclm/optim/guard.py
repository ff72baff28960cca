"""What to do when a step was not finite: never nothing."""

import logging
import math

from hpclm.config import OptimConfig
from hpclm.errors import DivergedError

log = logging.getLogger(__name__)


class Guard:
    """Counts skipped steps, tells of each, and stops the run where the policy says so."""

    def __init__(self, optim: OptimConfig, skipped: int = 0):
        self.optim, self.skipped, self.in_a_row = optim, skipped, 0

    def check(self, step: int, loss: float, norm: float, skipped: bool, searching: bool) -> None:
        """Look at a step's outcome; DivergedError ends the run. ``searching``: the loss scale can still fall."""
        if not skipped:
            self.in_a_row = 0
            return
        self.skipped += 1
        if searching and math.isfinite(loss):
            log.info("step %d skipped: fp16 overflow, the loss scale adapts", step)
            return
        self.in_a_row += 1
        what = f"step {step}: loss {loss}, gradient norm {norm}"
        if self.optim.nonfinite == "stop":
            raise DivergedError(
                f"{what}; stopped as optim.nonfinite=stop says; go on from the last checkpoint with a lower optim.lr"
            )
        if self.in_a_row >= self.optim.nonfinite_limit:
            raise DivergedError(
                f"{what}; {self.in_a_row} steps in a row were not finite (optim.nonfinite_limit). "
                f"go on from an earlier checkpoint with a lower optim.lr or optim.clip"
            )
        log.warning("%s; skipped, %d so far", what, self.skipped)
