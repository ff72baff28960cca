"""The data of a run: each rank opens its part, and the ranks check that all nodes have the same data."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpclm.base import metric_names
from hpclm.base.errors import ConfigError, CorruptedError
from hpclm.checkpoint import Progress
from hpclm.checkpoint.fingerprint import differences
from hpclm.config import Plan, RunConfig
from hpclm.config.length import run_length
from hpclm.config.phases import Timeline
from hpclm.config.plan import Length, Reading
from hpclm.data import sources
from hpclm.data.batches import Batches
from hpclm.data.exclusion import Exclusion
from hpclm.data.scan import SharedFacts
from hpclm.data.sources import WITHOUT, Samples, Source, excluded, samples_per_epoch, train_samples, without_evaluation
from hpclm.data.streams import PhasedSamples
from hpclm.data.tokenizers import mismatch
from hpclm.distributed.context import DistributedContext
from hpclm.parallel.mesh import Compute
from hpclm.training import messages
from hpclm.training.start import RunStart

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOut:
    """One part of the held-out data. Every evaluation reads the same samples."""

    part: str
    batches: Batches
    size: int  # samples that an evaluation reads


@dataclass(frozen=True)
class RunData:
    """The data of a run, as this rank reads them."""

    plan: Plan
    length: Length
    begin: Progress  # where the attempt begins; the sample order is built for its ``planned`` samples
    timeline: Timeline  # the phases of the run
    source: Source
    train: Batches  # the micro-batches of this rank's replica
    held_out: list[HeldOut]

    def after(self, begin: Progress) -> "RunData":
        """The same data for an attempt that begins at ``begin``, which is earlier if the newest checkpoint was bad.

        CorruptedError if the ranks have to start again, because the settings of an earlier phase are others.
        """
        timeline = Timeline(self.timeline.run, begin.position)
        passed = range(timeline.phase(begin.samples) + 1, self.timeline.phase(self.begin.samples) + 1)
        if any(map(timeline.restarts, passed)):
            error = CorruptedError(f"step {begin.step} is in an earlier phase, with other settings; start again")
            error.shared = True
            raise error
        length, begin = _planned(timeline, self.source, begin)
        if (begin.planned, begin.position) != (self.begin.planned, self.begin.position):
            self.train.samples = train_samples(self.source, timeline, length, begin.planned)
        return replace(self, length=length, begin=begin, timeline=timeline)

    @property
    def ends_before(self) -> int | None:
        """The samples after which the ranks have to start again for the next phase; None if they need not."""
        phase = self.timeline.next_restart(self.begin.samples)
        begins = self.timeline.begins
        return begins[phase].samples if phase < len(begins) else None

    def begun(self, samples: int) -> tuple[Reading, ...]:
        """How far the run had read at the beginning of each phase that it has read from after ``samples`` samples; empty unless
        data.order=per_dataset."""
        train = self.train.samples
        return train.begun(samples) if isinstance(train, PhasedSamples) else ()

    def read_of_datasets(self, samples: int) -> dict[str, int]:
        """The phase of the sample before ``samples``, and the samples and tokens read of each dataset so far, as fields of metrics.jsonl;
        empty unless data.order=per_dataset."""
        train = self.train.samples
        if not isinstance(train, PhasedSamples):
            return {}
        phase = self.timeline.phase(samples - 1)
        fields = {"phase": phase, "phase_begin": self.timeline.begins[phase].step}
        for name, (_, count, tokens, _) in train.states(samples).items():
            fields |= {f"{metric_names.SAMPLES_OF}{name}": count, f"{metric_names.TOKENS_OF}{name}": tokens}
        return fields

    def samples_per_save(self, epochs: float | None) -> float:
        """Samples between two saves. ``epochs``: checkpoint.epochs; infinity for None."""
        return math.inf if epochs is None else epochs * self.source.per_epoch("train")


def _planned(timeline: Timeline, source: Source, begin: Progress) -> tuple[Length, Progress]:
    """The end of a run that begins at ``begin``, and ``begin`` with the number of samples to order.

    The checkpoint's number is kept if it suffices, because the order depends on it; None if the order does not.
    """
    length = run_length(timeline.run, samples_per_epoch(source), begin.position)
    if timeline.run.data.order == "per_dataset":
        begin = replace(begin, planned=None)
    elif length.samples is None or length.samples > (begin.planned or 0):
        begin = replace(begin, planned=length.samples)
    return length, begin


@contextmanager
def open_data(
    config: RunConfig, context: DistributedContext, compute: Compute, start: RunStart, whole: RunConfig | None = None
) -> Iterator[RunData]:
    """Open the data of a run, for the replica of this rank. ``config``: the settings of its first phase. ``start``:
    has the source that rank 0 has checked. ``whole``: the settings with data.phases; None: ``config``.

    Rank 0 reads the files first and writes the index cache; then the first rank of each other node reads them. All others only open
    the files that they train on. ConfigError if the data of another node differ from rank 0's.
    """
    begin = Progress.of(context.run_on_main(lambda: asdict(start.begin)))
    plan = config.plan(context.size)

    def opened(facts: SharedFacts) -> RunData:
        source = sources.build_source((whole or config).data, config.model, config.seed, facts)
        return build_data(config, plan, compute, source, begin, whole)

    def read_first() -> RunData:
        assert start.source is not None
        data = build_data(config, plan, compute, start.source, begin, whole)
        for line in sources.check_content(data.source):
            log.info(line)
        return data

    data = context.keep_on_main(read_first)
    main_facts = context.run_on_main(lambda: start.facts.values)
    facts = start.facts
    problems: list[str] = []
    # a user's source may have no facts to share; all ranks then read at once
    reads_files = context.rank == context.first_on_node or not main_facts
    if reads_files and not context.is_main:
        facts = SharedFacts()
        try:
            data = opened(facts)
            problems = _differences(main_facts, facts.values)
        except ConfigError as error:
            problems = error.problems
    # facts may differ between nodes, such as the dates of their copies
    differing = facts.values if data and facts.values != main_facts else None
    gathered = context.all_gather((problems, differing), unlimited=True)
    for info, (found, _) in zip(context.ranks, gathered, strict=True):
        if found:
            failed = ConfigError([f"the data on {info.host} cannot be used:", *found])
            failed.shared = True
            raise failed
    if data is None:
        _, of_node = gathered[context.first_on_node]
        data = opened(SharedFacts(of_node or main_facts))
    if context.is_main:
        messages.log_start(config, data.plan, context, data.length, len(data.train.samples))
        messages.without_effect(start.without_effect())
    try:
        yield data
    finally:
        data.train.close()


def build_data(
    config: RunConfig, plan: Plan, compute: Compute, source: Source, begin: Progress, whole: RunConfig | None = None
) -> RunData:
    """The data of ``source`` from ``begin`` on, as this rank's replica reads them. Not a collective. ``whole``: see open_data."""
    timeline = Timeline(whole or config, begin.position)
    length, begin = _planned(timeline, source, begin)

    def batches(samples: Samples, exclusion: Exclusion | None = None) -> Batches:
        return Batches(samples, plan, config.data, config.model, source.eod, compute, exclusion)

    train = batches(train_samples(source, timeline, length, begin.planned), excluded(source, config.data))
    held_out: list[HeldOut] = []
    if config.evaluate.every:
        if not source.held_out:
            log.info("no evaluation: the data settings keep nothing for it")
        for part in source.held_out:
            size = config.evaluation_samples(source.per_epoch(part))
            try:
                held_out.append(HeldOut(part, batches(source.samples(part, size)), size))
            except ConfigError as error:
                raise without_evaluation(source, part, error) from None
    return RunData(plan, length, begin, timeline, source, train, held_out)


def _differences(main_facts: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """How the data of this node differ from those of rank 0's node, by their fingerprints."""
    main, here = (known.get("fingerprint", {}) for known in (main_facts, facts))
    lines = differences({"data": main}, {"data": here})
    if main_facts.get(WITHOUT) != facts.get(WITHOUT):
        lines.append("data.without has other lines")
    tokenizers_differ = mismatch(main.get("tokenizer") or {}, here.get("tokenizer") or {})
    if tokenizers_differ:
        lines = [tokenizers_differ, *lines]
    if not lines:
        return []
    return [
        "they are not those of rank 0's node; copy the same files to every node. Differences (rank 0 → this node):",
        *lines,
    ]
