"""Differences between a trial and its reference, in order of appearance: initial weights, loss, gradients, updates, later steps.

A pure function of the records of their processes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.trials.record import Record, WeightPiece

Array = NDArray[Any]
Values = Mapping[str, Array]
RELATIVE = 1e-4  # tolerance for a gradient, as a fraction of its norm: sums in another order round otherwise
OF_ALL = 1e-6  # tolerance for gradients that are rounding errors, as a fraction of the norm of all gradients
LOSS = 2e-5  # relative tolerance for a loss or another figure
OF_CHANGE = 1e-2  # tolerance for a weight's value, as a fraction of the usual change of the weight's values
OF_VALUE = 1e-6  # the same, as a fraction of the usual size of the weight's values
FEW = 0.005  # fraction of a weight's values that may be off: an update may flip the sign of a rounding error
PARTIAL = 1e-3  # relative tolerance for the sum of partial gradients
TINY = 1e-30


@dataclass(frozen=True)
class Difference:
    """A difference at one stage of training."""

    stage: str
    """initial, forward, training, gradient, update, later, report or samples."""
    what: str
    """A description: the weight, and the size of the difference."""
    weight: str = ""
    hint: str = ""
    """A further finding: shape (shapes differ), partial (ranks have parts of the gradient), "2 times", or ranks (ranks differ)."""


@dataclass(frozen=True)
class TrialTensors:
    """The weights, or gradients, of a trial."""

    whole: Values
    """The whole tensors, assembled from all processes."""
    held: Mapping[str, Sequence[Array]]
    """The values that each process holds, in an array of the whole shape; the rest is NaN."""

    @classmethod
    def of(cls, pieces: Iterable[Sequence[WeightPiece]]) -> "TrialTensors":
        """Assemble the pieces of each process."""
        whole: dict[str, Array] = {}
        held: dict[str, list[Array]] = {}
        for of_rank in pieces:
            mine: dict[str, Array] = {}
            for name, values, shape, start in of_rank:
                places = tuple(slice(low, low + size) for low, size in zip(start, values.shape, strict=True))
                for target in (whole, mine):
                    target.setdefault(name, np.full(shape, np.nan, np.float32))[places] = values
            for name, array in mine.items():
                held.setdefault(name, []).append(array)
        return cls(whole, held)

    def disagreement(self, name: str) -> float:
        """Largest difference between processes that hold the same values of a weight, as a fraction of the values' norm."""
        first = np.full_like(self.whole[name], np.nan)
        largest = 0.0
        for array in self.held[name]:
            both = ~np.isnan(first) & ~np.isnan(array)
            largest = max(largest, _off(array[both], first[both]))
            first = np.where(np.isnan(first), array, first)
        return largest


def differences(reference: Sequence[Record], trial: Sequence[Record], exact: bool, random: bool) -> list[Difference]:
    """All differences of ``trial`` at the first stage that differs.

    ``exact``: every bit must agree. ``random``: the trial draws other random numbers in training, so only evaluation is compared.
    """
    stages = [_initial, _evaluated, _first, _gradients, _updates]
    if trial[0].first:  # it has resumed, and did not record them
        stages = []
    elif random:
        stages = stages[:2]
    for stage in stages:
        found = list(stage(reference, trial))
        if found:
            return found
    return [] if random else list(_later(reference, trial, exact))


def _initial(reference: Sequence[Record], trial: Sequence[Record]) -> Iterator[Difference]:
    right, given = (TrialTensors.of(record.initial for record in records) for records in (reference, trial))
    yield from _names(right, given)
    for name in (name for name in right.whole if name in given.whole):
        mine = given.whole[name]
        theirs = right.whole[name]
        if mine.shape != theirs.shape:
            text = f"{name} has the shape {list(mine.shape)}, but {list(theirs.shape)} in one process"
            yield Difference("initial", text, name, "shape")
            continue
        off = _off(mine, theirs)
        apart = given.disagreement(name)
        if off > RELATIVE:
            yield Difference("initial", f"{name} begins with other values: off by {off:.2g} of its norm", name)
        elif apart > RELATIVE:
            text = f"{name} begins with other values on another rank: off by {apart:.2g}"
            yield Difference("initial", text, name, "ranks")


def _names(right: TrialTensors, given: TrialTensors) -> Iterator[Difference]:
    for name in sorted(right.whole.keys() ^ given.whole.keys()):
        has = "this layout has no" if name in right.whole else "one process has no"
        yield Difference("initial", f"{has} weight {name}", name)


def _evaluated(reference: Sequence[Record], trial: Sequence[Record]) -> Iterator[Difference]:
    right = reference[0].evaluated
    given = trial[0].evaluated
    if not right or not given:
        return
    wrong = _relative(given[""], right[""]) > LOSS
    if wrong:
        text = f"the loss before the first step is {given['']:.6g}, but {right['']:.6g} in one process"
        yield Difference("forward", text)
    names = right.keys() & given.keys() - {""}
    effects = {name: (given[name] - given[""], right[name] - right[""]) for name in names}
    acting = {}
    for name, (ours, theirs) in effects.items():
        allowed = LOSS * right[""]
        if wrong:
            allowed = max(allowed, 0.02 * abs(theirs))
        if abs(ours - theirs) > max(allowed, 0.0):
            acting[name] = abs(ours - theirs)
    if wrong and 2 * len(acting) > len(names):  # no single weight is the cause
        return
    for name in sorted(acting, key=lambda name: -acting[name]):
        text = "{} acts differently: a small change of it changes the loss by {:+.3g}, but by {:+.3g} in one process"
        yield Difference("forward", text.format(name, *effects[name]), name)


def _first(reference: Sequence[Record], trial: Sequence[Record]) -> Iterator[Difference]:
    right = reference[0].steps[0]
    given = trial[0].steps[0]
    yield from _figures(1, right, given, {"grad_norm"}, LOSS, "training")


def _gradients(reference: Sequence[Record], trial: Sequence[Record]) -> Iterator[Difference]:
    right, given = (TrialTensors.of(record.gradients for record in records) for records in (reference, trial))
    size = _norm(np.array([_norm(gradient) for gradient in right.whole.values()])) if right.whole else 0.0
    wrong = []
    for name, exact in right.whole.items():
        if name not in given.whole:
            if given.whole:
                wrong.append((np.inf, Difference("gradient", f"{name} has no gradient", name)))
            continue
        allowed = RELATIVE * _norm(exact) + OF_ALL * size
        off = max(_norm(array[~np.isnan(array)] - exact[~np.isnan(array)]) for array in given.held[name])
        if off > allowed:
            hint = _partial(given.held[name], exact)
            text = f"the gradient of {name} is off by {off / (_norm(exact) + TINY):.2g} of its norm"
            wrong.append((off / allowed, Difference("gradient", text, name, hint)))
    yield from (difference for _, difference in sorted(wrong, key=lambda pair: -pair[0]))
    if not wrong:
        yield from _figures(1, reference[0].steps[0], trial[0].steps[0], set(), LOSS, "gradient")


def _partial(held: Sequence[Array], exact: Array) -> str:
    """The hint for a wrong gradient: "partial" if the ranks' values sum to the right one, "2 times" if each rank has
    twice the right value."""
    complete = [array for array in held if not np.isnan(array).any()]
    size = _norm(exact) + TINY
    if len(complete) > 1 and _norm(sum(complete) - exact) < PARTIAL * size:
        return "partial"
    for factor in (2.0, 0.5):
        if complete and all(_norm(array - factor * exact) < PARTIAL * size for array in complete):
            return f"{factor:g} times"
    if len(complete) > 1 and _norm(complete[0] - complete[1]) > PARTIAL * size:
        return "ranks"
    return ""


def _updates(reference: Sequence[Record], trial: Sequence[Record]) -> Iterator[Difference]:
    before = TrialTensors.of(record.initial for record in reference).whole
    right, given = (TrialTensors.of(record.updated for record in records) for records in (reference, trial))
    yield from _changed("update", "after the first update", before, right, given)


def _changed(stage: str, when: str, before: Values, right: TrialTensors, given: TrialTensors) -> Iterator[Difference]:
    """The weights that have changed in another way since ``before`` than in the reference."""
    wrong = []
    for name in (name for name in right.whole if name in given.whole):
        change = right.whole[name] - before.get(name, np.zeros_like(right.whole[name]))
        usual = _norm(change) / np.sqrt(change.size)
        limit = OF_CHANGE * usual + OF_VALUE * _norm(right.whole[name]) / np.sqrt(change.size) + TINY
        off = max(float((np.abs(array - right.whole[name]) > limit).mean()) for array in given.held[name])
        if off > FEW:
            apart = _norm(given.whole[name] - right.whole[name]) / (_norm(change) + TINY)
            hint = "ranks" if given.disagreement(name) > OF_VALUE else ""
            apart = apart or given.disagreement(name) * _norm(right.whole[name]) / (_norm(change) + TINY)
            text = f"{name} differs {when}: off by {apart:.2g} of its change"
            wrong.append((apart, Difference(stage, text, name, hint)))
    yield from (difference for _, difference in sorted(wrong, key=lambda pair: -pair[0]))


def _later(reference: Sequence[Record], trial: Sequence[Record], exact: bool) -> Iterator[Difference]:
    first = trial[0].first
    tolerance = 0.0 if exact else 10 * LOSS
    right = TrialTensors.of(record.final for record in reference)
    given = TrialTensors.of(record.final for record in trial)
    before = TrialTensors.of(record.initial for record in reference).whole
    figures: list[Difference] = []
    for number, (one, other) in enumerate(zip(reference[0].steps[first:], trial[0].steps, strict=False), first + 1):
        figures = figures or list(_figures(number, one, other, set(), tolerance, "later"))
    yield from figures
    wrong = list(_changed("later", "at the end", before, right, given))
    if exact and not wrong:
        for name in (name for name in right.whole if name in given.whole):
            if not np.array_equal(right.whole[name], given.whole[name]):
                apart = _off(given.whole[name], right.whole[name])
                text = f"{name} has other bits at the end: off by {apart:.2g} of its norm"
                wrong.append(Difference("later", text, name))
    yield from wrong


def _figures(
    step: int, right: Mapping[str, float], given: Mapping[str, float], without: set[str], tolerance: float, stage: str
) -> Iterator[Difference]:
    """The figures of a step that differ: loss, gradient norm, learning rate, and reports."""
    for name in sorted(right.keys() | given.keys(), key=lambda name: (name not in ("lr", "loss"), name)):
        if name in without:
            continue
        if name not in right or name not in given:
            has = "is not reported" if name in right else "is reported, but not in one process"
            yield Difference("report", f"{name} {has} (step {step})", hint=name)
        elif _relative(given[name], right[name]) > tolerance:
            what = {"grad_norm": "gradient norm", "lr": "learning rate"}.get(name, name)
            kind = stage if name in ("loss", "grad_norm", "lr") else "report"
            text = f"the {what} of step {step} is {given[name]:.7g}, but {right[name]:.7g} in one process"
            yield Difference(kind, text, hint=name)


def _norm(values: Array) -> float:
    return float(np.linalg.norm(np.asarray(values, np.float64).ravel()))


def _off(given: Array, right: Array) -> float:
    return _norm(given - right) / (_norm(right) + TINY)


def _relative(given: float, right: float) -> float:
    """The relative difference of two figures; 0 if neither is a number."""
    if given == right or (given != given and right != right):
        return 0.0
    off = abs(given - right) / max(abs(right), 1e-6)
    return off if off == off else float("inf")
