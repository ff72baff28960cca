"""Whether two ways to compute the same steps differ by more than the type of the numbers costs.

What the type costs shows the plain way in that type, against the plain way in fp32. A gradient, say, may be off by three times as
much, and by a rounding.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median

import torch

from hpclm.config import EngineSettings
from hpclm.distributed.context import DistributedContext
from hpclm.training.compute import Compute
from hpclm.training.twin import Measured

FACTOR = 3.0  # times what the type costs
FLOOR = 1e-4  # relative; the order of sums alone changes fp32 by this
ZERO = 0.1  # of the floor, for rounding errors of what is 0 in exact arithmetic
TINY = 1e-12
MANY = 256  # values of a tensor by which one rank can be judged alone


def floor(settings: EngineSettings, compute: Compute) -> float:
    """The relative difference that is always allowed: a rounding to the type, for each sum over replicas where they are sent in it."""
    engine, least = settings.engine, max(torch.finfo(compute.dtype).eps, FLOOR)
    in_type = engine.gradients == "compute" or (
        engine.gradients == "auto" and engine.name in ("deepspeed", "fairscale")
    )
    return min(0.25, least * math.sqrt(compute.mesh.dp.size)) if in_type else least


def differences(
    own: Measured, in_type: Measured, plain: Measured, least: float, context: DistributedContext
) -> tuple[str, str]:
    """What differs by more than the type costs, empty if nothing does; and what came closest to it. The same on every rank.

    ``least``: the relative difference that is always allowed.
    """
    mine: dict[str, list[float]] = {}
    """What -> squares of the differences from the plain way, of what the type costs, and of the values; how many values."""
    for what, (at, value) in own.values.items():
        if what in plain.values:
            begin = plain.values[what][0]
            right, cast = (each.values[what][1][at - begin : at - begin + len(value)] for each in (plain, in_type))
            three = (float(each.double().square().sum()) for each in (value - right, cast - right, right))
            mine[what] = [*three, len(value)]
    for what, number in own.scalars.items():
        right_one, cast_one = plain.scalars[what], in_type.scalars[what]
        mine[what] = [(number - right_one) ** 2, (cast_one - right_one) ** 2, right_one**2, 1]
    everyone = context.gather([mine, sorted(plain.values)])

    def judge() -> tuple[str, str]:
        total: dict[str, list[float]] = {}
        for theirs, _ in everyone:
            for what, four in theirs.items():
                total[what] = [a + b for a, b in zip(total.get(what, [0.0] * 4), four, strict=True)]
        unseen = sorted({what for _, names in everyone for what in names} - total.keys())
        if unseen:
            return f"{unseen[0]} is not there", ""
        wrong, nearest = judged(total, least)
        alone = [
            judged({what: four for what, four in theirs.items() if four[3] >= MANY}, least)[0] for theirs, _ in everyone
        ]
        bad = [rank for rank, problem in enumerate(alone) if problem]
        if bad and 2 * len(bad) < len(everyone):
            wrong = f"{alone[bad[0]]}, on {', '.join(str(context.ranks[rank]) for rank in bad[:4])} alone"
        return wrong, nearest

    problem, closest = context.run_on_main(judge)
    return problem, closest


def judged(total: Mapping[str, Sequence[float]], least: float) -> tuple[str, str]:
    """What is off by more than it may be, and what comes closest to that, of the sums over all ranks that ``differences`` makes."""
    kinds: dict[str, list[Sequence[float]]] = {}
    for what, four in total.items():
        kinds.setdefault(what.partition(" ")[0], []).append(four)
    parts = {}
    for what, (off, cost, size, count) in total.items():
        alike = kinds[what.partition(" ")[0]]
        usual = median(math.sqrt(c / s) if s else 0.0 for _, c, s, _ in alike)  # a small tensor's own may be chance
        mean = sum(s for _, _, s, _ in alike) / max(1, sum(n for *_, n in alike))
        allowed = FACTOR * max(math.sqrt(cost), usual * math.sqrt(size))
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


def unequal(own: Measured, again: Measured, context: DistributedContext) -> str:
    """The first thing that two equal runs of the same steps differ in, on any rank."""
    wrong = [what for what, number in own.scalars.items() if again.scalars[what] != number]
    wrong += [what for what, (_, value) in own.values.items() if not torch.equal(value, again.values[what][1])]
    return next((f"{what[0]} has other bits the second time" for what in context.all_gather(wrong[:1]) if what), "")
