"""What a run does between two steps: it saves when that is due, and exits when it is done or told to.

For that the ranks synchronize: they wait for the last step, and agree. Between other steps nothing is waited for.
"""

from collections.abc import Callable

from hpclm.checkpoint import Progress
from hpclm.config import RunConfig
from hpclm.config.plan import Length
from hpclm.engine import Engine
from hpclm.errors import REQUEUE
from hpclm.optim.guard import Guard
from hpclm.rundir.control_files import ControlFiles
from hpclm.training.agreement import Agreement, Orders
from hpclm.training.deadline import Deadline
from hpclm.training.saver import Saver


class RunControl:
    """Saves and exits, decided alike on every rank."""

    def __init__(
        self,
        config: RunConfig,
        length: Length,
        engine: Engine,
        agreement: Agreement,
        saver: Saver,
        deadline: Deadline,
        guard: Guard,
        switches: ControlFiles | None,
        validation: Callable[[int], float | None],
    ):
        """``switches``: rank 0's; ``validation``: the loss on held-out data after a step, where it was measured."""
        self.config, self.length, self.engine = config, length, engine
        self.agreement, self.saver, self.deadline, self.guard = agreement, saver, deadline, guard
        self.switches, self.validation = switches, validation
        self.first_step, self.orders = saver.step, Orders()
        self._save_pending = False
        self._heard: Orders | None = None
        self._must_synchronize = True

    def poll(self) -> None:
        """Ask all ranks for signals and requests, and publish a checkpoint that all have written."""
        self.orders = self.agreement()
        self._heard, self._must_synchronize = None, False
        self.deadline.took(self.orders.micro_batch)
        self.saver.poll(self.orders)

    def hear(self, orders: Orders) -> None:
        """Take note of what the ranks had to say after the step before the last one."""
        self._heard = orders
        self.deadline.took(orders.micro_batch)

    def synchronize_soon(self) -> None:
        """Synchronize before the next step."""
        self._must_synchronize = True

    def must_synchronize(self, progress: Progress, count: int) -> bool:
        """Whether something may have to be done after this step, the next of which has ``count`` micro-batches."""
        heard = self._heard or Orders(written=False)
        told = heard.leaving or heard.save or heard.lost or (heard.written and self.saver.store.pending)
        settings = self.config.evaluate
        evaluation = due(settings.every, progress) or due(settings.tasks_interval(), progress)
        return bool(
            self._must_synchronize or self._save_pending or told or evaluation or self._ends(progress)
            or self.saver.due(progress, heard) or not self.deadline.allows_late(count)
        )  # fmt: skip

    def finished(self, progress: Progress) -> bool:
        """Whether the run has used up its budget, or reached ``stop_at``."""
        ends = [end for end in (self.length.steps, self.config.stop_at) if end is not None]
        hours = self.config.budget.hours
        out_of_time = hours is not None and progress.seconds >= hours * 3600
        return out_of_time or any(progress.step >= end for end in ends)

    def exit_is_due(self, progress: Progress) -> bool:
        """Whether the run exits after this step."""
        return self._ends(progress) or bool(self.orders.leaving)

    def _ends(self, progress: Progress) -> bool:
        """Whether this attempt was meant to end after this step."""
        interval = due(self.config.exit_interval or 0, progress) and progress.step > self.first_step
        return self.finished(progress) or interval

    def save_if_due(self, progress: Progress) -> None:
        """Begin a save where one is due. While steps are skipped it waits: what may have diverged pushes nothing out."""
        self._save_pending = self._save_pending or self.saver.due(progress, self.orders)
        if self._save_pending and not self.guard.in_a_row:
            self.saver.save(self.engine, progress, self.validation(progress.step), self.orders)
            self._save_pending = False
        if self.orders.save and self.switches and not self._save_pending:
            self.switches.remove("save-now")

    def exit(self, progress: Progress, unmeasured: bool = False) -> int:
        """Save before the run exits; its exit code. ``unmeasured``: a run that has finished needs another start to be measured."""
        over = self.finished(progress) and not unmeasured
        requeue = bool(self.orders.signal and not over and not self.orders.stop)
        self.saver.leave(self.engine, progress, self.validation(progress.step), self.orders, requeue)
        if self.switches and self.saver.step == progress.step:
            self.switches.remove("save-now")
        if self.switches and self.orders.stop:
            self.switches.remove("stop")
        return REQUEUE if requeue else 0


def due(every: int, progress: Progress) -> bool:
    """Whether something that happens ``every`` steps happens now; 0 is never."""
    return bool(every) and progress.step > 0 and progress.step % every == 0
