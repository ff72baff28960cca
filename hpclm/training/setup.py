"""The steps of a run's set-up: its data, its run directory, where it begins, its logs."""

import logging
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hpclm import __version__, files, log
from hpclm import engine as engines
from hpclm.checkpoint import CheckpointStore, Progress, Retention, begin_from, resumable, rollback
from hpclm.checkpoint.fingerprint import differences, fingerprint
from hpclm.checkpoint.init_from import check_init_from
from hpclm.config import Plan, RunConfig
from hpclm.config.length import run_length
from hpclm.config.plan import Length
from hpclm.data import sources
from hpclm.data.batches import Batches
from hpclm.data.findings import Findings
from hpclm.data.sources import Source, samples_per_epoch
from hpclm.data.tokenizers import mismatch
from hpclm.distributed import bootstrap
from hpclm.distributed.context import DistributedContext
from hpclm.errors import ConfigError
from hpclm.model import count
from hpclm.node import secrets
from hpclm.rundir import submissions
from hpclm.rundir.lease import Lease
from hpclm.training import records
from hpclm.training.validation import HeldOut, held_out

logger = logging.getLogger(__name__)


def data(
    config: RunConfig, plan: Plan, context: DistributedContext, replica: int, device: torch.device
) -> tuple[Source, Batches, list[HeldOut], Length]:
    """The source of the samples, the micro-batches of this rank's ``replica``, what evaluations read, and the run's length.

    Rank 0 reads the files first, and writes the index cache; then the first rank of each other node; all others only open
    what they train on. ConfigError if the data of another node differ from rank 0's.
    """

    def build(findings: Findings) -> tuple[Source, Batches, list[HeldOut], Length]:
        source = sources.build(config, findings)
        length = run_length(config, plan, samples_per_epoch(source))
        train = Batches(source.samples("train", length.samples), config, plan, source.eod, device, replica)
        return source, train, held_out(source, config, plan, device, replica), length

    def first() -> dict[str, Any]:
        mine.append(build(here))
        for said in sources.check_content(mine[0][0]):
            logger.info(said)
        return here.known

    here, mine = Findings(), list[tuple[Source, Batches, list[HeldOut], Length]]()
    known = context.run_on_main(first)
    problems: list[str] = []
    if not mine and (context.rank == context.first_on_node or not known):  # a source without findings: all at once
        try:
            mine.append(build(here))
            problems = _differences(known.get("fingerprint", {}), here.known.get("fingerprint", {}))
        except ConfigError as error:
            problems = error.problems
    other = here.known if mine and here.known != known else None  # such as the dates of a node's own copies
    told = context.all_gather((problems, other), unlimited=True)
    for info, (wrong, _) in zip(context.ranks, told, strict=True):
        if wrong:
            failed = ConfigError([f"the data on {info.host} cannot be used:", *wrong])
            failed.shared = True
            raise failed
    return mine[0] if mine else build(Findings(told[context.first_on_node][1] or known))


def _differences(main: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """How the data of this node differ from those of the node of rank 0, by their fingerprints."""
    clash = mismatch(main.get("tokenizer") or {}, here.get("tokenizer") or {})
    found = [*([clash] if clash else []), *differences({"data": main}, {"data": here})]
    head = "they are not those of rank 0's node; copy the same files to every node. From those to these:"
    return [head, *found] if found else []


def checkpoint_bytes(config: RunConfig) -> int:
    """Bytes of a checkpoint: weights and Adam's two moments in fp32."""
    return 12 * count.parameters(config.model)


def occupy(out: Path, opened: ExitStack) -> Lease:
    """Make the run directory, and keep other runs out of it while ``opened`` lasts."""
    files.private_folder(out, "run directory")
    return opened.enter_context(Lease(out))


def between_saves(config: RunConfig, source: Source) -> float:
    """Samples of as many passes as checkpoint.epochs says."""
    passes = config.checkpoint.epochs
    return math.inf if passes is None else passes * source.per_epoch("train")


def retention(config: RunConfig, per_pass: float) -> Retention:
    """Which checkpoints stay."""
    settings = config.checkpoint
    return Retention(settings.keep_last, settings.keep_every, settings.keep_best, settings.keep_epochs, per_pass)


def made(config: RunConfig, context: DistributedContext) -> dict[str, object]:
    """What a checkpoint says of the attempt that made it."""
    return {
        "processes": context.size,
        "engine": config.engine.name,
        "parallel": vars(config.parallel),
        "hpclm": __version__,
        **bootstrap.job(),
    }


def check(config: RunConfig, source: Source, back_to: int | None) -> None:
    """ConfigError where the run cannot start, or resume, with these settings from the checkpoint that it would take."""
    out = Path(config.out)
    if back_to is not None and records.went_back(out, back_to):
        back_to = None
    resumable.check(resumable.candidate(out, back_to), config, source)
    check_init_from(config, fingerprint(config, source))


def go_back(out: Path, back_to: int | None) -> int | None:
    """Set aside checkpoints newer than the one that this start was asked to continue from; its step, if there is one."""
    if back_to is not None and not records.went_back(out, back_to):
        submissions.roll_back(out, back_to)
    return rollback.carry_out(out)


def start(store: CheckpointStore, engine: engines.Engine, config: RunConfig, context: DistributedContext) -> Progress:
    """Take over the state to resume from: the run's own, or at its beginning the weights it is to begin with."""
    progress = store.resume(engine, config.checkpoint.resume)
    if config.checkpoint.init_from and not progress.step:
        found = begin_from(Path(config.checkpoint.init_from), engine, context, store.fingerprint)
        logger.info("weights of %s; optimizer, step and data start from scratch", found)
    return progress


def log_files(out: Path, context: DistributedContext, opened: ExitStack) -> None:
    """Send this rank's log to its file: rank 0's to log.txt beside the terminal, another's to its own instead."""
    if context.is_main:
        opened.enter_context(log.also_to(out / "log.txt", secrets.Redactor()))
    else:
        log.instead_to(out / "logs" / f"rank-{context.rank:05d}.log", secrets.Redactor())
    opened.enter_context(context.guard(out / "log.txt"))


def begin(progress: Progress, length: Length) -> Progress:
    """Note what the data's order was made for; warn where continuing with another budget changes it."""
    if progress.step and progress.planned != length.samples:
        logger.warning(
            "the budget was %s samples and is %s: as with Megatron, the order of the data follows from it, so from here on "
            "samples may be repeated or left out unless all of it is within one epoch",
            progress.planned,
            length.samples,
        )
    return replace(progress, planned=length.samples)
