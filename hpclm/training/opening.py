"""Open a run on every rank: what cannot work is refused before anything is written, and all that is opened is closed again."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch

from hpclm import engine as engines
from hpclm.checkpoint import CheckpointStore, Progress
from hpclm.checkpoint.fingerprint import fingerprint
from hpclm.config import RunConfig
from hpclm.diagnostics import preflight
from hpclm.distributed import bootstrap
from hpclm.distributed.context import DistributedContext
from hpclm.engine import Engine
from hpclm.model import count
from hpclm.node import affinity, hardware
from hpclm.node.notify import Notifier
from hpclm.node.preemption import Preemption
from hpclm.optim.guard import Guard
from hpclm.optim.schedules import shape
from hpclm.parallel.async_all_reduce import AsyncAllReduce
from hpclm.parallel.mesh import Mesh
from hpclm.rundir.control_files import ControlFiles
from hpclm.rundir.lease import Lease
from hpclm.rundir.summary import RunSummary
from hpclm.sinks.process import Sinks
from hpclm.training import messages, records, setup
from hpclm.training.control import ControlSync, LocalState, RunControl, StepClock
from hpclm.training.metrics import Meter, NullMeter, Speed
from hpclm.training.profile import Profile
from hpclm.training.results import Results
from hpclm.training.saver import Saver
from hpclm.training.session import Session
from hpclm.training.setup import RunData

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compute:
    """What this rank computes with."""

    device: torch.device
    dtype: torch.dtype
    """Of activations and matrix products."""
    mesh: Mesh


@dataclass(frozen=True)
class Directory:
    """The run directory, which this attempt has taken over."""

    lease: Lease | None
    """Rank 0's."""
    summary: RunSummary | None
    """Rank 0's."""
    restarted: str
    """Why Slurm has started the job again, if it has."""


@dataclass(frozen=True)
class RunState:
    """What is trained, and where the attempt begins."""

    engine: Engine
    store: CheckpointStore
    progress: Progress
    attempt: int | None
    """The attempt's number, on rank 0."""


@contextmanager
def open_session(config: RunConfig, context: DistributedContext, resume_step: int | None = None) -> Iterator[Session]:
    """Set a run up on every rank of ``context``; what cannot work is refused before anything is written.

    ``resume_step``: the step of a checkpoint to resume from, in place of the newest.
    """
    out, began = Path(config.out), time.time()
    with Preemption() as preemption, ExitStack() as opened:
        notifier = Notifier(config.job.notify, config.name, str(out.absolute()))
        if context.is_main:
            opened.enter_context(notifier)
        context.watchdog.shutdown.notify = notifier.failed
        compute = open_devices(config, context)
        context.watchdog.enter("data")
        data = setup.data(config, context, compute.mesh.dp.rank, compute.device)
        opened.callback(data.train.close)
        shape(config.optim)  # a schedule that cannot be loaded must not surface only after the warm-up
        if context.is_main:
            messages.hello(config, data.plan, context, data.length, len(data.train.samples))
        directory = open_run_directory(config, context, compute, data, resume_step, opened)
        if directory.summary:
            context.watchdog.shutdown.notify = _failed(notifier, directory.summary)
        state = open_state(config, context, compute, data, directory, resume_step, began)
        if context.is_main:
            _notify(notifier, state.attempt, state.progress.step, directory.restarted)
        meter, sinks = open_metrics(config, context, compute, data, directory, state.progress, opened)

        control_files = ControlFiles(out, config.kill_switch) if context.is_main else None
        clock, guard = (
            StepClock(state.progress.seconds),
            Guard(config.optim, state.progress.skipped, state.progress.health),
        )
        local = LocalState(context, state.store, preemption, clock, control_files, directory.lease)
        sync = ControlSync(local, AsyncAllReduce(compute.mesh.world, compute.device), config.exit_minutes)
        per_pass = setup.between_saves(config, data.source)
        saver = Saver(
            state.store, config, state.progress.step, state.progress.samples, per_pass, lambda: _flush(meter, out)
        )
        yield Session(
            config=config,
            context=context,
            plan=data.plan,
            length=data.length,
            device=compute.device,
            engine=state.engine,
            train=data.train,
            held_out=data.held_out,
            guard=guard,
            control=RunControl(config, data.length, state.engine, sync, saver, guard),
            results=Results(sync, clock, guard, meter, config.scaler.minimum),
            meter=meter,
            progress=state.progress,
            profile=opened.enter_context(Profile(config.profile, out, context.rank, compute.device)),
            attempt=state.attempt,
            sinks=sinks,
            notifier=notifier,
        )


def open_devices(config: RunConfig, context: DistributedContext) -> Compute:
    """Take a device and its cores, and set the process groups up."""
    device = hardware.device(config.engine, context.local_rank, context.local_size)
    if config.cluster.bind:
        pci_address = hardware.pci_address(device)
        logger.info("%s", affinity.bind(context.local_rank, context.local_size, pci_address))
    context.init_process_group(device, config.cluster.timeout_minutes, Path(config.out).absolute() / "logs")
    dtype = hardware.compute_type(config.engine, device)
    messages.device(config, device, dtype, context)
    minutes = timedelta(minutes=config.cluster.timeout_minutes)
    backend = "nccl" if device.type == "cuda" else None  # gloo's part in the group of all serves the CPUs
    mesh = Mesh.build(context.rank, context.size, config.parallel, minutes, backend)
    return Compute(device, dtype, replace(mesh, nodes=len({context.hosts[rank] for rank in mesh.dp.ranks})))


def open_run_directory(
    config: RunConfig,
    context: DistributedContext,
    compute: Compute,
    data: RunData,
    resume_step: int | None,
    opened: ExitStack,
) -> Directory:
    """Refuse what cannot start or resume, take the run directory over, check the nodes, and write logs from here on."""
    out = Path(config.out)
    context.watchdog.enter("start-up")
    settings = config.for_engine(context.size)
    engines.engine_class(settings, compute.device)  # refused, if it cannot be used, before anything is written
    context.run_on_main(lambda: setup.check(config, data.source, resume_step))
    lease = setup.on_main(context, lambda: setup.occupy(out, opened))
    summary = opened.enter_context(RunSummary(out, lease)) if lease else None
    preflight.check(context, compute.device, config, out, room=setup.checkpoint_bytes(config))
    setup.log_files(out, context, opened)
    restarted = records.tell_restart(out, context) if context.is_main else ""
    stacks = context.run_on_main(lambda: time.strftime("stacks-%Y%m%d-%H%M%S"))
    context.watchdog.write_to(out, stacks, config.parallel.pipeline)
    messages.kernels(config, compute.device)
    messages.attention(config, compute.device)
    return Directory(lease, summary, restarted)


def open_state(
    config: RunConfig,
    context: DistributedContext,
    compute: Compute,
    data: RunData,
    directory: Directory,
    resume_step: int | None,
    began: float,
) -> RunState:
    """Build the engine, load the state to resume from, and record the attempt, which ``began`` at that time."""
    out, length = Path(config.out), data.length
    engine = engines.build(config.for_engine(context.size), compute.mesh, compute.device, compute.dtype)
    retention = setup.retention(config, setup.between_saves(config, data.source))
    saved = fingerprint(config, data.source), context, directory.lease, setup.made(config, context)
    store = CheckpointStore(out / "checkpoints", retention, *saved)
    rolled_back = context.run_on_main(lambda: setup.go_back(out, resume_step))
    progress = setup.begin(setup.start(store, engine, config, context), length)
    context.run_on_main(lambda: records.check_progress(out, progress.step))
    attempt = None
    if directory.summary:
        about = directory.summary, began, rolled_back, directory.restarted
        attempt = records.start(out, config, context, progress.step, length.steps, *about)
    logger.info("run directory %s, %s", out, f"resumes from step {progress.step}" if progress.step else "a new run")
    return RunState(engine, store, progress, attempt)


def open_metrics(
    config: RunConfig,
    context: DistributedContext,
    compute: Compute,
    data: RunData,
    directory: Directory,
    progress: Progress,
    opened: ExitStack,
) -> tuple[Meter, Sinks]:
    """What writes metrics, and sends them to trackers: on rank 0; the others only know which losses have been measured."""
    out = Path(config.out)
    sinks = opened.enter_context(Sinks(config.log.sinks if context.is_main else [], out))
    meter = None
    if directory.summary:
        begin, speed = (progress.step, progress.samples), speed_of(config, context.size, compute.device, compute.dtype)
        meter = Meter(out, config.log, begin, data.length.steps, speed, directory.summary)
        opened.enter_context(meter)
        sinks.start()
    losses = context.run_on_main(lambda: list(meter.losses.items()) if meter else [])
    return meter or NullMeter({(step, part): loss for (step, part), loss in losses}), sinks


def _failed(notifier: Notifier, summary: RunSummary) -> Callable[[str], None]:
    """What tells people, and the run's summary, of a failure."""

    def failed(text: str) -> None:
        notifier.failed(text)
        summary.failed(text)

    return failed


def _notify(notifier: Notifier, attempt: int | None, step: int, restarted: str) -> None:
    """Tell people, if they asked for it, that the run continues."""
    notifier.about = {"attempt": attempt, **bootstrap.job()}
    if attempt is not None and attempt > 1:
        resumed = f"attempt {attempt} resumes from step {step}"
        notifier.send("restarted", resumed + (f"; {restarted}" if restarted else ""), seconds=0)


def _flush(meter: Meter, out: Path) -> None:
    """fsync logs and metrics before a checkpoint is published."""
    meter.flush()
    records.sync(out)


def speed_of(config: RunConfig, processes: int, device: torch.device, dtype: torch.dtype) -> Speed:
    """What turns samples and seconds into tokens a second, MFU and HFU, of all processes together."""
    peak = hardware.peak_flops(device, dtype)
    again = count.recompute_flops(config.model, config.engine.recompute)
    return Speed(config.model.context, count.flops_per_token(config.model), peak and peak * processes, again)
