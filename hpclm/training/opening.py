"""Open a run on every rank: what cannot work is refused before anything is written, and all that is opened is closed again."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch

from hpclm import __version__, folders
from hpclm import engine as engines
from hpclm import log as logs
from hpclm.checkpoint import CheckpointStore, Progress, Retention, begin_from, resumable
from hpclm.checkpoint.fingerprint import fingerprint
from hpclm.checkpoint.init_from import check_init_from
from hpclm.config import EngineSettings, RunConfig, no_effect
from hpclm.config.no_effect import check_finished
from hpclm.diagnostics import preflight
from hpclm.distributed import bootstrap
from hpclm.distributed.context import DistributedContext
from hpclm.engine import Engine
from hpclm.errors import ConfigError
from hpclm.model import count
from hpclm.model.attention import backend as attention_backend
from hpclm.node import bus_error, environment, hardware, secrets
from hpclm.node.notify import Notifier
from hpclm.node.preemption import Preemption
from hpclm.optim.schedules import shape
from hpclm.optim.stability import NonfiniteGuard
from hpclm.parallel.async_all_reduce import AsyncAllReduce
from hpclm.parallel.compute import Compute
from hpclm.parallel.mesh import Mesh
from hpclm.rundir import folder, submissions
from hpclm.rundir.attempts import check_attempts_readable
from hpclm.rundir.control_files import ControlFiles
from hpclm.rundir.lease import Lease
from hpclm.rundir.summary import RunSummary, failed_without_main, recorded_ending
from hpclm.sinks.process import Sinks
from hpclm.training import compiling, messages, proof, records, schedule, tuning
from hpclm.training.compiling import AgreedCompilations
from hpclm.training.control import RunControl, Saver, SignalWatch
from hpclm.training.corruption import verifier
from hpclm.training.metrics import Meter, NullMeter, Speed
from hpclm.training.profile import Profile
from hpclm.training.results import Results
from hpclm.training.run_data import RunData, on_main, open_data
from hpclm.training.schedule import Schedule
from hpclm.training.session import Session
from hpclm.training.sync import ControlSync, LocalState, StepClock

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Directory:
    """The run directory, which this attempt has taken over."""

    path: Path
    lease: Lease | None
    """Rank 0's."""
    summary: RunSummary | None
    """Rank 0's."""
    restarted: str
    """How the attempt before ended, and why Slurm has started the job again, if it has."""
    resume_step: int | None
    """The step of the checkpoint that this start was asked to continue from."""


@dataclass(frozen=True)
class RunState:
    """What is trained, and where the attempt begins."""

    engine: Engine
    store: CheckpointStore
    progress: Progress
    samples_per_save: float
    """What checkpoint.epochs asks for."""
    attempt: int | None
    """The attempt's number, on rank 0."""


class MemoryPlanner(Protocol):
    """What knows how much memory runs need: hpclm.planning.fit."""

    def with_micro_size(self, config: RunConfig, context: DistributedContext, device: torch.device) -> RunConfig:
        """``config`` with a number for batch.micro_size=auto, the same on every rank; a collective."""

    def memory_errors_explained(self, config: RunConfig, context: DistributedContext) -> AbstractContextManager[None]:
        """Turns PyTorch's error in the block into one that says what to change."""


class NoPlanner:
    """For a run whose micro-batch is a number."""

    def with_micro_size(self, config: RunConfig, context: DistributedContext, device: torch.device) -> RunConfig:
        """``config``."""
        return config

    def memory_errors_explained(self, config: RunConfig, context: DistributedContext) -> AbstractContextManager[None]:
        """Lets errors pass."""
        return nullcontext()


@contextmanager
def open_session(
    config: RunConfig, context: DistributedContext, resume_step: int | None = None, planner: MemoryPlanner | None = None
) -> Iterator[Session]:
    """Set a run up on every rank of ``context``; what cannot work is refused before anything is written.

    ``resume_step``: the step of a checkpoint to resume from, in place of the newest.
    """
    planner, out = planner or NoPlanner(), Path(config.out)
    notifier = Notifier(config.job.notify, out.absolute().name, str(out.absolute()), bootstrap.job())
    context.watchdog.shutdown.listeners.append(notifier.failed)
    with (
        Preemption() as preemption,
        notifier if context.is_main else nullcontext(),
        planner.memory_errors_explained(config, context),
    ):
        compute = open_devices(config, context)
        written, config = config, planner.with_micro_size(config, context, compute.device)
        context.watchdog.enter("data")
        with (
            open_data(config, context, compute) as data,
            open_run_directory(config, context, compute, data, resume_step) as directory,
            # again, before the guard of the run directory reports the error
            planner.memory_errors_explained(config, context),
        ):
            proven = proof.check(config, context, compute)
            state = open_state(written, context, compute, data, directory, proven.settings)
            if state.attempt is not None:
                notifier.begin(state.attempt, state.progress.step, directory.restarted)
            with (
                open_metrics(config, context, compute, data, directory, state.progress) as (meter, sinks),
                Profile(config.profile, out, context.rank, compute.device) as profile,
            ):
                progress = state.progress
                clock, guard = (
                    StepClock(progress.seconds),
                    NonfiniteGuard(config.optim, progress.skipped, progress.health),
                )
                control_files = ControlFiles(out, config.kill_switch) if context.is_main else None
                compilations = AgreedCompilations(state.engine, context)
                set_up = max(0.0, time.time() - context.began) / 60
                local = LocalState(
                    context,
                    state.store,
                    preemption,
                    clock,
                    control_files,
                    directory.lease,
                    compilations,
                    set_up_minutes=set_up,
                )
                sync = ControlSync(local, AsyncAllReduce(compute.mesh.world, compute.device), config.exit_minutes)

                def flush() -> None:
                    meter.flush()
                    folder.sync(out)

                warn_seconds, per_save = config.job.warn_seconds, state.samples_per_save
                saving = replace(config.checkpoint, background=proven.background)
                saver = Saver(state.store, saving, warn_seconds, progress, per_save, flush)
                context.watchdog.each_turn = SignalWatch(config, preemption, saver, context.watchdog)
                yield Session(
                    config=config,
                    context=context,
                    device=compute.device,
                    data=data,
                    schedule=Schedule(config.optim, data.plan, data.length),
                    engine=state.engine,
                    compilations=compilations,
                    guard=guard,
                    control=RunControl(config, data.length, state.engine, sync, saver, guard),
                    verifier=verifier(state.engine, compute.mesh, context, config.cluster.verify_every),
                    results=Results(sync, clock, guard, meter, config.scaler.minimum),
                    meter=meter,
                    progress=progress,
                    profile=profile,
                    attempt=state.attempt,
                    sinks=sinks,
                    notifier=notifier,
                )


def open_devices(config: RunConfig, context: DistributedContext) -> Compute:
    """Take a device, set the process groups up, and load the engine; ConfigError if it cannot be used."""
    device = hardware.device(config.engine, context.local_rank, context.local_size)
    context.init_process_group(device, config.cluster.timeout_minutes, Path(config.out).absolute() / "logs")
    dtype = hardware.compute_type(config.engine, device)
    compiling.check_types(hardware.NAMES[dtype], context)
    messages.device(device, dtype, hardware.set_matmul(device))
    if context.is_main:
        messages.without_effect(no_effect.by_device(config, device.type == "cuda", dtype == torch.float32))
    minutes = timedelta(minutes=config.cluster.timeout_minutes)
    backend = "nccl" if device.type == "cuda" else None  # gloo's part in the group of all serves the CPUs
    mesh = Mesh.build(context.rank, context.size, config.parallel, minutes, backend)
    mesh = replace(mesh, nodes=len({context.ranks[rank].node for rank in mesh.dp.ranks}))
    if config.modules() or config.engine.name == "deepspeed":
        environment.for_code_that_may_compile()
    engines.engine_class(
        config.for_engine(context.size), device
    )  # refused, if it cannot be used, before anything is written
    shape(config.optim)  # a schedule that cannot be loaded must not surface only after the warm-up
    return Compute(device, dtype, mesh)


@contextmanager
def open_run_directory(
    config: RunConfig, context: DistributedContext, compute: Compute, data: RunData, resume_step: int | None
) -> Iterator[Directory]:
    """Refuse what cannot start or resume, take the run directory over, check the nodes, and write logs from here on."""
    out = Path(config.out)
    if context.is_main:
        messages.log_start(config, data.plan, context, data.length, len(data.train.samples))
    context.watchdog.enter("start-up")
    context.run_on_main(lambda: check_start(config, data, resume_step))
    with ExitStack() as stack:
        lease = on_main(context, lambda: stack.enter_context(_lease(out)))
        summary = stack.enter_context(RunSummary(out, lease)) if lease else None
        context.watchdog.shutdown.listeners.insert(0, summary.failed if summary else failed_without_main(out))
        context.watchdog.shutdown.recorded = recorded_ending(out)
        stack.enter_context(
            context.exit_on_error()
        )  # the summary, left after it, must not say that a connection was lost, but why
        if config.cluster.preflight:
            room = 12 * count.parameters(config.model)  # bytes of a checkpoint: weights and Adam's two moments in fp32
            preflight.check(context, compute.device, config.modules(), out, room=room)
        if context.is_main:
            stack.enter_context(logs.also_to(out / "log.txt", secrets.Redactor()))
        else:
            logs.instead_to(out / "logs" / f"rank-{context.rank:05d}.log", secrets.Redactor())
        stack.enter_context(context.exit_on_error(out / "log.txt"))
        restarted = records.tell_restart(out, context, summary.before) if summary else ""
        stacks = context.run_on_main(lambda: time.strftime("stacks-%Y%m%d-%H%M%S"))
        context.watchdog.write_to(out, stacks, config.parallel.pipeline)
        stack.enter_context(
            bus_error.explained(
                lambda cause: context.watchdog.end(f"{context.ranks[context.rank]}: {cause}", ConfigError.exit_code)
            )
        )
        try:
            yield Directory(out, lease, summary, restarted, resume_step)
        except KeyboardInterrupt:
            if summary and (ending := summary.interrupted()):
                log.warning(ending)
            raise


def _lease(out: Path) -> Lease:
    folders.private_folder(out, "run directory")
    if (out / "checkpoints").exists():  # perhaps a link to another disk
        folders.writable_folder(out / "checkpoints", "folder of checkpoints")
    return Lease(out)


def check_start(config: RunConfig, data: RunData, resume_step: int | None) -> None:
    """ConfigError where the run cannot start, or resume, with these settings from the checkpoint that it would take."""
    out = Path(config.out)
    check_attempts_readable(out)
    now = fingerprint(config.model, config.seed, data.source.fingerprint, config.optim.name)
    candidate = resumable.candidate(out, records.requested_step(out, resume_step))
    resumable.check_resumable(candidate, config.checkpoint.resume, now)
    if candidate:
        check_finished(config, Progress.of(candidate[1].progress).step, data.length.steps)
    check_init_from(config.checkpoint.init_from, out / "checkpoints", now)


def open_state(
    config: RunConfig,
    context: DistributedContext,
    compute: Compute,
    data: RunData,
    directory: Directory,
    settings: EngineSettings,
) -> RunState:
    """Build the engine from ``settings``, load the state to resume from, and record the attempt. ``config``: as it is to be written
    to config.yaml, where batch.micro_size may be auto."""
    messages.kernels(settings.model, compute.device)
    messages.attention(settings.model, attention_backend.use(settings.model, compute.device))
    engine = engines.build(settings, compute)
    saving, source, out = config.checkpoint, data.source, directory.path
    per_save = math.inf if saving.epochs is None else saving.epochs * source.per_epoch("train")
    retention = Retention(saving.keep_last, saving.keep_every, saving.keep_best, saving.keep_epochs, per_save)
    now = fingerprint(config.model, config.seed, source.fingerprint, config.optim.name)
    made = dict(processes=context.size, engine=config.engine.name, parallel=vars(config.parallel), hpclm=__version__)
    made |= {"precision": hardware.NAMES[compute.dtype], **bootstrap.job()}
    store = CheckpointStore(out / "checkpoints", retention, now, context, directory.lease, made)

    def roll_back() -> int | None:
        """Set aside checkpoints newer than the one that this start was asked to continue from; its step, if there is one."""
        step = records.requested_step(out, directory.resume_step)
        if step is not None:
            submissions.roll_back(out, step)
        return resumable.roll_back(out)

    rolled_back = context.run_on_main(roll_back)
    progress = store.resume(engine, saving.resume)
    if saving.init_from and not progress.step:
        weights = begin_from(Path(saving.init_from), engine, context, store.fingerprint)
        log.info("weights of %s; optimizer, step and data start from scratch", weights)
    if progress.step and progress.planned != data.length.samples:
        messages.other_budget(progress, data.length.samples)
    progress = replace(progress, planned=data.length.samples)
    context.run_on_main(lambda: records.check_progress(out, progress.step))
    context.run_on_main(lambda: tuning.keep(config, source, progress.step))
    attempt = None
    if directory.summary:
        begins = records.Beginning(progress.step, data.length.steps, rolled_back, directory.restarted)
        attempts = records.start(config, context, settings.plan.micro_size, begins)
        directory.summary.begin(attempts, data.length.steps)
        attempt = len(attempts)
        before = schedule.of_attempt(out, attempts[-2], source.per_epoch("train")) if attempt > 1 else None
        if before and progress.step:
            schedule.tell_changes(before, Schedule(config.optim, data.plan, data.length), progress)
    begun = "starts from imported weights" if (store.folder / "latest").exists() else "a new run"
    log.info("run directory %s, %s", out, f"resumes from step {progress.step}" if progress.step else begun)
    return RunState(engine, store, progress, per_save, attempt)


@contextmanager
def open_metrics(
    config: RunConfig,
    context: DistributedContext,
    compute: Compute,
    data: RunData,
    directory: Directory,
    progress: Progress,
) -> Iterator[tuple[Meter, Sinks]]:
    """What writes metrics, and sends them to trackers: on rank 0; the others only know which losses have been measured."""
    with Sinks(config.log.sinks if context.is_main else [], directory.path) as sinks, ExitStack() as stack:
        meter = None
        if directory.summary:
            peak = hardware.peak_flops(compute.device, compute.dtype)
            speed = Speed(config.model, config.engine.recompute, peak and peak * context.size)
            start = progress.step, progress.samples
            meter = Meter(directory.path, config.log, start, data.length.steps, speed, directory.summary)
            stack.enter_context(meter)
            sinks.start()
        losses = context.run_on_main(lambda: list(meter.losses.items()) if meter else [])
        yield meter or NullMeter({(step, part): loss for (step, part), loss in losses}), sinks
