"""Samples of tensors from two ways to compute the same step, to judge whether they differ by more than the precision of the type explains.

The error of the type is the difference between the plain way in that type and the plain way in fp32. A gradient may be off by three
times that error, plus a rounding. The same limit holds for the result of an update, compared with an update in fp32 by the same gradient.
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

SAMPLED = 1 << 20  # compared values of a tensor, evenly spaced
EPS = torch.finfo(torch.float32).eps
ROUNDINGS = 4.0 * EPS  # relative rounding error of a weight after an update
FACTOR = 3.0  # times the error of the type
FLOOR = 1e-4  # relative; the order of sums alone changes fp32 by this
UPDATE_FLOOR = 2e-4  # relative; the order of operations changes an update in fp32 by less
ROUTING_FLOOR = 0.05  # relative; where two scores are close, a rounding error routes a token to another expert
ZERO = 0.1  # fraction of the floor, for rounding errors of values that are 0 in exact arithmetic
ROUTED = ("gradient of ", "grad_norm of ", "load of ")  # samples that change abruptly if a token is routed differently
TINY = 1e-30
JUDGED_ALONE = 256  # minimum number of values of a tensor to judge a single rank by


class TensorSample(NamedTuple):
    """The sampled values of a tensor that this process has."""

    first: int
    """Index of this process's first value among all samples of the tensor-parallel slice."""
    values: Tensor
    """On the CPU, in fp32; scalars in fp64."""
    rounding: float = 0.0
    """Norm of the rounding errors that any way to compute may add."""


Samples = Mapping[str, TensorSample]
"""Samples by description."""


def sample(values: Tensor | float, size: int | None = None, begin: int = 0) -> TensorSample:
    """Every n-th value of a tensor with ``size`` values. ``values``: its values from ``begin`` on. ``size``: None if these are all."""
    flat = torch.as_tensor(values).detach().flatten()
    every = (len(flat) if size is None else size) // SAMPLED + 1 | 1  # odd, so that it meets every column
    skip = -begin % every
    kind = torch.float64 if flat.dtype == torch.float64 else torch.float32
    return TensorSample((begin + skip) // every, flat[skip::every].to("cpu", kind, copy=True))


def sample_of(held: ShardedParameter, values: Tensor, mesh: Mesh) -> TensorSample:
    """A sample of ``values``, this process's part of a weight or of a tensor of its shape. The tensor-parallel slice that contains
    them determines which values are sampled."""
    size = math.prod(held.placement.local(mesh.tp))
    parts = held.placement.data_ranks
    begin = held.begin + held.data_rank % parts * size  # experts are split along the first dimension
    return sample(values.flatten()[: held.count], size * parts, begin)


def weight_samples(state: TrainingState, weights: Sequence[ShardedParameter], mesh: Mesh) -> Samples:
    """Samples of the weights, by their names."""
    return {weight.name: sample_of(state.local_part(weight), state.values(weight), mesh) for weight in weights}


def update_samples(
    number: int, before: Samples, state: TrainingState, weights: Sequence[ShardedParameter], mesh: Mesh
) -> dict[str, TensorSample]:
    """The result of update ``number``: the change of each weight since ``before``, and the optimizer's state."""
    after = f"after update {number}"
    results = {f"updates {after}": sample(state.steps())}
    for weight in weights:
        held = state.local_part(weight)
        name = weight.name
        first, values, _ = sample_of(held, state.values(weight), mesh)
        rounding = ROUNDINGS * float(values.norm())
        results[f"change of {name} by update {number}"] = TensorSample(first, values - before[name].values, rounding)
        for key in state.names(weight):
            results[f"{key} of {name} {after}"] = sample_of(held, state.values(weight, key), mesh)
    return results


@dataclass(frozen=True)
class Tolerance:
    """The difference allowed between two ways to compute, besides three times the error of the type."""

    floor: float
    """The relative difference that is always allowed."""
    routing: float = 0.0
    """The relative difference that is always allowed for samples in ROUTED."""
    alike: bool = True
    """Whether the typical error of tensors of the same kind is allowed too, since a small tensor's own error may be chance."""


UPDATE_TOLERANCE = Tolerance(UPDATE_FLOOR, alike=False)
"""The tolerance of updates by the same gradients: the same operations on the same numbers, so chance plays no part."""


def step_tolerance(settings: EngineSettings, compute: Compute) -> Tolerance:
    """The tolerance of steps: one rounding to the type, and more with many replicas if gradients are sent in the type."""
    engine = settings.engine
    floor = max(torch.finfo(compute.dtype).eps, FLOOR)
    library = engine.gradients == "auto" and engine.name in ("deepspeed", "fairscale")
    if engine.gradients == "compute" or library:
        floor = min(0.25, floor * math.sqrt(compute.mesh.dp.size))
    routing = ROUTING_FLOOR if settings.model.experts.count else 0.0
    return Tolerance(floor, routing)


class Squares(NamedTuple):
    """Sums of squares over this process's part of a sample."""

    error: float
    """Difference from the exact value."""
    type_error: float
    """Error of the type: difference of the plain way in that type from the exact value."""
    values: float
    """Exact values."""
    rounding: float
    """Rounding errors that any way to compute may add."""
    number: int
    """Number of values; not a sum of squares."""


def differing(
    run: Samples, in_type: Samples, exact: Samples, tolerance: Tolerance, context: DistributedContext
) -> tuple[str, str]:
    """Two descriptions: the sample of ``run`` that differs from ``exact`` by more than the error of ``in_type`` allows, empty if none
    does; and the sample closest to its limit. Judges the sums of all ranks, and each rank alone; the same on every rank."""
    everyone = context.gather([_squares(run, in_type, exact), sorted(exact)])

    def judge() -> tuple[str, str]:
        # gather() sends JSON, which has no named tuples
        ranks = [{name: Squares(*squares) for name, squares in of_rank.items()} for of_rank, _ in everyone]
        total: dict[str, Squares] = {}
        for of_rank in ranks:
            for name, squares in of_rank.items():
                before = total.get(name, Squares(0.0, 0.0, 0.0, 0.0, 0))
                total[name] = Squares._make(a + b for a, b in zip(before, squares, strict=True))
        missing = sorted({name for _, names in everyone for name in names} - total.keys())
        if missing:
            return f"{missing[0]} is missing", ""
        wrong, closest = _judged(total, tolerance)
        alone = []
        for of_rank in ranks:
            many = {name: squares for name, squares in of_rank.items() if squares.number >= JUDGED_ALONE}
            alone.append(_judged(many, tolerance)[0])
        bad = [rank for rank, problem in enumerate(alone) if problem]
        if bad and 2 * len(bad) < len(ranks):
            wrong = f"{alone[bad[0]]}, on {', '.join(str(context.ranks[rank]) for rank in bad[:4])} alone"
        return wrong, closest

    problem, closest = context.run_on_main(judge)
    return problem, closest


def _squares(run: Samples, in_type: Samples, exact: Samples) -> dict[str, Squares]:
    """The squares of each sample, for this process's part."""
    squares: dict[str, Squares] = {}
    for name, (first, values, rounding) in run.items():
        if name in exact:
            begin = first - exact[name].first
            part = slice(begin, begin + len(values))
            right = exact[name].values[part]
            cast = in_type[name].values[part]
            error, type_error, size = (float(x.double().square().sum()) for x in (values - right, cast - right, right))
            squares[name] = Squares(error, type_error, size, rounding**2, len(values))
    return squares


def _judged(total: Mapping[str, Squares], tolerance: Tolerance) -> tuple[str, str]:
    """Descriptions of the sample with too large an error (empty if none), and of the sample closest to its limit."""
    kinds: dict[str, list[Squares]] = {}
    for name, squares in total.items():
        kinds.setdefault(name.partition(" ")[0], []).append(squares)
    parts = {}
    for name, squares in total.items():
        same_kind = kinds[name.partition(" ")[0]]
        usual = _usual_error(same_kind) if tolerance.alike else 0.0
        mean = sum(other.values for other in same_kind) / max(1, sum(other.number for other in same_kind))
        type_error = max(math.sqrt(squares.type_error), usual * math.sqrt(squares.values))
        floor = max(tolerance.floor, tolerance.routing) if name.startswith(ROUTED) else tolerance.floor
        allowed = FACTOR * type_error + math.sqrt(squares.rounding)
        allowed += floor * (math.sqrt(squares.values) + ZERO * math.sqrt(mean * squares.number)) + TINY
        share = math.sqrt(squares.error) / allowed
        parts[name] = share if share == share else math.inf
    if not parts:
        return "", ""
    worst = max(parts, key=lambda part: parts[part])
    relative = math.sqrt(total[worst].error) / (math.sqrt(total[worst].values) + TINY)
    text = f"{worst} is off by {relative:.2g} of its size, {parts[worst]:.2g} times the error allowed for the type"
    return (text if parts[worst] > 1 else ""), text


def _usual_error(squares: Iterable[Squares]) -> float:
    """The median of the relative errors of the type."""
    return median(math.sqrt(one.type_error / one.values) if one.values else 0.0 for one in squares)


def unequal(pairs: Iterable[tuple[Samples, Samples]], context: DistributedContext) -> str:
    """The first of these samples that differ in any bit, on any rank, when the same steps are computed twice."""
    wrong = [name for one, two in pairs for name in one if not torch.equal(one[name].values, two[name].values)]
    return next((f"{names[0]} has other bits the second time" for names in context.all_gather(wrong[:1]) if names), "")
