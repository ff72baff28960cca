"""The training loop. Nothing in it knows an engine, a launcher or a data format."""

from hpclm.config import RunConfig
from hpclm.distributed.context import DistributedContext
from hpclm.training.opening import open_session
from hpclm.training.run_context import MemoryPlanner
from hpclm.training.session import Session, StepAbandoned


def run(
    config: RunConfig, context: DistributedContext, resume_step: int | None = None, planner: MemoryPlanner | None = None
) -> int:
    """Train until the budget is used up, ``stop_at`` is reached or a signal warns; the exit code.

    ``resume_step``: the step of a checkpoint to resume from, in place of the newest. Every rank of ``context`` runs this, and all
    take every turn together. ``planner``: for batch.micro_size=auto, and to explain a lack of memory.
    """
    with open_session(config, context, resume_step, planner) as session:
        return turns(session)


def turns(session: Session) -> int:
    """The turns of an open session, to its end; the exit code."""
    control, progress = session.control, session.progress
    while True:
        if session.must_synchronize(progress):  # otherwise the next step is queued before the last one is known
            progress = session.synchronize(progress)
            if session.evaluation_is_due(progress):
                session.evaluate(progress)
                control.poll()
            session.verify(progress)
            if control.exit_is_due(progress):
                return session.exit(progress)
            control.save_if_due(progress, session.validation(progress))
        try:
            progress = session.train_step(progress)
        except StepAbandoned:
            control.synchronize_soon()  # a signal leaves no time to finish the step; the next turn exits
