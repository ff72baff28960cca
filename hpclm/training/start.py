"""A start of a run: its checks, each stated once with what it needs, and what they read, each read once.

``hpclm submit`` runs the checks that need no ranks before anything is written or queued. A process that trains runs them all: a single one
before it imports PyTorch, and of several rank 0 once they have met. What needs all ranks, or the device, is in opening.py.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from hpclm import config
from hpclm.checkpoint import Progress, resumable
from hpclm.checkpoint.fingerprint import check_fingerprint, fingerprint
from hpclm.checkpoint.init_from import check_init_from
from hpclm.checkpoint.resumable import Candidate
from hpclm.config import RunConfig, no_effect
from hpclm.config.compose import missing_code
from hpclm.config.data import SOURCES
from hpclm.config.length import inside_warmup, run_length
from hpclm.config.plan import Length
from hpclm.data import sources, split_by
from hpclm.data.scan import SharedFacts
from hpclm.data.sources import Source, samples_per_epoch, without_evaluation
from hpclm.errors import ConfigError
from hpclm.node import notify, secrets
from hpclm.node.job import OwnJob
from hpclm.registry import lookup
from hpclm.rundir import config_history, events, folder
from hpclm.training import records

HAS = {
    "python": "the libraries of this environment are those of the run",
    "run": "it continues the run in its directory, which a trial with --debug does not",
    "processes": "their number is known",
    "files": "files may be read",
    "dataset": "it has been written",
    "own source": "the user's own data source may be built",
    "now": "the run starts at once",
    "queued": "another job of the run may be in the queue",
}
"""What a check may need of a start, and the meaning of each."""
SETTINGS = frozenset(("python", "run"))
"""Enough to check the settings alone, which every rank does."""
TRAINS = frozenset(HAS) - {"queued"}


class RunStart:
    """A start of a run. What is read for it is read when it is first needed, and kept."""

    def __init__(
        self,
        run: RunConfig,
        resume_step: int | None = None,
        job: OwnJob | None = None,
        processes: int | None = None,
        has: Collection[str] = TRAINS,
    ):
        """``resume_step``: the step of the checkpoint to continue from; None: the newest. ``job``: that this process is part of.
        ``processes``: None: those of the job's settings. ``has``: what checks may need, see HAS."""
        self.run = run
        self.out = Path(run.out)
        self.processes = processes or run.job.nodes * run.job.gpus
        self.has = has
        self.facts = SharedFacts()
        """Facts that opening the source has found."""
        self.checked = False
        """All checks have passed."""
        self.checkpoint: Candidate | None = None
        """The checkpoint that the run resumes from, once checked."""
        self.source: Source | None = None
        """The data, once checked, unless the user's own source must not be built; no index is built, and no samples are read."""
        self._asked = resume_step
        self._job = job or OwnJob()

    def check(self, more: Sequence["Check"] = ()) -> None:
        """ConfigError with every problem that CHECKS, and then ``more`` of them, find; nothing if all have passed before."""
        if self.checked:
            return
        problems, passed = list[str](), set(self.has)
        for check in (*CHECKS, *more):
            if check.needs <= passed:
                try:
                    wrong = list(check.find(self) or ())
                except ConfigError as error:
                    wrong = error.problems
                if not wrong:
                    passed.add(check.name)
                problems += wrong
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))
        self.checked = True

    @cached_property
    def resume_step(self) -> int | None:
        """The step to go back to; None if this job has gone back to it before it was started again."""
        return records.requested_step(self.out, self._asked, self._job)

    @property
    def begin(self) -> Progress:
        """The progress that the run resumes from, by its checkpoint."""
        return Progress.of(self.checkpoint[1].progress) if self.checkpoint else Progress()

    @cached_property
    def settings(self) -> RunConfig:
        """The settings, with data.split_by as the data decide it; ConfigError if they cannot be opened."""
        return split_by.resolved(self.run)

    def length(self, source: Source) -> Length:
        """The end of the run with the data ``source``."""
        return run_length(self.run, samples_per_epoch(source), self.begin.step, self.begin.samples)

    def fingerprint(self) -> dict[str, Any]:
        """The fingerprint of the run; without its data if they are not known."""
        run = self.run
        data = None if self.source is None else self.source.fingerprint
        return fingerprint(run.model, run.seed, data, run.optim.name, self._micro_size())

    def _micro_size(self) -> int | str | None:
        """The micro-batch that the run will use: auto, if it will choose another than the last start used; None if that is unknown."""
        size = self.run.batch.micro_size or config_history.micro_size(self.out)
        if self.run.batch.micro_size or not size or "processes" not in self.has:
            return size
        try:
            replace(self.run, batch=replace(self.run.batch, micro_size=size)).plan(self.processes)
        except ConfigError:
            return "auto"
        return size

    def without_effect(self) -> list[str]:
        """The settings that are known to change nothing, a sentence for each."""
        run, source, begin = self.run, self.source, self.begin
        reasons = list(no_effect.by_settings(run))
        known: dict[str, Any] = {}
        with suppress(ConfigError):  # of a number of processes that is not the job's, as with --debug
            known["plan"] = run.plan(self.processes)
        per_epoch = source.per_epoch("train") if source else 0
        length = run_length(run, per_epoch or None, begin.step, begin.samples)
        if short := inside_warmup(run, length):
            reasons.insert(0, short)
        if source:
            known |= dict(length=length, per_epoch=per_epoch, held_out=source.held_out)
            reasons += sources.without_effect(source)
        return [*reasons, *no_effect.by_facts(run, **known)]


class Check(NamedTuple):
    """Something that may be wrong with a start."""

    name: str
    needs: set[str]
    """Entries of HAS that the start must have, and checks that must have passed."""
    find: Callable[[RunStart], Iterable[str] | None]
    """The problems; it may also raise ConfigError."""


def _plan(start: RunStart) -> None:
    job = start.run.job
    try:
        start.run.plan(start.processes)
    except ConfigError as error:
        hint = f"; this job has job.nodes={job.nodes} x job.gpus={job.gpus} = {start.processes} processes"
        raise ConfigError(problem + hint for problem in error.problems) from None


def _events(start: RunStart) -> None:
    """ConfigError if the record of the run is damaged."""
    events.read_or_refuse(start.out)


def _checkpoint(start: RunStart) -> None:
    """Find the checkpoint to resume from; ConfigError if the one that was asked for is missing."""
    start.checkpoint = resumable.candidate(start.out, start.resume_step)


def _data(start: RunStart) -> list[str]:
    """Open the data; problems of what the run reads from its begin on."""
    run, own = start.run, start.run.data.source not in SOURCES
    if own and "own source" not in start.has:  # to build it may take long
        lookup("data.source", run.data.source, SOURCES, sources.CHECK)
        return []
    source = sources.build(start.settings.data, run.model, run.seed, start.facts)
    problems = [] if own else [*sources.needs_eod(run.data, source.eod), *_samples(start, source)]
    if not problems:
        start.source = source
    return problems


def _samples(start: RunStart, source: Source) -> Iterator[str]:
    """Problems of the samples that the run reads from ``source``."""
    run = start.run
    try:
        sources.check_part(source, "train", start.length(source).samples)
    except ConfigError as error:
        yield from error.problems
    for part in source.held_out if run.evaluate.every else ():
        try:
            sources.check_part(source, part, run.evaluation_samples(source.per_epoch(part)))
        except ConfigError as error:
            yield from without_evaluation(source, part, error).problems


def _init_from(start: RunStart) -> None:
    """ConfigError if the run cannot start from checkpoint.init_from."""
    if "dependency" in start.run.job.options and "now" not in start.has:  # a job before it may make the checkpoint
        return
    check_init_from(start.run.checkpoint.init_from, start.out / "checkpoints", start.fingerprint())


def _history(start: RunStart) -> None:
    """ConfigError if the settings do not fit the run's checkpoints, or a job of it that has saved nothing yet."""
    run, path = start.run, start.out / "config.yaml"
    resumable.check_resumable(start.checkpoint, run.checkpoint.resume, start.fingerprint())
    if start.checkpoint:
        if start.source:
            no_effect.check_finished(run, start.begin.step, start.length(start.source).steps)
    elif "queued" in start.has and path.is_file():
        then, now = (
            fingerprint(each.model, each.seed, optimizer=each.optim.name, micro_size=each.batch.micro_size)
            for each in (config.load(path), run)
        )
        check_fingerprint(path, then, now)


CHECKS = (
    Check("secrets", set(), lambda start: secrets.problems(asdict(start.run))),
    Check("complete", {"run"}, lambda start: start.run.missing()),
    Check("device", set(), lambda start: start.run.engine.problems_on_cpu()),
    Check("notify", set(), lambda start: notify.missing(start.run.job.notify)),
    Check("libraries", {"python"}, lambda start: start.run.missing_libraries()),
    Check("code", set(), lambda start: missing_code(start.run)),
    Check("plan", {"processes"}, _plan),
    Check("folder", {"files"}, lambda start: folder.check(start.out)),
    Check("events", {"run", "folder"}, _events),
    Check("checkpoint", {"run", "folder"}, _checkpoint),
    Check("data", {"dataset", "complete", "code"}, _data),
    Check("init_from", {"files"}, _init_from),
    Check("history", {"checkpoint"}, _history),
    Check(
        "fresh",
        {"now", "checkpoint"},
        lambda start: resumable.check_fresh_start(start.out / "checkpoints", start.run.checkpoint.resume),
    ),
)
"""All checks that need neither other processes nor a device, in this order. A check is left out if one that it needs has failed."""
