"""The steps that a run has trained, in order of training: by attempt, with what their samples depend on.

Events tell it alone, so that runs of millions of steps are read at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpclm.base.errors import ConfigError
from hpclm.config.plan import Plan, Position, Rampup, Reading
from hpclm.rundir import events, metrics_file
from hpclm.rundir.rows import Row


@dataclass(frozen=True)
class Span:
    """The steps ``first`` to ``last`` of one attempt. Steps past ``kept`` were undone: a later attempt repeated them."""

    out: Path
    """The run: the one in question, or the trunk that it goes on from."""
    attempt: int
    """Its number in that run, from 1."""
    first: int
    last: int
    kept: int
    samples: int
    """Samples consumed before step ``first``."""
    planned: int | None
    """Samples that the order was built for; None: one epoch."""
    config: str
    """The version of config.yaml."""
    phases: tuple[Reading, ...] = ()
    """The beginnings of the phases that had been read from before step ``first``."""
    without: str | None = None
    """The version of data.without."""

    @property
    def key(self) -> tuple[Path, int]:
        """Identifies the attempt."""
        return self.out, self.attempt

    @property
    def position(self) -> Position:
        """Where it begins."""
        return Position(self.first - 1, self.samples, self.phases)

    def steps(self, undone: bool = True) -> range:
        """Its steps, with those that were ``undone`` or without."""
        return range(self.first, (self.last if undone else min(self.last, self.kept)) + 1)


def spans(out: Path) -> list[Span]:
    """The steps of the run in ``out``, oldest attempt first. A branch begins with the steps of its trunk that it goes on from.

    ConfigError if a trunk does not exist, or if an attempt has not recorded its samples.
    """
    happened = events.read_or_refuse(out)
    found = list[Span]()
    for event in events.of_kind(happened, "branched")[:1]:
        found += _of_trunk(out, event)
    return [*found, *_of_run(out, happened)]


def _of_trunk(out: Path, event: Row) -> list[Span]:
    """The steps of the trunk up to that of the branch ``out``, without those that were undone before."""
    trunk = Path(event["trunk"])
    step = event["step"]
    if not (trunk / events.NAME).exists():
        raise ConfigError(
            f"{out} goes on from step {step} of {trunk}, which does not exist: restore that run, because its events say what these "
            "steps read"
        )
    happened = events.read_or_refuse(trunk)
    earlier = [_of_trunk(trunk, event) for event in events.of_kind(happened, "branched")[:1]]
    all_spans = [*chain(*earlier), *_of_run(trunk, happened, event.get("attempts"), step)]
    clipped = [replace(span, last=min(span.last, span.kept, step), kept=step) for span in all_spans]
    return [span for span in clipped if span.first <= span.last]


def _of_run(out: Path, happened: Sequence[Row], count: int | None = None, least: int = 0) -> Iterator[Span]:
    """The steps of the first ``count`` attempts (None: of all), the last of which has reached step ``least``."""
    begun = [events.whole(out, event) for event in events.of_kind(happened, "began")]
    lasts = _lasts(out, happened, begun)
    begun = begun[:count]
    for number, began in enumerate(begun, 1):
        last = lasts[number - 1]
        if number == len(begun):
            last = max(last, least)
        if last == began["from_step"]:
            continue
        if began.get("samples") is None:
            raise ConfigError(f"attempt {number} of {out} did not record how many samples were consumed before it")
        yield Span(
            out=out,
            attempt=number,
            first=began["from_step"] + 1,
            last=last,
            kept=min((later["from_step"] for later in begun[number:]), default=last),
            samples=began["samples"],
            planned=began.get("planned"),
            config=began["config"],
            phases=tuple(Reading(**entry) for entry in began.get("phases") or ()),
            without=began.get("without"),
        )


def _lasts(out: Path, happened: Sequence[Row], begun: Sequence[Row]) -> list[int]:
    """The last step of each attempt: the largest that it has reached, that was saved, or that has a row."""
    lasts = list[int]()
    for event in happened:
        if event["kind"] == "began":
            if lasts:  # the next attempt resumes from a checkpoint of this one, or of an earlier one
                lasts[-1] = max(lasts[-1], event["from_step"])
            lasts.append(event["from_step"])
        elif event["kind"] == "reached" and lasts:
            lasts[-1] = max(lasts[-1], event["step"])
    if lasts:
        began = begun[-1].get("began", 0.0)
        # if the last attempt was killed before it dropped the rows of the one before, they are older
        rows = (row["step"] for row in metrics_file.last(out) if row.get("time", began) >= began)
        lasts[-1] = max(lasts[-1], *rows, 0)
    return lasts


class StepCounter:
    """The step that reads a sample, and the samples that a step reads, in one span."""

    def __init__(self, span: Span, global_size: int, rampup: Rampup | None):
        plan = Plan(1, global_size, 1, rampup)
        starts = [span.samples]
        while len(starts) <= len(span.steps()) and plan.batch_size(starts[-1]) < global_size:
            starts.append(starts[-1] + plan.batch_size(starts[-1]))
        self.span = span
        self.size = global_size
        self._starts = np.array(starts)
        """Samples consumed before each step of the ramp-up, and before the first step after it."""

    def samples(self, step: int) -> range:
        """The numbers of the samples that ``step`` reads."""
        return range(self._start(step), self._start(step + 1))

    def all_samples(self) -> range:
        """The numbers of all samples of the span."""
        return range(self.span.samples, self._start(self.span.last + 1))

    def steps(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The step that reads each of ``samples``."""
        ramp = len(self._starts) - 1
        after = ramp + (samples - self._starts[-1]) // self.size
        return self.span.first + np.where(after < ramp, np.searchsorted(self._starts, samples, "right") - 1, after)

    def _start(self, step: int) -> int:
        number = step - self.span.first
        last = len(self._starts) - 1
        return int(self._starts[min(number, last)]) + max(0, number - last) * self.size
