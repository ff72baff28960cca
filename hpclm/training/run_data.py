"""What a run reads: each rank opens its data, and the ranks check that all nodes have the same."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from hpclm.checkpoint import Progress
from hpclm.checkpoint.fingerprint import differences
from hpclm.config import Plan, RunConfig
from hpclm.config.length import run_length
from hpclm.config.plan import Length
from hpclm.data import sources
from hpclm.data.batches import Batches
from hpclm.data.scan import SharedFacts
from hpclm.data.sources import Source, samples_per_epoch, without_evaluation
from hpclm.data.tokenizers import mismatch
from hpclm.distributed.context import DistributedContext
from hpclm.errors import ConfigError
from hpclm.parallel.mesh import Compute
from hpclm.training import messages
from hpclm.training.start import RunStart

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOut:
    """Samples of one part, always the same ones."""

    part: str
    batches: Batches
    size: int
    """Samples an evaluation reads."""


@dataclass(frozen=True)
class RunData:
    """What a rank reads."""

    plan: Plan
    length: Length
    begin: Progress
    """Where the attempt begins; ``planned`` samples of the training data are in order."""
    source: Source
    train: Batches
    """The micro-batches of this rank's replica."""
    held_out: list[HeldOut]
    """What evaluations read."""

    def after(self, config: RunConfig, begin: Progress) -> "RunData":
        """These data for an attempt that begins at ``begin``: elsewhere, if the newest checkpoint was bad."""
        length, begin = _planned(config, self.source, begin)
        if begin.planned != self.begin.planned:
            self.train.samples = self.source.samples("train", begin.planned)
        return replace(self, length=length, begin=begin)


def on_main(context: DistributedContext, act: Callable[[], T]) -> T | None:
    """``act()`` on rank 0, where its result stays, whatever it is; its HpclmError on every rank."""
    results: list[T] = []
    context.run_on_main(lambda: results.append(act()))
    return results[0] if results else None


@contextmanager
def open_data(config: RunConfig, context: DistributedContext, compute: Compute, start: RunStart) -> Iterator[RunData]:
    """Open the data of a run, for the replica of this rank. ``start``: with the source that rank 0 has checked.

    Rank 0 reads the files first, and writes the index cache; then the first rank of each other node; all others only open
    what they train on. ConfigError if the data of another node differ from rank 0's.
    """
    begin = Progress.of(context.run_on_main(lambda: asdict(start.begin)))

    def build(source: Source) -> RunData:
        return build_data(config, config.plan(context.size), compute, source, begin)

    def opened(facts: SharedFacts) -> Source:
        return sources.build(config.data, config.model, config.seed, facts)

    def first() -> RunData:
        assert start.source is not None
        built = build(start.source)
        for line in sources.check_content(built.source):
            log.info(line)
        return built

    built = on_main(context, first)
    main_facts = context.run_on_main(lambda: start.facts.values)
    facts = start.facts if context.is_main else SharedFacts()
    problems: list[str] = []
    # a source without facts: all at once
    if built is None and (context.rank == context.first_on_node or not main_facts):
        try:
            built = build(opened(facts))
            problems = _differences(main_facts.get("fingerprint", {}), facts.values.get("fingerprint", {}))
        except ConfigError as error:
            problems = error.problems
    other = facts.values if built and facts.values != main_facts else None  # such as the dates of a node's own copies
    gathered = context.all_gather((problems, other), unlimited=True)
    for info, (wrong, _) in zip(context.ranks, gathered, strict=True):
        if wrong:
            failed = ConfigError([f"the data on {info.host} cannot be used:", *wrong])
            failed.shared = True
            raise failed
    data = built or build(opened(SharedFacts(gathered[context.first_on_node][1] or main_facts)))
    if context.is_main:
        messages.log_start(config, data.plan, context, data.length, len(data.train.samples))
        messages.without_effect(start.without_effect())
    try:
        yield data
    finally:
        data.train.close()


def _planned(config: RunConfig, source: Source, begin: Progress) -> tuple[Length, Progress]:
    """The end of a run that begins at ``begin``; and ``begin`` with the samples that are put in order: as many as before if they suffice,
    because the order depends on their number."""
    length = run_length(config, samples_per_epoch(source), begin.step, begin.samples)
    suffice = length.samples is not None and length.samples <= (begin.planned or 0)
    return length, begin if suffice else replace(begin, planned=length.samples)


def build_data(config: RunConfig, plan: Plan, compute: Compute, source: Source, begin: Progress) -> RunData:
    """Build what this rank's replica reads of ``source`` from ``begin`` on, without asking other ranks."""
    length, begin = _planned(config, source, begin)

    def batches(part: str, count: int | None) -> Batches:
        samples = source.samples(part, count)
        return Batches(samples, plan, config.data, config.model, source.eod, compute)

    train, held_out = batches("train", begin.planned), []
    if config.evaluate.every and not source.held_out:
        log.info("no evaluation: the data settings keep nothing for it")
    for part in source.held_out if config.evaluate.every else ():
        size = config.evaluation_samples(source.per_epoch(part))
        try:
            held_out.append(HeldOut(part, batches(part, size), size))
        except ConfigError as error:
            raise without_evaluation(source, part, error) from None
    return RunData(plan, length, begin, source, train, held_out)


def _differences(main: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """How the data of this node differ from those of the node of rank 0, by their fingerprints."""
    clash = mismatch(main.get("tokenizer") or {}, here.get("tokenizer") or {})
    lines = [*([clash] if clash else []), *differences({"data": main}, {"data": here})]
    head = "they are not those of rank 0's node; copy the same files to every node. Differences (rank 0 → this node):"
    return [head, *lines] if lines else []
