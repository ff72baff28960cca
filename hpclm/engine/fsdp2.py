"""PyTorch's fully_shard: replicas shard weights, gradients and optimizer state (ZeRO; Rajbhandari et al. 2020).

Each block is an FSDP group, gathered for its forward and its backward pass; the rest of the model (embeddings, final norm, output) is
another group. Experts divided among data-parallel ranks are separate groups, sharded over the ranks with the same experts. The optimizer
sees plain tensors: this replica's rows of each weight. With parallel.shard, weights are sharded within groups of replicas, and the
gradients of a shard are all-reduced between the groups (hybrid sharding; Zhao et al. 2023).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hpclm.config import EngineSettings
from hpclm.engine.base import BaseEngine
from hpclm.engine.models import defer_tp_grad_sum, whole_model
from hpclm.engine.native import NativeEngine
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.model.init import allocate, move, set_weight, uninitialized
from hpclm.model.own_block import use_every_weight
from hpclm.model.spec import LayerSpec
from hpclm.model.stack import Stack, placements
from hpclm.parallel.collectives import all_reduce_in_place
from hpclm.parallel.mesh import Compute, Mesh


def build(config: EngineSettings, compute: Compute) -> BaseEngine:
    """The engine named fsdp2; with one replica, the native engine."""
    if compute.mesh.dp.size > 1:
        return FSDP2Engine(config, compute)
    return NativeEngine(config, compute)


class FSDP2Engine(BaseEngine):
    """Stage 3 reshards a block's weights after each use; stage 2 gathers them once a step, and keeps them until the update."""

    model: Stack
    sharded = True

    def __init__(self, config: EngineSettings, compute: Compute):
        mesh = compute.mesh
        device = compute.device
        dtype = compute.dtype
        engine = config.engine
        # PyTorch accumulates a group's sums over micro-batches only in fp32
        self._keeps_sums = mesh.replicate.size > 1 and (engine.gradients != "compute" or dtype == torch.float32)
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype,
            reduce_dtype=None if engine.gradients == "compute" else torch.float32,
            cast_forward_inputs=False,  # token weights of the loss stay fp32
        )
        home = cache(mesh.of_weights)
        device_mesh_of = cache(lambda data_ranks: device_mesh(home(data_ranks), device.type))
        whole: set[nn.Parameter] = set()
        """Weights that data-parallel ranks split, such as experts, and that are not sharded further."""
        shard = partial(fully_shard, mp_policy=policy, ignored_params=whole)

        def wrap(spec: LayerSpec, layer: nn.Module) -> nn.Module:
            use_every_weight(layer)
            move(layer, device)
            for module, data_ranks in split_modules(layer, home):
                shard(module, mesh=device_mesh_of(data_ranks), reshard_after_forward=engine.zero_stage != 2)
            for weight_name, initial in list(uninitialized(layer)):
                if initial.placement.data_ranks > 1 and not isinstance(layer.get_parameter(weight_name), DTensor):
                    set_weight(layer, weight_name, initial.parameter(mesh.tp, device, mesh.dp.rank))
            whole.update(
                weight
                for (_, placement), weight in zip(placements(layer), layer.parameters(), strict=True)
                if placement.data_ranks > 1 and not isinstance(weight, DTensor)
            )
            if spec.layer:
                shard(layer, mesh=device_mesh_of(1), reshard_after_forward=engine.zero_stage != 2)
            return layer

        model = whole_model(config, compute, wrap)
        defer_tp_grad_sum(model, compute)
        if engine.compile:
            model.compile_blocks()
        # the rest of the model stays gathered, because its last layers are the first in the backward pass
        shard(model, mesh=device_mesh_of(1), reshard_after_forward=False)
        # sharded on the meta device, so that no GPU ever holds the whole model
        allocate(model, device)
        for group in groups(model):
            # the token weights already divide by the tokens of the whole step
            group.set_gradient_divide_factor(1.0)
            # with another factor PyTorch asks for PREMUL_SUM (torch 2.13), which only NCCL has
            group.set_force_sum_reduction_for_comms(True)
        if config.parallel.expert > 1:
            gather_ahead(model)
        if engine.zero_stage == 2:
            model.set_reshard_after_backward(False)  # type: ignore[operator]  # of every group
        named = dict(model.weights())
        pairs = {
            name: sharded(name, weight, model, home(model.placements[name].data_ranks), mesh.dp.rank)
            for name, weight in named.items()
            if weight not in whole
        }
        self._pairs = [(dtensor, weight.parameter) for dtensor, weight in pairs.values()]
        homes = {p: home(model.placements[name].data_ranks).dp for name, p in named.items() if p in whole}
        weights = []
        for name, p in named.items():
            if name in pairs:
                weights.append(pairs[name][1])
            else:
                placement = model.placements[name]
                weights.append(ShardedParameter(name, p, placement, replicas=homes[p], data_rank=mesh.dp.rank))
        super().__init__(config, compute, model, weights)
        self._split_gradients = [
            (axis, [p for p, replicas in homes.items() if replicas == axis]) for axis in dict.fromkeys(homes.values())
        ]

    def no_sync(self) -> AbstractContextManager:
        """Inside this context, backward passes reduce gradients only within groups of parallel.shard replicas. With
        engine.defer_reduction they reduce nothing: gradients are accumulated whole, in the type of the reduction."""
        if self.config.engine.defer_reduction:
            return without(self.model.set_requires_gradient_sync)  # type: ignore[arg-type]  # of every group
        if self._keeps_sums:
            return without(self.model.set_requires_all_reduce)  # type: ignore[arg-type]
        return nullcontext()

    def finish_backward(self) -> None:
        """Give the optimizer's parameters this replica's rows of the gradients."""
        for axis, members in self._split_gradients:
            all_reduce_in_place([p.grad for p in members if p.grad is not None], axis)
        for dtensor, parameter in self._pairs:
            gradient = dtensor.grad
            # clear dtensor.grad, or the next step would add to this step's gradient
            parameter.grad = gradient.to_local() if isinstance(gradient, DTensor) else None
            dtensor.grad = None

    def refresh(self) -> None:
        """Free gathered weights, which are outdated after the update."""
        self.reshard()

    def reshard(self) -> None:
        """Free the weights gathered by an evaluation or by a step's micro-batches."""
        for group in groups(self.model):
            group.reshard()


@contextmanager
def without(switch: Callable[[bool], None]) -> Iterator[None]:
    """Switch ``switch`` off inside this context."""
    switch(False)
    try:
        yield
    finally:
        switch(True)


def device_mesh(mesh: Mesh, kind: str) -> DeviceMesh:
    """The replicas as a DeviceMesh for fully_shard: one row, or with hybrid sharding a row for each group."""
    shard = mesh.shard
    replicate = mesh.replicate
    ranks = mesh.dp.ranks
    if replicate.size == 1:
        return DeviceMesh.from_group(shard.group, kind)
    rows = [ranks[first : first + shard.size] for first in range(0, len(ranks), shard.size)]
    return DeviceMesh.from_group([replicate.group, shard.group], kind, rows, mesh_dim_names=("replicate", "shard"))


def split_modules(layer: nn.Module, home: Callable[[int], Mesh]) -> list[tuple[nn.Module, int]]:
    """Modules of a layer, such as experts, with weights that data-parallel ranks split, and the number of parts. Excludes modules
    if the ranks with the same part cannot divide the rows evenly. ``home``: Mesh.of_weights."""
    placed = dict(placements(layer))
    modules: dict[str, tuple[nn.Module, int]] = {}
    for path, module in layer.named_modules():
        split = [placement for name, placement in placed.items() if path and name.startswith(f"{path}.")]
        data_ranks = {placement.data_ranks for placement in split}
        if len(data_ranks) != 1 or data_ranks == {1} or any(path.startswith(f"{other}.") for other in modules):
            continue
        [ranks] = data_ranks
        mesh = home(ranks)
        # a part with fewer rows than ranks would be padded at every gather
        if mesh.shard.size > 1 and not any(placement.local(mesh.tp)[0] % mesh.shard.size for placement in split):
            modules[path] = module, ranks
    return list(modules.values())


def sharded(name: str, weight: Tensor, model: Stack, mesh: Mesh, data_rank: int) -> tuple[DTensor, ShardedParameter]:
    """A sharded weight, and this replica's initialised rows. ``mesh``: the mesh of the weight; ``data_rank``: this process's rank on the
    whole data axis."""
    assert isinstance(weight, DTensor)
    rows, *row = model.placements[name].local(mesh.tp)
    # the same memory, without DTensor's overhead on every operation
    rows_here = nn.Parameter(weight.to_local().detach(), weight.requires_grad)
    # fully_shard gives each rank ceil(rows / ranks) rows; the last ranks may get fewer or none
    size = rows * prod(row)
    per_rank = -(-rows // mesh.shard.size) * prod(row)

    def local_range(rank: int) -> tuple[int, int]:
        return min(rank * per_rank, size), min(per_rank, max(0, size - rank * per_rank))

    begin, _ = local_range(mesh.shard.rank)
    if name in model.init_specs:
        model.init_specs[name].fill(rows_here.detach().view(-1), begin, mesh.tp, data_rank)
    return weight, ShardedParameter(
        *(name, rows_here, model.placements[name], begin),
        replicas=mesh.replicate,
        local_range=local_range,
        holders=mesh.holders,
        data_rank=data_rank,
    )


def gather_ahead(model: Stack) -> None:
    """Prefetch the weights of each block, including its experts, while the block before it computes; in backward passes, while the
    block after it computes.

    By default, PyTorch prefetches only if the host is ahead of the device, and divided experts make the host wait.
    """
    rest: Any = model
    blocks = [layer for layer in model.layers.values() if isinstance(layer, FSDPModule)]
    for before, after in pairwise([rest, *blocks]):
        before.set_modules_to_forward_prefetch(list(groups(after)))
    for before, after in pairwise([*blocks, rest]):
        after.set_modules_to_backward_prefetch(list(groups(before)))


def groups(model: nn.Module) -> Iterator[FSDPModule]:
    """The FSDP groups of a model or layer: each block, the experts in it, and the rest of the model."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))
