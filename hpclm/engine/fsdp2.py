"""PyTorch's fully_shard: replicas share out weights, gradients and optimizer state (ZeRO; Rajbhandari et al. 2020).

Every block is a group that is gathered for its forward and its backward pass, and the rest of the model (token table,
entry, last norm, output) is one more. What the optimizer sees are plain tensors: this replica's rows of each weight.
"""

from collections.abc import Iterator
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hpclm.config import RunConfig
from hpclm.engine.held import Held, gather_parts, own_part
from hpclm.engine.native import replicate
from hpclm.engine.plain import PlainEngine, whole_model
from hpclm.engine.step import Replica
from hpclm.model.draw import move, on
from hpclm.model.stack import Stack
from hpclm.parallel.mesh import Mesh


class FSDP2Engine(PlainEngine):
    """Stage 3 keeps a block's weights only while it computes; stage 2 keeps them from its forward to its backward pass."""

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype):
        dp, engine = mesh.dp, config.engine
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype,
            reduce_dtype=torch.float32 if engine.gradients == "fp32" else None,
            cast_forward_inputs=False,  # the weights of the tokens in the loss stay fp32
        )
        axis = DeviceMesh.from_group(dp.group, device.type) if dp.size > 1 else None
        shard = partial(fully_shard, mesh=axis, mp_policy=policy)

        def place(name: str, layer: nn.Module) -> nn.Module:
            move(layer, device)
            if name.startswith("block"):
                shard(layer, reshard_after_forward=engine.zero_stage != 2)
            return layer

        model = whole_model(config, mesh, dtype, place if axis else on(device, mesh.tp))
        if engine.compile:
            model.compile_blocks()
        if axis is None:  # nobody to share with
            super().__init__(config, mesh, device, model, lambda stack: replicate(stack, dp, device, None))
            return
        shard(model, reshard_after_forward=False)  # its backward pass begins with what its forward pass ends with
        move(model, device, make=True)
        for group in groups(model):
            group.set_gradient_divide_factor(1.0)
            group.set_force_sum_reduction_for_comms(True)
        super().__init__(config, mesh, device, model, lambda stack: sharded(stack, mesh))


def sharded(model: Stack, mesh: Mesh) -> Replica:
    """``model`` as one of the replicas that share its weights out, those it has only room for filled."""
    dp, pairs, held = mesh.dp, [], []
    for name, weight in model.weights():
        assert isinstance(weight, DTensor)
        rows, *row = model.forms[name].local(mesh.tp)
        own = nn.Parameter(weight.to_local().detach())  # the same memory, without DTensor's cost for each operation
        if name in model.initial:
            begin = dp.rank * -(-rows // dp.size) * prod(row)
            model.initial[name].fill(own.detach().view(-1), begin, mesh.tp)
        pairs.append((weight, own))
        held.append(
            Held(name, own, model.forms[name], partial(gather_parts, rows=rows, dp=dp), partial(own_part, dp=dp))
        )

    def finish() -> None:
        for weight, own in pairs:
            own.grad, weight.grad = local(weight.grad), None

    def rest() -> None:
        for group in groups(model):
            group.reshard()

    return Replica(model, tuple(held), sharded=True, finish=finish, rest=rest)


def local(gradient: Tensor | None) -> Tensor | None:
    """This replica's rows of a gradient."""
    return gradient.to_local() if isinstance(gradient, DTensor) else None


def groups(model: Stack) -> Iterator[FSDPModule]:
    """What is gathered together: each block, and the rest."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))
