"""Updates of a run, made again from the same gradients by the same optimizer in plain PyTorch: unfused, unsharded, one replica.

What an optimizer is and keeps, its row in hpclm.config.optimizers says. Nothing here knows one by name.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpclm.config import EngineSettings
from hpclm.engine.base import BaseEngine, optimizer_for
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.engine.state import TrainingState
from hpclm.optim.adamw import update
from hpclm.parallel.collectives import all_gather_objects, all_reduce
from hpclm.parallel.compute import Compute
from hpclm.parallel.mesh import SINGLE, Mesh

SAMPLED = 1 << 20  # values of a tensor that are compared, evenly spaced
EPS = torch.finfo(torch.float32).eps
ROUNDINGS = 4.0 * EPS  # of a weight, when a change is added to it
KERNELS = ("fused", "foreach")
"""Entries of a parameter group, as PyTorch's optimizers have them, that choose a kernel; without any, updates are plain products and sums."""


class Sample(NamedTuple):
    """The sampled values of a tensor that this process has."""

    first: int
    """The number of the first of them among all that are sampled of the tensor-parallel slice."""
    values: Tensor
    """In fp32, on the CPU."""
    rounding: float = 0.0
    """By how much, as a norm, any way to compute may round them."""


Samples = Mapping[str, Sample]
"""By what they are samples of."""


@dataclass(frozen=True)
class Updates:
    """What the optimizer of a run was given, as far as this process holds it."""

    weights: Sequence[ShardedParameter] = ()
    """With copies of their values before the first update."""
    gradients: Sequence[Mapping[str, Tensor]] = ()
    """Of each update, by the names of the weights: flattened, as the optimizer applied them, so scaled and clipped."""
    lr: float = 0.0


Keep = Callable[[ShardedParameter, Tensor], Any]
"""(A weight as this process holds it, its gradient as of Updates) -> what is kept of the gradient."""


@contextmanager
def recorded(engine: BaseEngine, keep: Keep) -> Iterator[list[dict[str, Any]]]:
    """Inside this context, add an empty dictionary before each step: it gets what ``keep`` makes of the gradients of the update."""
    updates: list[dict[str, Any]] = []

    def record(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        scale = getattr(optimizer, "grad_scale", 1.0)  # as torch.amp has it; a library scales gradients itself
        for weight in engine.weights:
            gradient = engine.state.gradient(weight)
            if gradient is not None:
                held = engine.state.local_part(weight)
                updates[-1][weight.name] = keep(held, gradient.detach().flatten()[: held.count] / scale)

    hook = engine.optimizer.register_step_pre_hook(record)
    try:
        yield updates
    finally:
        hook.remove()


def copies(engine: BaseEngine) -> list[ShardedParameter]:
    """The weights as this process holds them, with copies of their values, without padding."""
    copied = []
    for weight in engine.weights:
        held, values = engine.state.local_part(weight), engine.state.values(weight)
        values = values if held.values is None else values.flatten()[: held.count]
        copied.append(replace(held, parameter=nn.Parameter(values.clone()), values=None))
    return copied


def sample(held: ShardedParameter, values: Tensor, mesh: Mesh) -> Sample:
    """Every n-th value of the tensor-parallel slice, those of them that this process holds."""
    every = math.prod(held.placement.local(mesh.tp)) // SAMPLED + 1 | 1  # odd, so that it meets every column
    skip = -held.begin % every
    mine = values.detach().flatten()[: held.count][skip::every]
    return Sample((held.begin + skip) // every, mine.to("cpu", torch.float32, copy=True))


def weights_of(state: TrainingState, weights: Sequence[ShardedParameter], mesh: Mesh) -> Samples:
    """Samples of the weights, by their names."""
    return {weight.name: sample(state.local_part(weight), state.values(weight), mesh) for weight in weights}


def outcome(
    number: int, before: Samples, state: TrainingState, weights: Sequence[ShardedParameter], mesh: Mesh
) -> dict[str, Sample]:
    """What came of update ``number``: the change of each weight since ``before``, and what the optimizer keeps."""
    results = {f"updates after update {number}": of_whole(state.steps())}
    for weight in weights:
        first, values, _ = sample(state.local_part(weight), state.values(weight), mesh)
        change = values - before[weight.name].values
        results[f"change of {weight.name} by update {number}"] = Sample(first, change, ROUNDINGS * float(values.norm()))
        kept = {
            name: sample(state.local_part(weight), state.values(weight, name), mesh)
            for name in state.names(weight, "weight")
        }
        kept |= {name: of_whole(state.values(weight, name)) for name in state.names(weight, "everywhere")}
        results |= {f"{name} of {weight.name} after update {number}": values for name, values in kept.items()}
    names = {weight.parameter: weight.name for weight in weights}
    for group in state.optimizer.param_groups:
        for key in state.kind.group_state:
            for parameter in group["params"]:
                results[f"{key} of {names[parameter]} after update {number}"] = of_whole(group[key])
    return results


def of_matrices(number: int, state: TrainingState, weights: Sequence[ShardedParameter]) -> dict[str, Sample]:
    """What the optimizer keeps after update ``number`` of the whole matrices that this process works on."""
    return {
        f"{name} of {weight.name} after update {number}": of_whole(state.values(weight, name))
        for weight in weights
        for name in state.names(weight, "matrix")
    }


def of_whole(values: Tensor | float) -> Sample:
    """Every n-th value of a tensor that this process holds whole."""
    flat = torch.as_tensor(values).detach().flatten()
    return Sample(0, flat[:: len(flat) // SAMPLED + 1 | 1].to("cpu", torch.float32, copy=True))


def replayed(
    updates: Updates, settings: EngineSettings, compute: Compute, plain: bool, rounded: bool = False
) -> Samples:
    """What the updates make if the optimizer of ``settings`` makes them again; a collective.

    ``compute``: of the run. ``plain``: in plain PyTorch, of whole tensor-parallel slices; else of the parts that each process holds, as
    the run does. ``rounded``: of gradients with other rounding errors, which shows what an optimizer makes of these.
    """
    draw = torch.Generator(compute.device).manual_seed(0)

    def given(weight: ShardedParameter, values: Tensor) -> Tensor:
        return whole(weight, values, compute) if plain else values.detach().clone()

    def error(values: Tensor) -> Tensor:
        return torch.rand(values.shape, generator=draw, device=values.device).sub(0.5).mul(2 * EPS).add(1.0)

    mesh = compute.alone.mesh if plain else compute.mesh
    slices: dict[str, Any] = dict(begin=0, values=None, replicas=SINGLE, local_range=None) if plain else {}
    weights = [
        replace(weight, parameter=nn.Parameter(given(weight, weight.parameter)), **slices) for weight in updates.weights
    ]
    optimizer, state, _ = optimizer_for(weights, settings, mesh)
    for group in optimizer.param_groups:
        group["lr"] = updates.lr * group.get("factor", 1.0)
        group.update({kernel: False for kernel in KERNELS if plain and kernel in group})
    one, results = torch.ones((), device=weights[0].parameter.device), dict[str, Sample]()
    for number, gradients in enumerate(updates.gradients, 1):
        before = weights_of(state, weights, mesh)
        for held, weight in zip(updates.weights, weights, strict=True):
            if held.name not in gradients:
                weight.parameter.grad = None
                continue
            gradient = given(held, gradients[held.name]).view_as(weight.parameter)
            weight.parameter.grad = gradient.mul_(error(gradient)) if rounded else gradient
        update(optimizer, one, 0.0, 1.0, torch.zeros_like(one))
        results |= outcome(number, before, state, weights, mesh)
        # in the run, another process may work on a matrix
        for theirs in all_gather_objects(of_matrices(number, state, weights), mesh.tp if plain else SINGLE):
            results |= theirs
    return results


def whole(weight: ShardedParameter, values: Tensor, compute: Compute) -> Tensor:
    """The tensor-parallel slice, of which this process holds ``values``, in a new tensor; a collective over those that hold the rest."""
    mesh = compute.mesh
    shape = weight.placement.local(mesh.tp)
    values = values.detach().to(compute.device).flatten()
    if weight.replicas.size == mesh.dp.size:
        return values.clone().view(shape)
    out = torch.zeros(math.prod(shape), device=compute.device)
    out[weight.begin : weight.begin + weight.count] = values
    return all_reduce(out, mesh.shard).view(shape)
