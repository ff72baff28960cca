"""FairScale's FullyShardedDataParallel: replicas share out weights, gradients and optimizer state (Xu et al. 2020).

Every block is a unit that is gathered for its forward and its backward pass, and the rest of the model is one more. Each
replica holds an equal run of every weight's values, filled up with zeros.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fairscale.internal import reduce_scatter_bucketer as buckets
from fairscale.nn import FullyShardedDataParallel
from fairscale.nn.data_parallel import fully_sharded_data_parallel as library
from fairscale.nn.data_parallel.fully_sharded_data_parallel import TrainingState
from torch import Tensor, nn

from hpclm.config import RunConfig
from hpclm.engine.held import Held, gather_parts, own_part
from hpclm.engine.native import replicate
from hpclm.engine.plain import PlainEngine, whole_model
from hpclm.engine.step import Replica
from hpclm.model.draw import Initial, move, on
from hpclm.model.stack import Stack
from hpclm.parallel.collectives import gather_into, scatter_into
from hpclm.parallel.form import Form
from hpclm.parallel.mesh import Axis, Mesh

BACKWARD = (TrainingState.BACKWARD_PRE, TrainingState.BACKWARD_POST)


class FairScaleEngine(PlainEngine):
    """Stage 3 keeps a block's weights only while it computes; stage 2 keeps them from its forward to its backward pass."""

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype):
        dp, engine = mesh.dp, config.engine
        if dp.size == 1:  # nobody to share with
            model = whole_model(config, mesh, dtype, on(device, mesh.tp))
            super().__init__(config, mesh, device, model, lambda stack: replicate(stack, dp, device, None))
            return
        modernise()
        if device.type == "cpu":
            without_streams()
        limit = timedelta(minutes=config.cluster.timeout_minutes)
        mixed = dtype != torch.float32
        shard = partial(
            Sharded,
            process_group=dp.group,
            # of its own, so that gradients are summed while the next block's weights are gathered
            process_group_reduce_scatter=dist.new_group(dp.ranks, limit, use_local_synchronization=True),
            reshard_after_forward=engine.zero_stage != 2,
            flatten_parameters=False,  # what is flattened has no shape: it could not be saved, nor decay as it should
            mixed_precision=mixed,
            compute_dtype=dtype,
            buffer_dtype=torch.float32,
            fp32_reduce_scatter=mixed and engine.gradients == "fp32",
            compute_device=device,
            **({} if engine.bucket_mb is None else {"bucket_cap_mb": engine.bucket_mb}),
        )
        weights: dict[str, nn.Parameter] = {}

        def place(name: str, layer: nn.Module) -> nn.Module:
            move(layer, device)
            weights.update((f"{name}.{own}", weight) for own, weight in layer.named_parameters())
            return shard(layer) if name.startswith("block") else layer

        model = whole_model(config, mesh, dtype, place)
        root = shard(Sealed(model))
        for name, initial in model.initial.items():
            fill(weights[name], initial, mesh, device)
        root.set_gradient_divide_factors(1.0, 1.0, recursive=True)
        super().__init__(config, mesh, device, model, lambda stack: sharded(root, weights, stack.forms, mesh))


class Sharded(FullyShardedDataParallel):
    """A unit that knows a recomputation from a forward pass."""

    params: list[Any]  # parameters with notes of the library's on them

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module that it holds."""
        if self.training_state not in BACKWARD:
            return super().forward(*args, **kwargs)
        done = [weight for weight in self.params if weight.shape != weight._orig_size]
        self._gather(done)  # those whose gradients are on their way already, as may be those of biases
        try:
            return self.module(*args, **kwargs)
        finally:  # the others stay for the backward pass, which comes now
            self._use_fp32_param_shard(done)

    def _gather(self, weights: list[Any]) -> None:
        """Gather some of the weights; the others are there."""
        if weights:
            everything, self.params = self.params, weights
            self.has_full_params = False
            self._rebuild_full_params()
            self.params = everything


@dataclass(frozen=True)
class Inputs:
    """What the stack is given; as a value, of which the library does not cast the tensors to fp16."""

    args: tuple[Any, ...]


class Sealed(nn.Module):
    """A stack that takes Inputs."""

    def __init__(self, stack: Stack):
        super().__init__()
        self.stack = stack

    def forward(self, inputs: Inputs) -> Any:
        """As the stack."""
        return self.stack(*inputs.args)


def sharded(root: Sharded, weights: dict[str, nn.Parameter], forms: dict[str, Form], mesh: Mesh) -> Replica:
    """The model in ``root`` as one of the replicas that share its ``weights`` out."""

    def held(name: str, weight: nn.Parameter) -> Held:
        shape = forms[name].local(mesh.tp)
        return Held(name, weight, forms[name], partial(whole, shape=shape, dp=mesh.dp), partial(part, dp=mesh.dp))

    def finish() -> None:
        for weight in weights.values():  # what it notes there would live on, and get one more hook every step
            vars(weight).pop("_shard_bwd_hook")

    def rest() -> None:
        for unit in units(root):
            unit._free_full_params()

    all_held = tuple(held(*pair) for pair in weights.items())
    return Replica(lambda *args: root(Inputs(args)), all_held, sharded=True, finish=finish, rest=rest)


def fill(weight: nn.Parameter, initial: Initial, mesh: Mesh, device: torch.device) -> None:
    """Give a weight, of which this replica's run is a shape only, memory on ``device`` and its first values."""
    run, count = torch.zeros(weight.shape, device=device), prod(initial.form.local(mesh.tp))
    begin = mesh.dp.rank * len(run)
    initial.fill(run[: max(0, count - begin)], begin, mesh.tp)
    there = nn.Parameter(run)
    vars(there).update(vars(weight))  # what the library notes there
    torch.utils.swap_tensors(weight, there)


def whole(run: Tensor, shape: tuple[int, ...], dp: Axis) -> Tensor:
    """This replica's run of a weight's values -> the weight."""
    return gather_parts(run, prod(shape), dp).view(shape)


def part(weight: Tensor, dp: Axis) -> Tensor:
    """A weight -> this replica's run of its values, filled up with zeros to the length of the others'."""
    run = own_part(weight.flatten(), dp)
    return F.pad(run, (0, -(-weight.numel() // dp.size) - len(run)))


def units(root: nn.Module) -> Iterator[Sharded]:
    """What is gathered together: each block, and the rest."""
    return (module for module in root.modules() if isinstance(module, Sharded))


class Names:
    """A module, with some of its names standing for something else."""

    def __init__(self, module: ModuleType, **others: Any):
        self.module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


@cache
def modernise() -> None:
    """Let the library, whose last release is of 2022, call what PyTorch has today: in its own modules, for nobody else."""

    def gather(out: Tensor, x: Tensor, group: Any) -> None:
        gather_into(out, x, group=group)

    def scatter(out: Tensor, x: Tensor, group: Any) -> None:
        scatter_into(out, x.flatten(), group=group)

    library.dist = buckets.dist = Names(dist, _all_gather_base=gather, _reduce_scatter_base=scatter)
    with warnings.catch_warnings():  # PyTorch says this once, to whoever is first; the library cannot do without
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
        torch.empty(0).storage().size()


class NoStream(torch.Stream):
    """The order in which a CPU does things, for a library that asks for streams."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""


@cache
def without_streams() -> torch.library.Library:
    """Let the library compute on a CPU: what it sees of torch.cuda has one stream, which is no stream."""
    stream = NoStream(device="cpu")
    cuda = SimpleNamespace(
        is_available=lambda: True,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda entered: entered,
        synchronize=lambda: None,
    )
    library.torch = Names(torch, cuda=cuda)
    kernels = torch.library.Library("aten", "IMPL")  # for as long as it is held
    kernels.impl("record_stream", lambda tensor, stream: None, "CPU")
    return kernels
