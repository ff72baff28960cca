"""React to non-finite steps and loss spikes: log, skip, or stop the run."""

import logging
import math
from collections.abc import Iterable

from hpclm.config import OptimConfig
from hpclm.errors import DivergedError
from hpclm.optim.health import Health, Watch

log = logging.getLogger(__name__)


class Guard:
    """Counts skipped steps, logs them and loss spikes, and stops the run when the settings say so."""

    def __init__(self, optim: OptimConfig, skipped: int = 0, health: Health = Health()):  # noqa: B008 (it is immutable)
        """``skipped`` and ``health``: from the checkpoint that the run resumes from."""
        self.optim, self.skipped = optim, skipped
        self._watch = Watch(optim.spike, health)

    @property
    def health(self) -> Health:
        """Health after the last observed step."""
        return self._watch.health

    @property
    def in_a_row(self) -> int:
        """Consecutive steps skipped so far."""
        return self.health.skipped_in_a_row

    def observe(self, step: int, loss: float, skipped: bool, searching: bool) -> Health:
        """Record the outcome of a step, and log where a loss spike begins and ends. ``searching``: the loss scale can still fall."""
        before = self.health
        if not (skipped and searching and math.isfinite(loss)):
            self._watch = self._watch.after(step, loss, skipped)
        now = self.health
        if now.spiking_since is not None and before.spiking_since is None:
            log.warning(
                "%s; until the loss recovers, new checkpoints do not replace older healthy ones; hpclm resume with --from "
                "goes back to one of these",
                now.describe(),
            )
        elif now.spiking_since is None and before.spiking_since is not None:
            log.info(
                "step %d: the loss has recovered to %.4g; the spike began at step %d", step, loss, before.spiking_since
            )
        return now

    def check(self, step: int, loss: float, norm: float, skipped: bool, searching: bool) -> None:
        """Act on an observed step; DivergedError ends the run."""
        if not skipped:
            return
        self.skipped += 1
        if searching and math.isfinite(loss):
            log.info("step %d skipped: fp16 overflow, the loss scale adapts", step)
            return
        what = f"step {step}: loss {loss}, gradient norm {norm}"
        if self.in_a_row >= self.optim.nonfinite_limit:
            count = f"{self.in_a_row} steps in a row were not finite" if self.in_a_row > 1 else "1 step was not finite"
            raise DivergedError(f"{what}; {count} (optim.nonfinite_limit)")
        log.warning("%s; skipped, %d so far", what, self.skipped)

    def check_end(self, step: int, held_out: Iterable[float | None] = ()) -> None:
        """DivergedError if a run that ends at ``step`` has only skipped steps for a while: no later step can show that it
        has recovered. One is enough where a loss on held-out data, of ``held_out``, is not finite either."""
        ruined = any(loss is None or not math.isfinite(loss) for loss in held_out)
        enough = 1 if ruined else min(self.optim.nonfinite_limit, OptimConfig.nonfinite_limit)
        if self.in_a_row >= enough:
            raise DivergedError(
                f"the last {self.in_a_row} steps, up to the last one, {step}, were skipped because loss or gradients were not finite; "
                f"{'the loss on held-out data is not finite either; ' * ruined}nothing was learned in them and nothing is saved"
            )
