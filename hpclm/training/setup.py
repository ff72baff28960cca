"""The steps of a run's set-up: its data, its run directory, where it begins, its logs."""

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

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
from hpclm.data.shared_facts import SharedFacts
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

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunData:
    """What a rank reads."""

    plan: Plan
    length: Length
    source: Source
    train: Batches
    """The micro-batches of this rank's replica."""
    held_out: list[HeldOut]
    """What evaluations read."""


def on_main(context: DistributedContext, act: Callable[[], T]) -> T | None:
    """``act()`` on rank 0, where its result stays, whatever it is; its HpclmError on every rank."""
    result = None

    def keep() -> None:
        nonlocal result
        result = act()

    context.run_on_main(keep)
    return result


def data(config: RunConfig, context: DistributedContext, replica: int, device: torch.device) -> RunData:
    """Open the data of a run, for the data-parallel ``replica`` of this rank.

    Rank 0 reads the files first, and writes the index cache; then the first rank of each other node; all others only open
    what they train on. ConfigError if the data of another node differ from rank 0's.
    """
    plan = config.plan(context.size)

    def build(facts: SharedFacts) -> RunData:
        source = sources.build(config, facts)
        length = run_length(config, plan, samples_per_epoch(source))
        train = Batches(source.samples("train", length.samples), config, plan, source.eod, device, replica)
        return RunData(plan, length, source, train, held_out(source, config, plan, device, replica))

    def first() -> RunData:
        built = build(facts)
        for line in sources.check_content(built.source):
            logger.info(line)
        return built

    facts = SharedFacts()
    built = on_main(context, first)
    known = context.run_on_main(lambda: facts.known)
    problems: list[str] = []
    if built is None and (context.rank == context.first_on_node or not known):  # a source without facts: all at once
        try:
            built = build(facts)
            problems = _differences(known.get("fingerprint", {}), facts.known.get("fingerprint", {}))
        except ConfigError as error:
            problems = error.problems
    other = facts.known if built and facts.known != known else None  # such as the dates of a node's own copies
    gathered = context.all_gather((problems, other), unlimited=True)
    for info, (wrong, _) in zip(context.ranks, gathered, strict=True):
        if wrong:
            failed = ConfigError([f"the data on {info.host} cannot be used:", *wrong])
            failed.shared = True
            raise failed
    return built or build(SharedFacts(gathered[context.first_on_node][1] or known))


def _differences(main: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """How the data of this node differ from those of the node of rank 0, by their fingerprints."""
    clash = mismatch(main.get("tokenizer") or {}, here.get("tokenizer") or {})
    found = [*([clash] if clash else []), *differences({"data": main}, {"data": here})]
    head = "they are not those of rank 0's node; copy the same files to every node. Differences (rank 0 → this node):"
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


def check(config: RunConfig, source: Source, resume_step: int | None) -> None:
    """ConfigError where the run cannot start, or resume, with these settings from the checkpoint that it would take."""
    out = Path(config.out)
    if resume_step is not None and records.went_back(out, resume_step):
        resume_step = None
    resumable.check(resumable.candidate(out, resume_step), config, source)
    check_init_from(config, fingerprint(config, source))


def go_back(out: Path, resume_step: int | None) -> int | None:
    """Set aside checkpoints newer than the one that this start was asked to continue from; its step, if there is one."""
    if resume_step is not None and not records.went_back(out, resume_step):
        submissions.roll_back(out, resume_step)
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
