"""Try a user's object in every layout, and report where a toy model trains otherwise than in one process."""

import pickle
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from hpclm import config
from hpclm.base import files, folders
from hpclm.base.errors import ConfigError
from hpclm.engine import unavailable
from hpclm.trials import causes, direct, kinds, processes, rank, toy
from hpclm.trials.compare import Difference, differences
from hpclm.trials.record import Record
from hpclm.trials.toy import SAVED, STEPS, LayoutTrial
from hpclm.trials.verdict import UNCOMPARED, LayoutVerdict, Result

SHOWN = 4  # weights named in a message
LAST = 1500  # how many characters of output are shown if a process fails without a message
MISPLACED = "its placement gives"
"""Part of the error for a mistake in a block, which does not mean that the layout is unsupported."""
ENGINES = ("native", "pipelining", "fsdp2")


class TrialFailed(Exception):
    """A trial has failed, and so has no record."""

    def __init__(self, text: str, refused: bool = False):
        super().__init__(text)
        self.text = text
        self.refused = refused


def selftest(
    name: str,
    kind: str | None = None,
    given: Sequence[str] = (),
    only: Sequence[str] = (),
    tell: Callable[[LayoutVerdict], None] = lambda verdict: None,
) -> Result:
    """Try the object ``name``, module:attribute.

    ``given``: settings that override the toy's, as key=value. ``only``: names of layouts; all if empty. ``tell`` is called with
    each verdict at once. ConfigError if the object does not exist, has no known kind, or does not work in one process.
    """
    loaded = kinds.load(name)
    kind = kind or kinds.kind_of(name, loaded)
    verdicts = []
    with folders.temporary_folder() as folder:
        direct = kind in ("tokenizer", "sink")
        work = _direct(name, kind, given, folder) if direct else _trained(name, kind, given, only, folder)
        for verdict in work:
            verdicts.append(verdict)
            tell(verdict)
    return Result(name, kind, tuple(verdicts))


def _direct(name: str, kind: str, given: Sequence[str], folder: Path) -> Iterator[LayoutVerdict]:
    """Verdicts on a tokenizer or a sink, which need no training."""
    settings = config.load(None, [*toy.TOY, *given])

    def check() -> list[str]:
        if kind == "sink":
            return list(direct.sink(name, folder))
        return list(direct.tokenizer(name, settings.data.tokenizer_files))

    yield _checked("one process", check)


def _checked(layout: str, check: Callable[[], list[str]]) -> LayoutVerdict:
    try:
        wrong = check()
    except Exception as error:
        return LayoutVerdict(layout, "failed", (rank.failure_of(error).text,))
    return LayoutVerdict(layout, "differs" if wrong else "agrees", tuple(wrong))


def _trained(name: str, kind: str, given: Sequence[str], only: Sequence[str], folder: Path) -> Iterator[LayoutVerdict]:
    """Verdicts on a toy that trains in each layout."""
    reference, others = toy.trials(kind, name)
    names = [trial.name for trial in others]
    for layout in only:
        if layout not in names:
            raise ConfigError(f"no layout {layout!r}; a {kind} is tried with {', '.join(names)}")
    for engine in ENGINES:
        if not unavailable(engine):
            import_module(f"hpclm.engine.{engine}")
    try:
        right = _records(name, kind, reference, given, folder)
    except TrialFailed as failed:
        raise ConfigError(f"{name} does not work in {reference.name}: {failed.text}") from None
    losses = [step["loss"] for step in right[0].steps]
    text = f"loss {losses[0]:.4f} at step 1, {losses[-1]:.4f} at step {STEPS}"
    yield LayoutVerdict(reference.name, "agrees", (text, *_notes(right)))
    for trial in (trial for trial in others if not only or trial.name in only):
        try:
            records = _records(name, kind, trial, given, folder)
        except TrialFailed as failed:
            refused = failed.refused and MISPLACED not in failed.text
            yield LayoutVerdict(trial.name, "refused" if refused else "failed", (failed.text,))
            continue
        yield _compared(kind, trial, right, records)
    if kind == "schedule":  # last: processes forked later would inherit what it remembers
        optim = config.load(None, toy.settings_of(kind, name, toy.REFERENCE, tuple(given))).optim
        verdict = _checked("calls in any order", lambda: list(direct.schedule(kinds.load(name), optim)))
        yield replace(verdict, cause="" if verdict.good else causes.SCHEDULE)


def _notes(right: Sequence[Record]) -> Iterator[str]:
    """Notes on the reference."""
    if right[0].draws:
        yield "it draws random numbers in training, which differ with tensor 2 and other micro-batches, so only evaluation is compared there"


def _compared(kind: str, trial: LayoutTrial, right: Sequence[Record], records: Sequence[Record]) -> LayoutVerdict:
    random = right[0].draws and (trial.splits or trial.other_batches)
    wrong = [*_samples(right, records), *differences(right, records, trial.exact, random)]
    if not wrong:
        return LayoutVerdict(trial.name, "agrees", (UNCOMPARED,) if random else ())
    stage = [difference for difference in wrong if difference.stage == wrong[0].stage]
    texts = [difference.what for difference in stage[:SHOWN]]
    if len(stage) > SHOWN:
        texts.append(f"and {len(stage) - SHOWN} more")
    return LayoutVerdict(trial.name, "differs", tuple(texts), causes.cause(kind, trial, wrong))


def _samples(right: Sequence[Record], records: Sequence[Record]) -> Iterator[Difference]:
    """For each rank, the first sample that differs there, or that differs when it is read again."""
    for number, record in enumerate(records):
        for index, (one, other) in enumerate(zip(right[0].samples, record.samples, strict=False)):
            if one != other or ", then " in other:
                when = "when it is read again" if ", then " in other else f"on rank {number}"
                yield Difference("samples", f"sample {index} of the training data differs {when}")
                break


def _records(name: str, kind: str, trial: LayoutTrial, given: Sequence[str], folder: Path) -> list[Record]:
    """The records of a trial's processes; TrialFailed without them."""
    words = toy.settings_of(kind, name, trial, tuple(given))
    out = folder / trial.name.replace(" ", "-")
    try:
        settings = config.load(None, [*words, f"out={out}"])
        settings.plan(trial.processes)
    except ConfigError as error:
        raise TrialFailed(str(error), refused=True) from None
    reads = kind == "source"
    start = rank.TrialStart(tuple(words), out, trial.processes, secrets.token_hex(16), reads_samples=reads)
    if trial.killed:
        _start(replace(start, kill_at=SAVED + 1), killed=True)
        start = replace(start, secret=secrets.token_hex(16))
    return _start(start)


def _start(start: rank.TrialStart, killed: bool = False) -> list[Record]:
    """Run the processes to their end, and read their files. ``killed``: they are killed on purpose, and leave no records."""
    output = start.out.with_suffix(".log")
    codes = processes.run(start.processes, lambda number: rank.train(start, number), output)
    left = [_left(start.file(number)) for number in range(start.processes)]
    failures = [(number, what) for number, what in enumerate(left) if isinstance(what, rank.Failure)]
    # ranks that only report a lost connection come last: the lost rank reports the reason
    failures.sort(key=lambda failure: any(words in failure[1].text for words in ("closed by peer", "Connection reset")))
    if failures:
        number, failure = failures[0]
        where = f"rank {number}: " if start.processes > 1 and not failure.refused else ""
        raise TrialFailed(f"{where}{failure.text}", failure.refused)
    if killed:
        return []
    if processes.HUNG in codes:
        raise TrialFailed(
            f"it hung: some ranks had not ended after {processes.LIMIT:.0f} s; ranks call different collectives, or in different orders"
        )
    records = [what for what in left if isinstance(what, Record)]
    if len(records) < start.processes:
        raise TrialFailed(f"exit codes {codes}; its output ends:\n{_end_of(output)}")
    return records


def _left(path: Path) -> Record | rank.Failure | None:
    """The record or failure that a process has left in the file ``path``; None without one."""
    if not files.is_file(path):
        return None
    left: Record | rank.Failure = pickle.loads(files.read_bytes(path))
    return left


def _end_of(output: Path) -> str:
    text = files.read_text(output, errors="replace") if files.is_file(output) else ""
    return text[-LAST:].strip()
