"""Run one process of a run: check the settings, join the other ranks, and run training/loop.py."""

import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpclm.base import folders, log
from hpclm.base.errors import ConfigError, ExitCode, Interrupted
from hpclm.config import RunConfig
from hpclm.config.data import SOURCES
from hpclm.distributed import bootstrap, network
from hpclm.distributed import context as distributed
from hpclm.distributed.bootstrap import World
from hpclm.launch.phases import PhaseEnds
from hpclm.launch.schedulers import current_job
from hpclm.node import ends, failures, preemption, secrets, threads
from hpclm.node.job import OwnJob
from hpclm.rundir import code, folder

if TYPE_CHECKING:
    from hpclm.preprocess.text_dataset import NamedDataset
    from hpclm.training.start import RunStart

AGAIN = "run the same call again to continue"


def start(
    settings: RunConfig,
    alone: bool = False,
    resume_step: int | None = None,
    quiet: bool = False,
    began: float | None = None,
) -> int:
    """Join the other ranks and train; returns the exit code. With several ranks, it ends the process instead of returning.

    ``alone``: train as a single process, even in a job of several tasks. ``resume_step``: the step of the checkpoint to continue
    from, instead of the newest. ``quiet``: print only warnings. ``began``: when the attempt began, in seconds since 1970; None: now.
    """
    code.check_snapshot()
    world = bootstrap.detect(alone=alone)
    if began is not None:
        world = replace(world, began=began)
    parent = os.getppid()
    if world.local_size > 1:  # NumPy and PyTorch read it when they are loaded
        os.environ["OMP_NUM_THREADS"] = str(threads.per_process(world.local_size))
    _refuse_incomplete(settings)
    job = current_job(settings.job.cluster)
    log.setup(world.rank, redact=secrets.Redactor(), quiet=quiet)
    _check_without_ranks(settings, world)
    if not world.local_rank:
        folders.sweep_temporary()
    from hpclm.training.start import RunStart

    checked = RunStart(settings, resume_step, job, world.size)
    # several ranks must meet before a rank may fail; the user's own data source may import PyTorch
    if world.size == 1 and settings.data.source in SOURCES:
        checked.check()
    if world.local_size < world.size:
        network.hide_lookup_warnings()
    if world.size == 1:
        ended = train(checked, world, job)
        if world.launcher == bootstrap.SRUN and os.getppid() != parent:
            job.end_step(ended)
        return ended
    ended, failed_alone = _train_with_others(checked, world, job)
    if world.launcher in bootstrap.OF_MPI and not failed_alone:
        return ended  # MPI is finalised at exit, where all ranks wait for each other
    if world.rank == 0 and world.launcher == bootstrap.SRUN and os.getppid() != parent:
        job.end_step(ended)
    ends.note(ended)
    # skip the interpreter's shutdown, which may abort while exceptions refer to the process group
    with suppress(OSError):  # the reader may have closed the pipe
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(ended)


def _check_without_ranks(settings: RunConfig, world: World) -> None:
    """Refuse settings that cannot work with ``world``, before PyTorch is loaded, which takes seconds.

    Raises ConfigError on rank 0, or on the first rank of a machine, and SystemExit on the other ranks.
    """
    try:
        settings.plan(world.size)
    except ConfigError as error:
        if world.rank:
            raise SystemExit(error.exit_code) from None
        raise
    try:
        network.check_interface(settings.cluster.interface)
    except ConfigError as error:  # this machine lacks the interface
        if world.size == 1:
            logging.getLogger(__name__).warning("%s; ignored, because a single process needs no interface", error)
        elif world.local_rank:
            raise SystemExit(error.exit_code) from None
        else:
            raise


def _train_with_others(start: "RunStart", world: World, job: OwnJob) -> tuple[int, bool]:
    """Train as one of several ranks. Returns the exit code, and whether only this rank has failed and reported its error."""
    failed_alone = False

    def work(_: list[str]) -> int:
        nonlocal failed_alone
        try:
            return train(start, world, job)
        except BaseException as error:
            failed_alone = getattr(error, "reported", False)
            raise

    try:
        ended = failures.run(work, [])
    except SystemExit as end:  # reported by another rank
        ended = end.code if isinstance(end.code, int) else ExitCode.FAILED
    return ended, failed_alone


def check_before_dataset(settings: RunConfig, dataset: "NamedDataset") -> None:
    """ConfigError if the run could not start, or has several ranks: no single rank may tokenize the text for all ranks."""
    _refuse_incomplete(settings)
    world = bootstrap.detect(alone=False)
    settings.plan(world.size)
    if world.size == 1:
        return
    raise ConfigError(
        f"{world.size} processes cannot tokenize the text of data= at the same time. Tokenize it first, with {dataset.preprocess}, "
        "which prints the settings to give instead; or start the processes with hpclm submit, which tokenizes it before"
    )


def _refuse_incomplete(settings: RunConfig) -> None:
    """ConfigError with every problem in the settings. Ranks and data are checked later."""
    from hpclm.training.start import SETTINGS, RunStart  # imports NumPy

    RunStart(settings, has=SETTINGS).check()


def train(start: "RunStart", world: World, job: OwnJob) -> int:
    """Join the other ranks of ``world``, all in ``job``, and train; returns the exit code."""
    with distributed.join(world, start.run.cluster, job) as context:
        from hpclm.planning import fit
        from hpclm.training import loop

        context.exit_code = loop.run(start, context, fit)
        return context.exit_code


def in_this_process(settings: RunConfig, resume_step: int | None = None, quiet: bool = False) -> None:
    """Train in the calling process, for notebooks and scripts. The same settings continue the run.

    ``quiet``: print only warnings. Raises Interrupted after a signal, such as a notebook's, once the run has saved;
    HpclmError for any other failure.
    """
    out = Path(settings.out)
    phases = PhaseEnds(out)
    ended = _one_start(settings, resume_step, quiet)
    while phases.another(ended):
        ended = _one_start(settings, None, quiet)
    if ended == ExitCode.REQUEUE:
        newest, _ = folder.survey_checkpoints(out / "checkpoints")
        saved = f"saved at step {newest[0]}" if newest else "nothing was saved"
        raise Interrupted(f"{out}: {saved}; {AGAIN}")


def _one_start(settings: RunConfig, resume_step: int | None, quiet: bool) -> int:
    """``start`` in the calling process, whose signal handlers are restored; returns the exit code."""
    before = {number: signal.getsignal(number) for number in preemption.WARNINGS}
    try:
        with log.restored():
            return start(settings, alone=True, resume_step=resume_step, quiet=quiet)
    except KeyboardInterrupt:
        raise Interrupted(f"{settings.out}: {folder.unsaved(settings.out)}; {AGAIN}") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
