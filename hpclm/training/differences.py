"""Whether two ways to compute the same steps differ by more than the type of the numbers costs.

What the type costs shows the plain way in that type, against the plain way in fp32. A gradient, say, may be off by three times as
much, and by a rounding; so may what an update makes of a gradient, compared with what it makes of the same gradient in fp32.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import torch

from hpclm.config import EngineSettings
from hpclm.distributed.context import DistributedContext
from hpclm.parallel.compute import Compute
from hpclm.training.replay import Samples
from hpclm.training.twin import Measured

FACTOR = 3.0  # times what the type costs
FLOOR = 1e-4  # relative; the order of sums alone changes fp32 by this
UPDATE_FLOOR = 2e-4  # relative; the order of operations changes an update in fp32 by less
ZERO = 0.1  # of the floor, for rounding errors of what is 0 in exact arithmetic
TINY = 1e-30
MIN_JUDGED_VALUES = 256  # values of a tensor by which one rank can be judged alone


def floor(settings: EngineSettings, compute: Compute) -> float:
    """The relative difference that is always allowed: a rounding to the type, for each sum over replicas where they are sent in it."""
    engine, least = settings.engine, max(torch.finfo(compute.dtype).eps, FLOOR)
    in_type = engine.gradients == "compute" or (
        engine.gradients == "auto" and engine.name in ("deepspeed", "fairscale")
    )
    return min(0.25, least * math.sqrt(compute.mesh.dp.size)) if in_type else least


def of_step(
    step: int, run: Measured, in_type: Measured, plain: Measured, least: float, context: DistributedContext
) -> tuple[str, str]:
    """What differs in step number ``step`` by more than the type costs, empty if nothing does; and what came closest to it. The same on
    every rank.

    ``least``: the relative difference that is always allowed.
    """
    mine = {} if step else sums(run.values, in_type.values, plain.values)
    for what, number in run.scalars[step].items():
        right, cast = plain.scalars[step][what], in_type.scalars[step][what]
        mine[what] = [(number - right) ** 2, (cast - right) ** 2, right**2, 0.0, 1]
    return _judged_by_all(mine, {} if step else plain.values, partial(judged, least=least), context)


def of_updates(run: Samples, in_type: Samples, exact: Samples, context: DistributedContext) -> tuple[str, str]:
    """As ``of_step``, of what updates make of the same gradients."""
    # a cost is that of the same operations on the same numbers, so that nothing in it is chance
    judge = partial(judged, least=UPDATE_FLOOR, alike=False)
    return _judged_by_all(sums(run, in_type, exact), exact, judge, context)


def sums(run: Samples, in_type: Samples, exact: Samples) -> dict[str, list[float]]:
    """What this process has a part of -> squares of the difference from what is exact, of what the type costs, of the values, and of the
    rounding that any way may have; how many values."""
    mine: dict[str, list[float]] = {}
    for what, (first, value, rounding) in run.items():
        if what in exact:
            begin = exact[what].first
            right, cast = (
                samples[what].values[first - begin : first - begin + len(value)] for samples in (exact, in_type)
            )
            three = (float(x.double().square().sum()) for x in (value - right, cast - right, right))
            mine[what] = [*three, rounding**2, len(value)]
    return mine


def _judged_by_all(
    mine: Mapping[str, Sequence[float]],
    expected: Samples,
    judge_sums: Callable[[Mapping[str, Sequence[float]]], tuple[str, str]],
    context: DistributedContext,
) -> tuple[str, str]:
    """``judge_sums`` of the sums of all ranks, and of each rank alone."""
    everyone = context.gather([mine, sorted(expected)])

    def judge() -> tuple[str, str]:
        total: dict[str, list[float]] = {}
        for theirs, _ in everyone:
            for what, five in theirs.items():
                total[what] = [a + b for a, b in zip(total.get(what, [0.0] * 5), five, strict=True)]
        unseen = sorted({what for _, names in everyone for what in names} - total.keys())
        if unseen:
            return f"{unseen[0]} is not there", ""
        wrong, nearest = judge_sums(total)
        alone = [
            judge_sums({what: five for what, five in theirs.items() if five[4] >= MIN_JUDGED_VALUES})[0]
            for theirs, _ in everyone
        ]
        bad = [rank for rank, problem in enumerate(alone) if problem]
        if bad and 2 * len(bad) < len(everyone):
            wrong = f"{alone[bad[0]]}, on {', '.join(str(context.ranks[rank]) for rank in bad[:4])} alone"
        return wrong, nearest

    problem, closest = context.run_on_main(judge)
    return problem, closest


def judged(total: Mapping[str, Sequence[float]], least: float, alike: bool = True) -> tuple[str, str]:
    """What is off by more than it may be, and what comes closest to that, of the sums over all ranks that ``sums`` makes.

    ``alike``: what the type costs tensors of the same kind is allowed too, since a small tensor's run cost may be chance.
    """
    kinds: dict[str, list[Sequence[float]]] = {}
    for what, five in total.items():
        kinds.setdefault(what.partition(" ")[0], []).append(five)
    parts = {}
    for what, (off, cost, size, rounding, count) in total.items():
        same = kinds[what.partition(" ")[0]]
        usual = median(math.sqrt(c / s) if s else 0.0 for _, c, s, *_ in same) if alike else 0.0
        mean = sum(s for _, _, s, *_ in same) / max(1, sum(n for *_, n in same))
        allowed = FACTOR * max(math.sqrt(cost), usual * math.sqrt(size)) + math.sqrt(rounding)
        allowed += least * (math.sqrt(size) + ZERO * math.sqrt(mean * count)) + TINY
        share = math.sqrt(off) / allowed
        parts[what] = share if share == share else math.inf
    if not parts:
        return "", ""
    what = max(parts, key=lambda each: parts[each])
    size = math.sqrt(total[what][2]) + TINY
    apart = math.sqrt(total[what][0]) / size
    text = f"{what} is off by {apart:.2g} of its size, {parts[what]:.2g} times what the type may cost"
    return (text if parts[what] > 1 else ""), text


def unequal(run: Measured, again: Measured, context: DistributedContext) -> str:
    """The first thing that two equal runs of the same steps differ in, on any rank."""
    steps = zip(run.scalars, again.scalars, strict=True)
    wrong = [what for one, two in steps for what, number in one.items() if two[what] != number]
    pairs = [(run.values, again.values), (run.outcomes, again.outcomes)]
    wrong += [what for one, two in pairs for what in one if not torch.equal(one[what].values, two[what].values)]
    return next((f"{what[0]} has other bits the second time" for what in context.all_gather(wrong[:1]) if what), "")
