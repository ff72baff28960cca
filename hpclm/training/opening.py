"""Open a run on every rank: what cannot work is refused before anything is written, and all that is opened is closed again."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from hpclm.config import RunConfig
from hpclm.diagnostics import self_check
from hpclm.distributed.context import DistributedContext
from hpclm.node import hardware
from hpclm.node.notify import Notifier
from hpclm.node.preemption import Preemption
from hpclm.rundir import folder
from hpclm.sinks.process import Sinks
from hpclm.training.control import ControlSync, RunControl, Saver
from hpclm.training.expert_load import ExpertLoad
from hpclm.training.metrics import Meter, NullMeter, Speed
from hpclm.training.profile import Profile
from hpclm.training.run_context import MemoryPlanner, NoPlanner, RunContext, open_devices
from hpclm.training.run_data import open_data, with_split
from hpclm.training.run_directory import Directory, open_run_directory
from hpclm.training.run_state import RunState, open_state, samples_per_save
from hpclm.training.session import Outputs, Session


@contextmanager
def open_session(
    config: RunConfig, context: DistributedContext, resume_step: int | None = None, planner: MemoryPlanner | None = None
) -> Iterator[Session]:
    """Set a run up on every rank of ``context``; what cannot work is refused before anything is written.

    ``resume_step``: the step of a checkpoint to resume from, in place of the newest.
    """
    planner, out = planner or NoPlanner(), Path(config.out).absolute()
    notifier = Notifier(config.job.notify, out.name, str(out), context.job.row())
    context.watchdog.shutdown.listeners.append(notifier.failed)
    with (
        Preemption() as preemption,
        notifier if context.is_main else nullcontext(),
        planner.memory_errors_explained(config, context),
    ):
        compute = open_devices(config, context)
        context.watchdog.enter("data")
        config = with_split(config, context)
        run = RunContext(planner.with_micro_size(config, context, compute.device), context, compute)
        with (
            open_data(run, resume_step) as data,
            open_run_directory(run, data, resume_step) as directory,
            # again, before the guard of the run directory reports the error
            planner.memory_errors_explained(run.config, context),
        ):
            checked = self_check.check_computation(run.config, context, compute)
            state = open_state(replace(run, config=config), data, directory, checked.settings)
            if state.attempt is not None:
                notifier.begin(state.attempt, state.data.begin.step, directory.restarted)
            with (
                Sinks(config.log.sinks if context.is_main else [], run.out) as sinks,
                open_meter(run, state, directory) as meter,
                Profile(config.profile, run.out, context.rank, compute.device) as profile,
            ):
                sinks.start()
                sync = ControlSync(run, state, directory.lease, preemption)
                saver = open_saver(run, state, meter, checked.background)
                control = RunControl(run, state, sync, saver)
                context.watchdog.each_turn = control.watch_signals
                yield Session(run, state, control, Outputs(meter, sinks, profile, notifier))


@contextmanager
def open_meter(run: RunContext, state: RunState, directory: Directory) -> Iterator[Meter]:
    """What writes metrics, on rank 0; the others only know which losses on held-out data have been measured."""
    config, context, compute = run.config, run.distributed, run.compute
    with ExitStack() as stack:
        meter = None
        if directory.summary:
            peak = hardware.peak_flops(compute.device, compute.dtype)
            speed = Speed(config.model, config.engine, peak and peak * context.size)
            start = state.data.begin.step, state.data.begin.samples
            experts = ExpertLoad(run.out, config.model) if config.model.experts else None
            meter = Meter(run.out, config.log, start, state.data.length.steps, speed, directory.summary, experts)
            stack.enter_context(meter)
        losses = context.run_on_main(lambda: list(meter.losses.items()) if meter else [])
        yield meter or NullMeter({(step, part): loss for (step, part), loss in losses})


def open_saver(run: RunContext, state: RunState, meter: Meter, background: bool) -> Saver:
    """What saves the run's state; metrics are on disk before a checkpoint counts. ``background``: while training continues."""

    def flush() -> None:
        meter.flush()
        folder.sync(run.out)

    saving = replace(run.config.checkpoint, background=background)
    every = samples_per_save(run, state.data)
    return Saver(state.store, saving, run.config.job.warn_seconds, state.data.begin, every, flush)
