"""The start of a run: a table of checks with their requirements, and the values they read, each read once.

``hpclm submit`` runs the checks that need no ranks, before anything is written or queued. Training runs them all: a single process before
it imports PyTorch, otherwise rank 0 once the ranks have met. Checks that need all ranks, or the device, are in opening.py.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.base.registry import lookup
from hpclm.checkpoint import Progress, resumable
from hpclm.checkpoint.fingerprint import check_fingerprint, fingerprint
from hpclm.checkpoint.init_from import check_init_from
from hpclm.checkpoint.resumable import Candidate
from hpclm.config import RunConfig, no_effect, section
from hpclm.config.compose import missing_code
from hpclm.config.data import SOURCES
from hpclm.config.length import inside_warmup, run_length
from hpclm.config.phases import Timeline, in_phase
from hpclm.config.plan import Length
from hpclm.data import sources, split_by
from hpclm.data.corpus import Corpus
from hpclm.data.scan import SharedFacts
from hpclm.data.sources import Source, samples_per_epoch, without_evaluation
from hpclm.node import notify, secrets
from hpclm.node.job import OwnJob
from hpclm.rundir import config_history, events, folder
from hpclm.training import records

HAS = {
    "python": "the run uses the libraries of this environment",
    "run": "the start continues the run in its directory, which a trial with --debug does not",
    "processes": "the number of processes is known",
    "files": "files may be read",
    "dataset": "the dataset has been written",
    "own source": "the user's own data source may be built",
    "now": "the run starts at once",
    "queued": "another job of the run may be in the queue",
}
"""Properties of a start that a check may need, and their meaning."""
SETTINGS = frozenset(("python", "run"))
"""Properties of a start that only checks the settings, as every rank does."""
TRAINS = frozenset(HAS) - {"queued"}
"""Properties of a start that trains."""


class RunStart:
    """The start of a run. Values are read when first needed, and kept."""

    def __init__(
        self,
        run: RunConfig,
        resume_step: int | None = None,
        job: OwnJob | None = None,
        processes: int | None = None,
        has: Collection[str] = TRAINS,
    ):
        """``resume_step``: the step of the checkpoint to continue from, by --from; None: the newest. ``job``: the job of this process.
        ``processes``: their number; None: job.nodes x job.gpus. ``has``: the properties of the start, see HAS."""
        self.run = run
        self.out = Path(run.out)
        self.processes = processes or run.job.nodes * run.job.gpus
        self.has = has
        self._from_step = resume_step
        self._job = job or OwnJob()
        self.checked = False  # whether all checks have passed
        self.checkpoint: Candidate | None = None  # set by _check_checkpoint: the checkpoint that the run resumes from
        # set by _check_data, which builds no index or samples; None if the source may not be built
        self.source: Source | None = None
        self.facts = SharedFacts()  # filled by _check_data: facts found while the data were opened

    def check(self, more: Sequence["Check"] = ()) -> None:
        """Run CHECKS, then ``more``, unless all have passed before; ConfigError with every problem."""
        if self.checked:
            return
        problems: list[str] = []
        met = set(self.has)
        for check in (*CHECKS, *more):
            if not check.needs <= met:
                continue
            try:
                found = list(check.find(self) or ())
            except ConfigError as error:
                found = error.problems
            if not found:
                met.add(check.name)
            problems += found
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))
        self.checked = True

    @cached_property
    def resume_step(self) -> int | None:
        """The step to go back to; None if the scheduler has restarted this job since it went back."""
        return records.requested_step(self.out, self._from_step, self._job)

    @property
    def begin(self) -> Progress:
        """The progress that the run resumes from."""
        if self.checkpoint is None:
            return Progress()
        _, manifest = self.checkpoint
        return Progress.of(manifest.progress)

    @cached_property
    def phases(self) -> Timeline:
        """The phases of the run."""
        return Timeline(self.run, self.begin.position)

    @property
    def now(self) -> RunConfig:
        """The settings of the phase that the run resumes in."""
        settings: RunConfig = self.phases.settings[self.phases.phase(self.begin.samples)]
        return settings

    @cached_property
    def settings(self) -> RunConfig:
        """The settings, with data.split_by decided by the data; ConfigError if the data cannot be opened."""
        return split_by.resolved(self.run, partial(config_history.split_by, self.out))

    def length(self, source: Source) -> Length:
        """The end of the run on the data ``source``."""
        return run_length(self.run, samples_per_epoch(source), self.begin.position)

    def fingerprint(self) -> dict[str, Any]:
        """The fingerprint of the run; without the data's fingerprint if the data are not open."""
        run = self.run
        data = None if self.source is None else self.source.fingerprint
        return fingerprint(run.model, run.seed, data, run.optim, self._micro_size())

    def _micro_size(self) -> int | str | None:
        """Size of the run's micro-batches; "auto" if it must differ from that of the last start; None if unknown."""
        if self.run.batch.micro_size:
            return self.run.batch.micro_size
        last = config_history.micro_size(self.out)
        if last and "processes" in self.has:
            try:
                replace(self.run, batch=replace(self.run.batch, micro_size=last)).plan(self.processes)
            except ConfigError:
                return "auto"
        return last

    def without_effect(self) -> list[str]:
        """A sentence for each setting that is known to change nothing."""
        run = self.run
        source = self.source
        reasons = list(section.warnings(run))
        known: dict[str, Any] = {}
        with suppress(ConfigError):  # with --debug, the number of processes may not be the job's
            known["plan"] = run.plan(self.processes)
        per_epoch = source.per_epoch("train") if source else 0
        length = run_length(run, per_epoch or None, self.begin.position)
        too_short = inside_warmup(run, length)
        if too_short:
            reasons.insert(0, too_short)
        if source:
            known |= dict(length=length, per_epoch=per_epoch, held_out=source.held_out)
            reasons += sources.without_effect(source)
        return [*reasons, *no_effect.by_facts(run, **known)]


class Check(NamedTuple):
    """A row of CHECKS."""

    name: str
    needs: set[str]
    """Properties in HAS that the start must have, and names of checks that must have passed; otherwise it is skipped."""
    find: Callable[[RunStart], Iterable[str] | None]
    """Returns the problems, or raises ConfigError."""


def _check_plan(start: RunStart) -> None:
    job = start.run.job
    for phase in range(len(start.run.data.phases) + 1):
        try:
            in_phase(start.run, phase).plan(start.processes)
        except ConfigError as error:
            where = f"data.phases[{phase - 1}]: " if phase else ""
            hint = f"; this job has job.nodes={job.nodes} x job.gpus={job.gpus} = {start.processes} processes"
            raise ConfigError(where + problem + hint for problem in error.problems) from None


def _check_events(start: RunStart) -> None:
    """ConfigError if the run's record of events is damaged."""
    events.read_or_refuse(start.out)


def _check_checkpoint(start: RunStart) -> None:
    """Find the checkpoint to resume from; ConfigError if the one named by --from is missing."""
    start.checkpoint = resumable.candidate(start.out, start.resume_step)


def _check_data(start: RunStart) -> list[str]:
    """Open the data; returns problems of the samples that the run will read."""
    run = start.run
    is_own = run.data.source not in SOURCES
    if is_own and "own source" not in start.has:  # building it may take long
        lookup("data.source", run.data.source, SOURCES, sources.CHECK)
        return []
    source = sources.build_source(start.settings.data, start.now.model, run.seed, start.facts)
    problems: list[str] = []
    if not is_own:
        problems = [*sources.needs_eod(run.data, source.eod), *_problems_of_samples(start, source)]
    if not problems:
        start.source = source
    return problems


def _problems_of_samples(start: RunStart, source: Source) -> Iterator[str]:
    run = start.run
    try:
        length = start.length(source)
        if isinstance(source, Corpus) and run.data.order == "per_dataset":
            source.check_phases(start.phases, length.samples or 0)
        else:
            sources.check_part(source, "train", length.samples)
    except ConfigError as error:
        yield from error.problems
    if not run.evaluate.every:
        return
    for part in source.held_out:
        try:
            sources.check_part(source, part, start.now.evaluation_samples(source.per_epoch(part)))
        except ConfigError as error:
            yield from without_evaluation(source, part, error).problems


def _check_init_from(start: RunStart) -> None:
    """ConfigError if the run cannot start from checkpoint.init_from."""
    if "dependency" in start.run.job.options and "now" not in start.has:  # an earlier job may make the checkpoint
        return
    check_init_from(start.run.checkpoint.init_from, start.out / "checkpoints", start.fingerprint())


def _check_history(start: RunStart) -> None:
    """ConfigError if the settings do not fit the run's checkpoints, or its queued job that has saved nothing yet."""
    run = start.run
    path = start.out / "config.yaml"
    resumable.check_resumable(start.checkpoint, run.checkpoint.resume, start.fingerprint())
    if start.checkpoint:
        if start.source:
            no_effect.check_finished(run, start.begin.step, start.length(start.source).steps)
    elif "queued" in start.has and path.is_file():
        then, now = (
            fingerprint(each.model, each.seed, optim=each.optim, micro_size=each.batch.micro_size)
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
    Check("plan", {"processes"}, _check_plan),
    Check("folder", {"files"}, lambda start: folder.check_run_directory(start.out)),
    Check("events", {"run", "folder"}, _check_events),
    Check("checkpoint", {"run", "folder"}, _check_checkpoint),
    Check("data", {"dataset", "complete", "code"}, _check_data),
    Check("init_from", {"files"}, _check_init_from),
    Check("history", {"checkpoint"}, _check_history),
    Check(
        "fresh",
        {"now", "checkpoint"},
        lambda start: resumable.check_fresh_start(start.out / "checkpoints", start.run.checkpoint.resume),
    ),
)
"""All checks that need neither other processes nor a device, in order."""
