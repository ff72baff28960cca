"""The run directory: whether the run may start in it, and what is open there while this attempt owns it."""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hpclm import folders
from hpclm import log as logs
from hpclm.checkpoint import resumable
from hpclm.checkpoint.fingerprint import fingerprint
from hpclm.checkpoint.init_from import check_init_from
from hpclm.config import RunConfig
from hpclm.config.no_effect import check_finished
from hpclm.diagnostics import preflight
from hpclm.distributed.context import DistributedContext
from hpclm.model import count
from hpclm.node import secrets
from hpclm.node.job import Job
from hpclm.rundir import events
from hpclm.rundir.lease import Lease
from hpclm.rundir.summary import RunSummary, failed_without_main, recorded_ending
from hpclm.training import messages, records
from hpclm.training.run_data import RunData, on_main

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Directory:
    """The run directory, which this attempt has taken over."""

    lease: Lease | None
    """Rank 0's."""
    summary: RunSummary | None
    """Rank 0's."""
    restarted: str
    """How the attempt before ended, and why the scheduler has started the job again, if it has."""


@contextmanager
def open_run_directory(
    config: RunConfig, context: DistributedContext, device: torch.device, data: RunData, resume_step: int | None = None
) -> Iterator[Directory]:
    """Refuse what cannot start or resume, take the run directory over, check the nodes, and write logs from here on."""
    out = Path(config.out)
    if context.is_main:
        messages.log_start(config, data.plan, context, data.length, len(data.train.samples))
    context.watchdog.enter("start-up")
    context.run_on_main(lambda: check_start(config, context.job, data, resume_step))
    with ExitStack() as stack:
        lease = on_main(context, lambda: stack.enter_context(_lease(out, context.job)))
        summary = stack.enter_context(RunSummary(out, lease)) if lease else None
        context.watchdog.shutdown.listeners.insert(0, summary.failed if summary else failed_without_main(out))
        context.watchdog.shutdown.recorded = recorded_ending(out)
        # the summary, left after it, must not say that a connection was lost, but why
        stack.enter_context(context.exit_on_error())
        if config.cluster.preflight:
            room = 12 * count.parameters(config.model)  # bytes of a checkpoint: weights and Adam's two moments in fp32
            preflight.check(context, device, config.modules(), out, room=room)
        if context.is_main:
            stack.enter_context(logs.also_to(out / "log.txt", secrets.Redactor()))
        else:
            logs.instead_to(out / "logs" / f"rank-{context.rank:05d}.log", secrets.Redactor())
        stack.enter_context(context.exit_on_error(out / "log.txt"))
        restarted = records.tell_restart(out, context) if summary else ""
        stacks = context.run_on_main(lambda: time.strftime("stacks-%Y%m%d-%H%M%S"))
        context.watchdog.write_to(out, stacks, partial(events.append, out), config.parallel.pipeline)
        try:
            yield Directory(lease, summary, restarted)
        except KeyboardInterrupt:
            if summary and (ending := summary.interrupted()):
                log.warning(ending)
            raise


def _lease(out: Path, job: Job) -> Lease:
    folders.private_folder(out, "run directory")
    if (out / "checkpoints").exists():  # perhaps a link to another disk
        folders.writable_folder(out / "checkpoints", "folder of checkpoints")
    return Lease(out, job=job)


def check_start(config: RunConfig, job: Job, data: RunData, resume_step: int | None) -> None:
    """ConfigError if the run cannot start, or resume, with these settings from the checkpoint that it would take."""
    out = Path(config.out)
    events.read_or_refuse(out)
    now = fingerprint(config.model, config.seed, data.source.fingerprint, config.optim.name, data.plan.micro_size)
    candidate = resumable.candidate(out, records.requested_step(out, resume_step, job))
    resumable.check_resumable(candidate, config.checkpoint.resume, now)
    check_finished(config, data.begin.step, data.length.steps)
    check_init_from(config.checkpoint.init_from, out / "checkpoints", now)
