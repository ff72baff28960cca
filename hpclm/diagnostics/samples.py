"""Samples of tensors, to compare two ways to compute the same: whether they differ by more than the type of the numbers costs.

The cost of a type is the difference between plain computations in that type and in fp32. A gradient may be off by three times that
cost, and by a rounding. The same holds for an update, compared with the update by the same gradient in fp32.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from hpclm.config import EngineSettings
from hpclm.distributed.context import DistributedContext
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.engine.state import TrainingState
from hpclm.parallel.mesh import Compute, Mesh

SAMPLED = 1 << 20  # values of a tensor that are compared, evenly spaced
EPS = torch.finfo(torch.float32).eps
ROUNDINGS = 4.0 * EPS  # of a weight, when a change is added to it
FACTOR = 3.0  # times what the type costs
FLOOR = 1e-4  # relative; the order of sums alone changes fp32 by this
UPDATE_FLOOR = 2e-4  # relative; the order of operations changes an update in fp32 by less
ROUTING_FLOOR = 0.05  # relative; where two scores are close, a rounding error gives a token to another expert
ZERO = 0.1  # of the floor, for rounding errors of what is 0 in exact arithmetic
ROUTED = ("gradient of ", "grad_norm of ", "load of ")  # samples that such a token changes by leaps
TINY = 1e-30
JUDGED_ALONE = 256  # values of a tensor by which one rank can be judged alone


class Sample(NamedTuple):
    """The sampled values of a tensor that this process has."""

    first: int
    """The number of the first of them among all that are sampled of the tensor-parallel slice."""
    values: Tensor
    """On the CPU, in fp32; scalars in fp64."""
    rounding: float = 0.0
    """By how much, as a norm, any way to compute may round them."""


Samples = Mapping[str, Sample]
"""By what they are samples of."""


def sample(values: Tensor | float, size: int | None = None, begin: int = 0) -> Sample:
    """Every n-th of the values from ``begin`` on of a tensor with ``size`` values; None: these are all."""
    flat = torch.as_tensor(values).detach().flatten()
    every = (len(flat) if size is None else size) // SAMPLED + 1 | 1  # odd, so that it meets every column
    skip = -begin % every
    kind = torch.float64 if flat.dtype == torch.float64 else torch.float32
    return Sample((begin + skip) // every, flat[skip::every].to("cpu", kind, copy=True))


def sample_of(held: ShardedParameter, values: Tensor, mesh: Mesh) -> Sample:
    """A sample of the tensor-parallel slice of a weight, or of a tensor of its shape. This process holds ``values`` of it."""
    size = math.prod(held.placement.local(mesh.tp))
    parts = held.placement.data_ranks
    begin = held.begin + held.data_rank % parts * size  # a part of experts is some of the first dimension
    return sample(values.flatten()[: held.count], size * parts, begin)


def of_weights(state: TrainingState, weights: Sequence[ShardedParameter], mesh: Mesh) -> Samples:
    """Samples of the weights, by their names."""
    return {weight.name: sample_of(state.local_part(weight), state.values(weight), mesh) for weight in weights}


def of_update(
    number: int, before: Samples, state: TrainingState, weights: Sequence[ShardedParameter], mesh: Mesh
) -> dict[str, Sample]:
    """The result of update ``number``: the change of each weight since ``before``, and the optimizer's state."""
    after = f"after update {number}"
    results = {f"updates {after}": sample(state.steps())}
    for weight in weights:
        held = state.local_part(weight)
        name = weight.name
        first, values, _ = sample_of(held, state.values(weight), mesh)
        rounding = ROUNDINGS * float(values.norm())
        results[f"change of {name} by update {number}"] = Sample(first, values - before[name].values, rounding)
        for key in state.names(weight, "weight"):
            results[f"{key} of {name} {after}"] = sample_of(held, state.values(weight, key), mesh)
        for key in state.names(weight, "everywhere"):
            results[f"{key} of {name} {after}"] = sample(state.values(weight, key))
    names = {weight.parameter: weight.name for weight in weights}
    for group in state.optimizer.param_groups:
        for key in state.kind.group_state:
            results |= {f"{key} of {names[parameter]} {after}": sample(group[key]) for parameter in group["params"]}
    return results


def of_matrices(number: int, state: TrainingState, weights: Sequence[ShardedParameter]) -> dict[str, Sample]:
    """The optimizer's state for the whole matrices that this process works on, after update ``number``."""
    return {
        f"{key} of {weight.name} after update {number}": sample(state.values(weight, key))
        for weight in weights
        for key in state.names(weight, "matrix")
    }


@dataclass(frozen=True)
class Tolerance:
    """The allowed difference between two ways to compute, besides three times the cost of the type."""

    floor: float
    """The relative difference that is always allowed."""
    routing: float = 0.0
    """The same for what ROUTED names."""
    alike: bool = True
    """Whether what the type costs tensors of the same kind is allowed too, since a small tensor's own cost may be chance."""


OF_UPDATES = Tolerance(UPDATE_FLOOR, alike=False)
"""For updates by the same gradients. The operations and numbers are the same, so the cost has no random part."""


def of_steps(settings: EngineSettings, compute: Compute) -> Tolerance:
    """The tolerance of steps: a rounding to the type, for each sum over replicas if gradients are sent in it."""
    engine = settings.engine
    floor = max(torch.finfo(compute.dtype).eps, FLOOR)
    library = engine.gradients == "auto" and engine.name in ("deepspeed", "fairscale")
    in_type = engine.gradients == "compute" or library
    routing = ROUTING_FLOOR if settings.model.experts else 0.0
    return Tolerance(min(0.25, floor * math.sqrt(compute.mesh.dp.size)) if in_type else floor, routing)


def differing(
    run: Samples, in_type: Samples, exact: Samples, tolerance: Tolerance, context: DistributedContext
) -> tuple[str, str]:
    """The part of ``run`` that differs from ``exact`` by more than its type costs ``in_type``, or empty; and the part that came closest.

    Sums over all ranks are judged, and each rank alone; the answer is the same on every rank.
    """
    everyone = context.gather([_squares(run, in_type, exact), sorted(exact)])

    def judge() -> tuple[str, str]:
        total: dict[str, list[float]] = {}
        for squares, _ in everyone:
            for what, five in squares.items():
                total[what] = [a + b for a, b in zip(total.get(what, [0.0] * 5), five, strict=True)]
        unseen = sorted({what for _, names in everyone for what in names} - total.keys())
        if unseen:
            return f"{unseen[0]} is not there", ""
        wrong, closest = judged(total, tolerance)
        many = [{what: five for what, five in squares.items() if five[4] >= JUDGED_ALONE} for squares, _ in everyone]
        alone = [judged(squares, tolerance)[0] for squares in many]
        bad = [rank for rank, problem in enumerate(alone) if problem]
        if bad and 2 * len(bad) < len(everyone):
            wrong = f"{alone[bad[0]]}, on {', '.join(str(context.ranks[rank]) for rank in bad[:4])} alone"
        return wrong, closest

    problem, closest = context.run_on_main(judge)
    return problem, closest


def _squares(run: Samples, in_type: Samples, exact: Samples) -> dict[str, list[float]]:
    """For each tensor that this process has a part of, sums of squares, and the number of values.

    Squares of: the difference from the exact values, the cost of the type, the values, the rounding that any computation may have.
    """
    squares: dict[str, list[float]] = {}
    for what, (first, values, rounding) in run.items():
        if what in exact:
            begin = first - exact[what].first
            right, cast = (samples[what].values[begin : begin + len(values)] for samples in (exact, in_type))
            three = (float(x.double().square().sum()) for x in (values - right, cast - right, right))
            squares[what] = [*three, rounding**2, len(values)]
    return squares


def judged(total: Mapping[str, Sequence[float]], tolerance: Tolerance) -> tuple[str, str]:
    """The part that exceeds its tolerance, or empty, and the part that comes closest; from sums of ``_squares`` over ranks."""
    kinds: dict[str, list[Sequence[float]]] = {}
    for what, five in total.items():
        kinds.setdefault(what.partition(" ")[0], []).append(five)
    parts = {}
    for what, (off, cost, size, rounding, count) in total.items():
        same = kinds[what.partition(" ")[0]]
        usual = median(math.sqrt(c / s) if s else 0.0 for _, c, s, *_ in same) if tolerance.alike else 0.0
        mean = sum(s for _, _, s, *_ in same) / max(1, sum(n for *_, n in same))
        allowed = FACTOR * max(math.sqrt(cost), usual * math.sqrt(size)) + math.sqrt(rounding)
        floor = max(tolerance.floor, tolerance.routing if what.startswith(ROUTED) else 0.0)
        allowed += floor * (math.sqrt(size) + ZERO * math.sqrt(mean * count)) + TINY
        share = math.sqrt(off) / allowed
        parts[what] = share if share == share else math.inf
    if not parts:
        return "", ""
    what = max(parts, key=lambda part: parts[part])
    apart = math.sqrt(total[what][0]) / (math.sqrt(total[what][2]) + TINY)
    text = f"{what} is off by {apart:.2g} of its size, {parts[what]:.2g} times what the type may cost"
    return (text if parts[what] > 1 else ""), text


def unequal(pairs: Iterable[tuple[Samples, Samples]], context: DistributedContext) -> str:
    """The first of these samples that differ in any bit, on any rank: of the same steps, computed twice."""
    wrong = [what for one, two in pairs for what in one if not torch.equal(one[what].values, two[what].values)]
    return next((f"{what[0]} has other bits the second time" for what in context.all_gather(wrong[:1]) if what), "")
