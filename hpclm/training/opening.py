"""Open a run on every rank, and close it again. Settings that cannot work are refused before anything is written."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from hpclm import __version__
from hpclm import engine as engines
from hpclm.base import folders
from hpclm.base import log as logs
from hpclm.base.errors import ConfigError
from hpclm.base.terminal import many
from hpclm.checkpoint import CheckpointStore, Progress, Retention, begin_from, resumable
from hpclm.checkpoint.fingerprint import fingerprint
from hpclm.config import EngineSettings, RunConfig, compose, no_effect
from hpclm.config.length import run_length
from hpclm.config.phases import Timeline
from hpclm.diagnostics import preflight, self_check
from hpclm.distributed.context import DistributedContext
from hpclm.engine import Engine, compiling
from hpclm.model import count
from hpclm.model.attention import backend as attention_backend
from hpclm.node import environment, hardware, secrets
from hpclm.node.job import OwnJob
from hpclm.node.notify import Notifier
from hpclm.node.preemption import Preemption
from hpclm.optim.schedules import Schedule, shape
from hpclm.parallel.mesh import Compute, GroupOptions, Mesh
from hpclm.rundir import config_history, events, metrics_file
from hpclm.rundir.lease import Lease
from hpclm.rundir.summary import RunSummary, failed_without_main
from hpclm.sinks.process import Sinks
from hpclm.training import callbacks, messages, records, run_tokenizer
from hpclm.training.callbacks import Callbacks
from hpclm.training.expert_load import ExpertLoad
from hpclm.training.metrics import Meter, Speed
from hpclm.training.profile import Profile
from hpclm.training.run_data import RunData, open_data
from hpclm.training.start import RunStart

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenRun:
    """A run that is open on this rank. Only rank 0 has a lease, a meter, sinks, a notifier and callbacks."""

    config: RunConfig
    context: DistributedContext
    compute: Compute
    data: RunData
    engine: Engine
    store: CheckpointStore
    preemption: Preemption = field(default_factory=Preemption)
    lease: Lease | None = None
    meter: Meter | None = None
    losses: Mapping[str, float | None] = field(default_factory=dict)  # see Meter.losses
    profile: Profile | None = None
    sinks: Sinks | None = None
    notifier: Notifier | None = None
    callbacks: Callbacks | None = None

    @property
    def out(self) -> Path:
        """The run directory."""
        return Path(self.config.out)


class MemoryPlanner(Protocol):
    """Knows how much memory runs need: hpclm.planning.fit."""

    def with_micro_size(self, config: RunConfig, context: DistributedContext, device: torch.device) -> RunConfig:
        """``config`` with a number for batch.micro_size=auto, the same on every rank; a collective."""
        return config

    def memory_errors_explained(self, config: RunConfig, context: DistributedContext) -> AbstractContextManager[None]:
        """Inside this context, PyTorch's out-of-memory error becomes one that says what to change."""
        return nullcontext()


class NoPlanner(MemoryPlanner):
    """Changes nothing; for runs that set batch.micro_size."""


@contextmanager
def open_run(start: RunStart, context: DistributedContext, planner: MemoryPlanner | None = None) -> Iterator[OpenRun]:
    """Open a run on every rank of ``context``. Rank 0 checks ``start``, unless it is already checked."""
    planner = planner or NoPlanner()
    out = start.out
    notifier = Notifier(start.run.job.notify, out.absolute().name, str(out.absolute()), context.job.row())
    context.ending.listeners.append(notifier.failed)
    with (
        Preemption() as preemption,
        notifier if context.is_main else nullcontext(),
        planner.memory_errors_explained(start.run, context),
    ):
        compute = open_devices(start.run, context)
        context.watchdog.enter("data")
        context.run_on_main(start.check)
        recorded = with_split(start.run, context, start)  # goes to config.yaml: batch.micro_size may be auto
        begin = Progress.of(context.run_on_main(lambda: asdict(start.begin)))
        timeline = Timeline(recorded, begin.position)
        config = planner.with_micro_size(timeline.settings[timeline.phase(begin.samples)], context, compute.device)
        with (
            open_data(config, context, compute, start, recorded) as checked_data,
            open_run_directory(config, context, compute.device) as directory,
            # again, before open_run_directory reports the error
            planner.memory_errors_explained(config, context),
        ):
            checked = self_check.check_computation(config, context, compute)
            config = replace(config, checkpoint=replace(config.checkpoint, background=checked.background))
            engine = open_engine(checked.settings, compute)
            store = open_store(config, context, compute, checked_data, directory.lease)
            back_to = context.run_on_main(lambda: resumable.roll_back(out, start.resume_step))
            data = resume(config, context, engine, store, checked_data)
            if directory.summary:
                attempt = begin_attempt(recorded, context, data, directory, back_to)
                notifier.begin(attempt, data.begin.step, directory.restarted)
            log.info("run directory %s, %s", out, how_it_begins(store, data.begin.step))
            names = config.train.callbacks
            of_user = context.keep_on_main(lambda: Callbacks(names, out, bool(data.held_out))) if names else None
            with (
                Sinks(config.log.sinks if context.is_main else [], out) as sinks,
                open_meter(config, context, compute, data, directory.summary) as meter,
                Profile(config.profile, out, context.rank, compute.device) as profile,
            ):
                sinks.start()
                yield OpenRun(
                    config=config,
                    context=context,
                    compute=compute,
                    data=data,
                    engine=engine,
                    store=store,
                    preemption=preemption,
                    lease=directory.lease,
                    meter=meter,
                    losses=context.run_on_main(lambda: meter.losses if meter else {}),
                    profile=profile,
                    sinks=sinks,
                    notifier=notifier,
                    callbacks=of_user,
                )


def open_devices(config: RunConfig, context: DistributedContext) -> Compute:
    """Choose this rank's device, set up the process groups, and import the engine; ConfigError if it cannot be used."""
    device = hardware.device(config.engine, context.world.local_rank, context.world.local_size)
    context.init_process_group(device, config.cluster.timeout_minutes, Path(config.out).absolute() / "logs")
    dtype = hardware.compute_type(config.engine, device)
    compiling.check_types(hardware.NAMES[dtype], context)
    messages.device(device, dtype, hardware.set_matmul(device))
    if context.is_main:
        messages.without_effect(no_effect.by_facts(config, gpu=device.type == "cuda", fp32=dtype == torch.float32))
    context.watchdog.enter("start-up")
    backend = "nccl" if device.type == "cuda" else None  # the gloo group of all ranks serves the CPUs
    options = GroupOptions(timedelta(minutes=config.cluster.timeout_minutes), backend, device)
    mesh = Mesh.build(context.rank, context.size, config.parallel, options)
    mesh = replace(mesh, nodes=len({context.ranks[rank].node for rank in mesh.dp.ranks}))
    if config.modules() or config.engine.name == "deepspeed":
        environment.for_code_that_may_compile()
    # these raise before anything is written; a schedule that cannot be loaded would otherwise fail only after the warm-up
    engines.engine_class(config.for_engine(context.size), device)
    shape(config.optim)
    context.keep_on_main(lambda: callbacks.load(config.train.callbacks))
    return Compute(device, dtype, mesh)


def with_split(config: RunConfig, context: DistributedContext, start: RunStart) -> RunConfig:
    """``config`` with data.split_by as rank 0 has decided it; a collective."""
    by = context.run_on_main(lambda: start.settings.data.split_by)
    if by == "tokens" and config.data.split_by is None:
        text = "data.split_by=tokens: data.split=%s splits inside documents, because there are too few to split between them"
        log.info(text, config.data.split)
    return replace(config, data=replace(config.data, split_by=by))


@dataclass(frozen=True)
class Directory:
    """The run directory, which this attempt has taken over. Only rank 0 has a lease and a summary."""

    lease: Lease | None
    summary: RunSummary | None
    restarted: str  # how the attempt before ended, and why the scheduler has restarted the job, if it has


@contextmanager
def open_run_directory(config: RunConfig, context: DistributedContext, device: torch.device) -> Iterator[Directory]:
    """Take over the run directory, check the nodes, and write logs from here on."""
    out = Path(config.out)
    context.watchdog.enter("start-up")
    with ExitStack() as stack:
        lease = context.keep_on_main(lambda: stack.enter_context(_lease(out, context.job)))
        summary = stack.enter_context(RunSummary(out, lease)) if lease else None
        context.ending.listeners.insert(0, summary.failed if summary else failed_without_main(out))
        # entered after the summary and left before it, so that the summary has the cause, not a lost connection
        stack.enter_context(context.exit_on_error())
        if config.cluster.preflight:
            # bytes of a checkpoint: weights, their average and Adam's two moments in fp32
            state = 8 if config.optim.ema is None else 12
            room = 4 * count.parameters(config.model) + state * count.trained_parameters(config.model)
            preflight.check_nodes(context, device, config.modules(), out, room=room)
        if context.is_main:
            stack.enter_context(logs.also_to(out / "log.txt", secrets.Redactor()))
        else:
            logs.instead_to(out / "logs" / f"rank-{context.rank:05d}.log", secrets.Redactor())
        context.write_to(out, partial(events.append, out), config.parallel.pipeline)
        stack.enter_context(context.exit_on_error())  # once more, to report an error while the logs are open
        restarted = records.log_restart(out, context) if summary else ""
        try:
            yield Directory(lease, summary, restarted)
        except KeyboardInterrupt:
            ending = summary.interrupted() if summary else ""
            if ending:
                log.warning(ending)
            raise


def _lease(out: Path, job: OwnJob) -> Lease:
    folders.private_folder(out, "run directory")
    if (out / "checkpoints").exists():  # perhaps a link to another disk
        folders.writable_folder(out / "checkpoints", "folder of checkpoints")
    return Lease(out, job=job)


def open_engine(settings: EngineSettings, compute: Compute) -> Engine:
    """Build the engine, and log which kernels it uses."""
    messages.kernels(settings.model, compute.device)
    messages.export(settings.model)
    messages.attention(settings.model, attention_backend.use(settings.model, compute.device))
    return engines.build(settings, compute)


def open_store(
    config: RunConfig, context: DistributedContext, compute: Compute, data: RunData, lease: Lease | None
) -> CheckpointStore:
    """The checkpoints of the run. Each records the attempt that saves it."""
    saving = config.checkpoint
    per_save = data.samples_per_save(saving.epochs)
    retention = Retention(saving.keep_last, saving.keep_every, saving.keep_best, saving.keep_epochs, per_save)
    now = fingerprint(data.timeline.run.model, config.seed, data.source.fingerprint, config.optim, data.plan.micro_size)
    origin = dict(processes=context.size, engine=config.engine.name, parallel=vars(config.parallel), hpclm=__version__)
    origin |= {"precision": hardware.NAMES[compute.dtype], **context.job.row()}
    return CheckpointStore(Path(config.out) / "checkpoints", retention, now, context, lease, origin)


def resume(
    config: RunConfig, context: DistributedContext, engine: Engine, store: CheckpointStore, data: RunData
) -> RunData:
    """Load the checkpoint to resume from, or the weights to begin with, into the engine; returns the data from there on."""
    saving = config.checkpoint
    progress = store.resume(engine, saving.resume)
    data = data.after(progress)
    if saving.init_from and not progress.step:
        weights = begin_from(Path(saving.init_from), engine, context, store.fingerprint)
        log.info("weights of %s; optimizer, step and data start from scratch", weights)
    if progress.step and progress.planned != data.begin.planned:
        messages.other_budget(progress, data.begin.planned)
    context.run_on_main(lambda: records.check_progress(Path(config.out), progress.step, context.job))
    context.run_on_main(lambda: run_tokenizer.keep(config, data.source.fingerprint.get("tokenizer"), progress.step))
    return data


def begin_attempt(
    recorded: RunConfig, context: DistributedContext, data: RunData, directory: Directory, back_to: int | None
) -> int:
    """Record that an attempt begins, and log changes since the last attempt; returns the attempt's number. ``recorded``: the settings for
    config.yaml. ``back_to``: the step of the checkpoint that the run has gone back to."""
    assert directory.summary is not None
    out = Path(recorded.out)
    begin = data.begin
    facts: dict[str, Any] = {"from_step": begin.step, "steps": data.length.steps, "micro_size": data.plan.micro_size}
    facts |= {"samples": begin.samples, "planned": begin.planned}  # on which the order of the samples depends
    timeline = data.timeline
    facts["context"] = timeline.settings[timeline.phase(begin.samples)].model.context
    if begin.phases:
        facts["phases"] = [asdict(reading) for reading in begin.phases]
    exclusion = data.train.exclusion
    if exclusion is not None:
        facts["without"] = config_history.keep_list(out, exclusion.name, exclusion.text)
        count = many(len(exclusion), "document")
        log.info(
            "data.without: %s of the training data are replaced by end-of-document tokens from step %d on",
            count,
            begin.step + 1,
        )
    if back_to is not None:
        facts["back_to"] = back_to
    if directory.restarted:
        facts["after"] = directory.restarted
    metrics_file.note_reached(out, begin.step)
    attempts = records.start(recorded, context, directory.summary.generation, facts)
    directory.summary.begin(attempts[-1].began, data.length.steps)
    last = attempts[-2].began if begin.step and len(attempts) > 1 else {}
    before = schedule_of(out, last, data.source.per_epoch("train"), begin)
    if before:
        messages.changed_schedule(before, Schedule(recorded.optim, data.plan, data.length, data.timeline), begin)
    return len(attempts)


def schedule_of(out: Path, attempt: Mapping[str, Any], samples_per_epoch: int, progress: Progress) -> Schedule | None:
    """The schedule that an earlier attempt would follow after ``progress``; None if its settings cannot be read."""
    with suppress(ConfigError, KeyError, TypeError):
        config: RunConfig = compose.of_run(out, [], attempt["config"])
        length = run_length(config, samples_per_epoch, progress.position)
        timeline = Timeline(config, progress.position)
        plan = timeline.settings[timeline.phase(progress.samples)].plan(attempt["size"])
        return Schedule(config.optim, plan, length, timeline)
    return None


def how_it_begins(store: CheckpointStore, step: int) -> str:
    """How an attempt that resumes from ``step`` begins, for the log."""
    if step:
        return f"resumes from step {step}"
    if (store.folder / "latest").exists():
        return "starts from imported weights"
    return "a new run"


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
    experts = ExpertLoad(out, config.model, summary.is_mine) if config.model.experts.count else None
    with Meter(out, config.log, data.begin, data.length.steps, speed, summary, experts, data.read_of_datasets) as meter:
        yield meter
