"""What is trained, and where an attempt begins: from the newest checkpoint, from imported weights, or anew."""

import logging
import math
from dataclasses import dataclass
from pathlib import Path

from hpclm import __version__
from hpclm import engine as engines
from hpclm.checkpoint import CheckpointStore, Retention, begin_from, resumable
from hpclm.checkpoint.fingerprint import fingerprint
from hpclm.config import EngineSettings
from hpclm.engine import Engine
from hpclm.model.attention import backend as attention_backend
from hpclm.node import hardware
from hpclm.node.job import Job
from hpclm.rundir import submissions
from hpclm.training import messages, records, schedule, tuning
from hpclm.training.run_context import RunContext
from hpclm.training.run_data import RunData
from hpclm.training.run_directory import Directory
from hpclm.training.schedule import Schedule

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunState:
    """What is trained, and where the attempt begins."""

    engine: Engine
    store: CheckpointStore
    data: RunData
    attempt: int | None = None
    """The attempt's number, on rank 0."""


def open_state(run: RunContext, data: RunData, directory: Directory, settings: EngineSettings) -> RunState:
    """Build the engine from ``settings``, load the state to resume from, and record the attempt. ``run``: with its settings as they are
    to be written to config.yaml, where batch.micro_size may be auto."""
    messages.kernels(settings.model, run.compute.device)
    messages.attention(settings.model, attention_backend.use(settings.model, run.compute.device))
    engine = engines.build(settings, run.compute)
    store, context, out = open_store(run, data, directory), run.distributed, run.out
    rolled_back = context.run_on_main(lambda: roll_back(out, directory.resume_step, context.job))
    data = load(run, engine, store, data)
    progress = data.begin
    context.run_on_main(lambda: records.check_progress(out, progress.step, context.job))
    context.run_on_main(lambda: tuning.keep(run.config, data.source, progress.step))
    attempt = None
    if directory.summary:
        begins = records.Beginning(progress.step, data.length.steps, rolled_back, directory.restarted)
        attempts = records.start(run.config, context, settings.plan.micro_size, begins)
        directory.summary.begin(attempts, data.length.steps)
        attempt = len(attempts)
        last = attempts[-2] if progress.step and len(attempts) > 1 else {}
        if before := schedule.of_attempt(out, last, data.source.per_epoch("train"), progress):
            schedule.tell_changes(before, Schedule(run.config.optim, data.plan, data.length), progress)
    begun = "starts from imported weights" if (store.folder / "latest").exists() else "a new run"
    log.info("run directory %s, %s", out, f"resumes from step {progress.step}" if progress.step else begun)
    return RunState(engine, store, data, attempt)


def samples_per_save(run: RunContext, data: RunData) -> float:
    """How many samples checkpoint.epochs lets pass between two checkpoints; infinitely many without it."""
    epochs = run.config.checkpoint.epochs
    return math.inf if epochs is None else epochs * data.source.per_epoch("train")


def open_store(run: RunContext, data: RunData, directory: Directory) -> CheckpointStore:
    """The checkpoints of the run, and what each will say of how it was made."""
    config, context, saving = run.config, run.distributed, run.config.checkpoint
    retention = Retention(
        saving.keep_last, saving.keep_every, saving.keep_best, saving.keep_epochs, samples_per_save(run, data)
    )
    now = fingerprint(config.model, config.seed, data.source.fingerprint, config.optim.name, data.plan.micro_size)
    origin = dict(processes=context.size, engine=config.engine.name, parallel=vars(config.parallel), hpclm=__version__)
    origin |= {"precision": hardware.NAMES[run.compute.dtype], **run.distributed.job.row()}
    return CheckpointStore(run.out / "checkpoints", retention, now, context, directory.lease, origin)


def roll_back(out: Path, resume_step: int | None, job: Job) -> int | None:
    """Set aside checkpoints newer than the one that this start was asked to continue from; its step, if there is one."""
    step = records.requested_step(out, resume_step, job)
    if step is not None:
        submissions.roll_back(out, step)
    return resumable.roll_back(out)


def load(run: RunContext, engine: Engine, store: CheckpointStore, data: RunData) -> RunData:
    """Load the checkpoint to resume from, or the weights to begin with, into the engine; the data from there on."""
    saving = run.config.checkpoint
    progress = store.resume(engine, saving.resume)
    data = data.after(run.config, progress)
    if saving.init_from and not progress.step:
        weights = begin_from(Path(saving.init_from), engine, run.distributed, store.fingerprint)
        log.info("weights of %s; optimizer, step and data start from scratch", weights)
    if progress.step and progress.planned != data.begin.planned:
        messages.other_budget(progress, data.begin.planned)
    return data
