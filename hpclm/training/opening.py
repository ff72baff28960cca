"""Open a run on every rank. What cannot work is refused before anything is written, and everything that is opened is closed again."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from hpclm import __version__, folders
from hpclm import engine as engines
from hpclm import log as logs
from hpclm.checkpoint import CheckpointStore, Progress, Retention, begin_from, resumable
from hpclm.checkpoint.fingerprint import fingerprint
from hpclm.config import EngineSettings, RunConfig, compose, no_effect
from hpclm.config.length import run_length
from hpclm.diagnostics import preflight, self_check
from hpclm.distributed.context import DistributedContext
from hpclm.engine import Engine, compiling
from hpclm.errors import ConfigError
from hpclm.model import count
from hpclm.model.attention import backend as attention_backend
from hpclm.node import environment, hardware, secrets
from hpclm.node.job import OwnJob
from hpclm.node.notify import Notifier
from hpclm.node.preemption import Preemption
from hpclm.optim.schedules import Schedule, shape
from hpclm.parallel.mesh import Compute, GroupOptions, Mesh
from hpclm.rundir import events
from hpclm.rundir.lease import Lease
from hpclm.rundir.summary import RunSummary, failed_without_main
from hpclm.sinks.process import Sinks
from hpclm.training import messages, records, tuning
from hpclm.training.expert_load import ExpertLoad
from hpclm.training.metrics import Meter, Speed
from hpclm.training.profile import Profile
from hpclm.training.run_data import RunData, on_main, open_data
from hpclm.training.start import RunStart

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenRun:
    """A run that is open on this rank. Only rank 0 has a lease, an attempt, a meter, sinks and a notifier."""

    config: RunConfig
    context: DistributedContext
    compute: Compute
    data: RunData
    engine: Engine
    store: CheckpointStore
    preemption: Preemption = field(default_factory=Preemption)
    lease: Lease | None = None
    attempt: int | None = None
    """The number of the attempt."""
    meter: Meter | None = None
    losses: Mapping[tuple[int, str], float | None] = field(default_factory=dict)
    """Validation losses measured before, by step and part."""
    profile: Profile | None = None
    sinks: Sinks | None = None
    notifier: Notifier | None = None

    @property
    def out(self) -> Path:
        """The run directory."""
        return Path(self.config.out)


class MemoryPlanner(Protocol):
    """Knows how much memory runs need: hpclm.planning.fit."""

    def with_micro_size(self, config: RunConfig, context: DistributedContext, device: torch.device) -> RunConfig:
        """``config`` with a number for batch.micro_size=auto, the same on every rank; a collective."""

    def memory_errors_explained(self, config: RunConfig, context: DistributedContext) -> AbstractContextManager[None]:
        """Turns PyTorch's error in the block into one that says what to change."""


class NoPlanner:
    """Plans nothing; for runs with a number for batch.micro_size."""

    def with_micro_size(self, config: RunConfig, context: DistributedContext, device: torch.device) -> RunConfig:
        """``config``."""
        return config

    def memory_errors_explained(self, config: RunConfig, context: DistributedContext) -> AbstractContextManager[None]:
        """Lets errors pass."""
        return nullcontext()


@contextmanager
def open_run(start: RunStart, context: DistributedContext, planner: MemoryPlanner | None = None) -> Iterator[OpenRun]:
    """Set a run up on every rank of ``context``; rank 0 checks the ``start``, if that has not been done."""
    planner = planner or NoPlanner()
    config, out = start.run, start.out
    notifier = Notifier(config.job.notify, out.absolute().name, str(out.absolute()), context.job.row())
    context.ending.listeners.append(notifier.failed)
    with (
        Preemption() as preemption,
        notifier if context.is_main else nullcontext(),
        planner.memory_errors_explained(config, context),
    ):
        compute = open_devices(config, context)
        context.watchdog.enter("data")
        context.run_on_main(start.check)
        given = with_split(config, context, start)
        config = planner.with_micro_size(given, context, compute.device)
        with (
            open_data(config, context, compute, start) as data,
            open_run_directory(config, context, compute.device) as directory,
            # again, before the guard of the run directory reports the error
            planner.memory_errors_explained(config, context),
        ):
            checked = self_check.check_computation(config, context, compute)
            engine = open_engine(checked.settings, compute)
            store = open_store(config, context, compute, data, directory.lease)
            rolled_back = context.run_on_main(lambda: roll_back(out, start.resume_step))
            data = load(config, context, engine, store, data)
            attempt = None
            if directory.summary:
                begins = records.Beginning(data.begin.step, data.length.steps, rolled_back, directory.restarted)
                attempt = begin_attempt(given, context, data, directory.summary, begins)
            log.info("run directory %s, %s", out, how_it_begins(store, data.begin.step))
            if attempt:
                notifier.begin(attempt, data.begin.step, directory.restarted)
            with (
                Sinks(config.log.sinks if context.is_main else [], out) as sinks,
                open_meter(config, context, compute, data, directory.summary) as meter,
                Profile(config.profile, out, context.rank, compute.device) as profile,
            ):
                sinks.start()
                losses = context.run_on_main(lambda: list(meter.losses.items()) if meter else [])
                yield OpenRun(
                    config=replace(config, checkpoint=replace(config.checkpoint, background=checked.background)),
                    context=context,
                    compute=compute,
                    data=data,
                    engine=engine,
                    store=store,
                    preemption=preemption,
                    lease=directory.lease,
                    attempt=attempt,
                    meter=meter,
                    losses={(step, part): loss for (step, part), loss in losses},
                    profile=profile,
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
        messages.without_effect(no_effect.by_facts(config, gpu=device.type == "cuda", fp32=dtype == torch.float32))
    context.watchdog.enter("start-up")
    backend = "nccl" if device.type == "cuda" else None  # gloo's part in the group of all serves the CPUs
    options = GroupOptions(timedelta(minutes=config.cluster.timeout_minutes), backend, device)
    mesh = Mesh.build(context.rank, context.size, config.parallel, options)
    mesh = replace(mesh, nodes=len({context.ranks[rank].node for rank in mesh.dp.ranks}))
    if config.modules() or config.engine.name == "deepspeed":
        environment.for_code_that_may_compile()
    # refused, if it cannot be used, before anything is written
    engines.engine_class(config.for_engine(context.size), device)
    shape(config.optim)  # a schedule that cannot be loaded must not surface only after the warm-up
    return Compute(device, dtype, mesh)


@dataclass(frozen=True)
class Directory:
    """The run directory, which this attempt has taken over. Only rank 0 has a lease and a summary."""

    lease: Lease | None
    summary: RunSummary | None
    restarted: str
    """How the attempt before ended, and why the scheduler has started the job again, if it has."""


@contextmanager
def open_run_directory(config: RunConfig, context: DistributedContext, device: torch.device) -> Iterator[Directory]:
    """Take the run directory over, check the nodes, and write logs from here on."""
    out = Path(config.out)
    context.watchdog.enter("start-up")
    with ExitStack() as stack:
        lease = on_main(context, lambda: stack.enter_context(_lease(out, context.job)))
        summary = stack.enter_context(RunSummary(out, lease)) if lease else None
        context.ending.listeners.insert(0, summary.failed if summary else failed_without_main(out))
        # the summary, left after it, must not say that a connection was lost, but why
        stack.enter_context(context.exit_on_error())
        if config.cluster.preflight:
            room = 12 * count.parameters(config.model)  # bytes of a checkpoint: weights and Adam's two moments in fp32
            preflight.check(context, device, config.modules(), out, room=room)
        if context.is_main:
            stack.enter_context(logs.also_to(out / "log.txt", secrets.Redactor()))
        else:
            logs.instead_to(out / "logs" / f"rank-{context.rank:05d}.log", secrets.Redactor())
        context.write_to(out, partial(events.append, out), config.parallel.pipeline)
        stack.enter_context(context.exit_on_error())
        restarted = records.tell_restart(out, context) if summary else ""
        try:
            yield Directory(lease, summary, restarted)
        except KeyboardInterrupt:
            if summary and (ending := summary.interrupted()):
                log.warning(ending)
            raise


def _lease(out: Path, job: OwnJob) -> Lease:
    folders.private_folder(out, "run directory")
    if (out / "checkpoints").exists():  # perhaps a link to another disk
        folders.writable_folder(out / "checkpoints", "folder of checkpoints")
    return Lease(out, job=job)


def with_split(config: RunConfig, context: DistributedContext, start: RunStart) -> RunConfig:
    """``config`` with data.split_by, as rank 0 has decided it; a collective."""
    by = context.run_on_main(lambda: start.settings.data.split_by)
    if by == "tokens" and config.data.split_by is None:
        text = "data.split_by=tokens: data.split=%s divides inside documents, of which there are too few to divide them"
        log.info(text, config.data.split)
    return replace(config, data=replace(config.data, split_by=by))


def open_engine(settings: EngineSettings, compute: Compute) -> Engine:
    """Build the engine, and log which kernels it uses."""
    messages.kernels(settings.model, compute.device)
    messages.attention(settings.model, attention_backend.use(settings.model, compute.device))
    return engines.build(settings, compute)


def open_store(
    config: RunConfig, context: DistributedContext, compute: Compute, data: RunData, lease: Lease | None
) -> CheckpointStore:
    """The checkpoints of the run, with the facts that each records about how it was made."""
    saving = config.checkpoint
    per_save = samples_per_save(config, data)
    retention = Retention(saving.keep_last, saving.keep_every, saving.keep_best, saving.keep_epochs, per_save)
    now = fingerprint(config.model, config.seed, data.source.fingerprint, config.optim.name, data.plan.micro_size)
    origin = dict(processes=context.size, engine=config.engine.name, parallel=vars(config.parallel), hpclm=__version__)
    origin |= {"precision": hardware.NAMES[compute.dtype], **context.job.row()}
    return CheckpointStore(Path(config.out) / "checkpoints", retention, now, context, lease, origin)


def samples_per_save(config: RunConfig, data: RunData) -> float:
    """Samples between two checkpoints by checkpoint.epochs; infinity without it."""
    epochs = config.checkpoint.epochs
    return math.inf if epochs is None else epochs * data.source.per_epoch("train")


def roll_back(out: Path, step: int | None) -> int | None:
    """Set aside checkpoints newer than that of ``step``, or of a pending rollback; returns its step, or None."""
    if step is not None:
        events.append(out, "roll back", step=step)
    return resumable.roll_back(out)


def load(
    config: RunConfig, context: DistributedContext, engine: Engine, store: CheckpointStore, data: RunData
) -> RunData:
    """Load the checkpoint to resume from, or the weights to begin with, into the engine; returns the data from there on."""
    saving = config.checkpoint
    progress = store.resume(engine, saving.resume)
    data = data.after(config, progress)
    if saving.init_from and not progress.step:
        weights = begin_from(Path(saving.init_from), engine, context, store.fingerprint)
        log.info("weights of %s; optimizer, step and data start from scratch", weights)
    if progress.step and progress.planned != data.begin.planned:
        messages.other_budget(progress, data.begin.planned)
    context.run_on_main(lambda: records.check_progress(Path(config.out), progress.step, context.job))
    context.run_on_main(lambda: tuning.keep(config, data.source, progress.step))
    return data


def how_it_begins(store: CheckpointStore, step: int) -> str:
    """How an attempt that begins after ``step`` begins, for the log."""
    if step:
        return f"resumes from step {step}"
    return "starts from imported weights" if (store.folder / "latest").exists() else "a new run"


def begin_attempt(
    given: RunConfig, context: DistributedContext, data: RunData, summary: RunSummary, begins: records.Beginning
) -> int:
    """Record that an attempt begins, and what has changed since the last one; returns its number. ``given``: the settings for
    config.yaml, in which batch.micro_size may be auto."""
    out, progress = Path(given.out), data.begin
    attempts = records.start(given, context, data.plan.micro_size, begins, summary.generation)
    summary.begin(attempts[-1].began, data.length.steps)
    last = attempts[-2].began if progress.step and len(attempts) > 1 else {}
    if before := schedule_of(out, last, data.source.per_epoch("train"), progress):
        messages.changed_schedule(before, Schedule(given.optim, data.plan, data.length), progress)
    return len(attempts)


def schedule_of(out: Path, attempt: Mapping[str, Any], samples_per_epoch: int, progress: Progress) -> Schedule | None:
    """The schedule that an earlier attempt of the run would follow after ``progress``; None if its settings cannot be read."""
    with suppress(ConfigError, KeyError, TypeError):
        config: RunConfig = compose.of_run(out, [], attempt["config"])
        length = run_length(config, samples_per_epoch, progress.step, progress.samples)
        return Schedule(config.optim, config.plan(attempt["size"]), length)
    return None


@contextmanager
def open_meter(
    config: RunConfig, context: DistributedContext, compute: Compute, data: RunData, summary: RunSummary | None
) -> Iterator[Meter | None]:
    """The writer of metrics on rank 0, which has the ``summary``; None on other ranks."""
    if summary is None:
        yield None
        return
    out = Path(config.out)
    peak = hardware.peak_flops(compute.device, compute.dtype)
    speed = Speed(config.model, config.engine, peak and peak * context.size)
    start = data.begin.step, data.begin.samples
    experts = ExpertLoad(out, config.model) if config.model.experts else None
    with Meter(out, config.log, start, data.length.steps, speed, summary, experts) as meter:
        yield meter
