"""FairScale's FullyShardedDataParallel: weights, gradients and optimizer state are sharded over the replicas (Xu et al. 2020).

Each block is one FSDP unit, gathered for its forward and its backward pass; the rest of the model is another unit. Each
replica holds an equal slice of every flattened weight, padded with zeros.
"""

import warnings
from collections.abc import Iterator
from functools import cache, partial
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fairscale.internal import reduce_scatter_bucketer as buckets
from fairscale.nn import FullyShardedDataParallel
from fairscale.nn.data_parallel import fully_sharded_data_parallel as library
from fairscale.nn.data_parallel.fully_sharded_data_parallel import TrainingState
from torch import Tensor, nn

from hpclm.config import EngineSettings
from hpclm.engine.base import BaseEngine
from hpclm.engine.models import whole_model
from hpclm.engine.native import NativeEngine
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.model.init import InitSpec, move
from hpclm.model.own_block import use_every_weight
from hpclm.model.spec import LayerSpec
from hpclm.parallel.collectives import gather_into, scatter_into
from hpclm.parallel.mesh import Compute, Mesh
from hpclm.parallel.placement import Placement

BACKWARD = (TrainingState.BACKWARD_PRE, TrainingState.BACKWARD_POST)


def build(config: EngineSettings, compute: Compute) -> BaseEngine:
    """The engine named fairscale; with one replica, the native engine."""
    if compute.mesh.dp.size > 1:
        return FairScaleEngine(config, compute)
    return NativeEngine(config, compute)


class FairScaleEngine(BaseEngine):
    """Stage 3 reshards a block's weights after each use; stage 2 keeps them gathered from its forward to its backward pass."""

    sharded = True

    def __init__(self, config: EngineSettings, compute: Compute):
        mesh = compute.mesh
        device = compute.device
        dtype = compute.dtype
        dp = mesh.dp
        engine = config.engine
        modernise()
        if device.type == "cpu":
            without_streams()
        mixed = dtype != torch.float32
        bucket_size = {}
        if engine.bucket_mb is not None:
            bucket_size["bucket_cap_mb"] = engine.bucket_mb
        shard = partial(
            Sharded,
            process_group=dp.group,
            # a separate group, so that gradients are summed while the next block's weights are gathered
            process_group_reduce_scatter=dp.options.new_group(dp.ranks),
            reshard_after_forward=engine.zero_stage != 2,
            flatten_parameters=False,  # flattened weights lose their shapes, which checkpoints and weight decay need
            mixed_precision=mixed,
            compute_dtype=dtype,
            # otherwise the library would round sinusoidal positions to the compute type
            buffer_dtype=torch.float32,
            fp32_reduce_scatter=mixed and engine.gradients == "fp32",
            compute_device=device,
            **bucket_size,
        )
        weights: dict[str, nn.Parameter] = {}

        def wrap(spec: LayerSpec, layer: nn.Module) -> nn.Module:
            use_every_weight(layer)
            move(layer, device)
            weights.update((f"{spec.name}.{weight_name}", weight) for weight_name, weight in layer.named_parameters())
            return shard(layer) if spec.layer else layer

        model = whole_model(config, compute, wrap)
        self.root = shard(model)
        for name, initial in model.init_specs.items():
            fill(weights[name], initial, compute)
        # the token weights divide by the tokens of the whole step; the library would divide by the replicas again
        self.root.set_gradient_divide_factors(1.0, 1.0, recursive=True)
        shards = [sharded(*pair, model.placements, mesh) for pair in weights.items()]
        super().__init__(config, compute, model, shards, self.root)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of one micro-batch."""
        super().backward(loss)
        # the library frees the root's weights as they get gradients, so frozen ones would stay gathered, in place of their slices
        frozen = [weight for weight in self.root.params if not weight.requires_grad]
        self.root._free_full_params(frozen)
        self.root._use_fp32_param_shard(frozen)

    def finish_backward(self) -> None:
        """Remove the hooks that the library leaves on the weights; otherwise every step adds one more."""
        for weight in self.trained:
            vars(weight.parameter).pop("_shard_bwd_hook")

    def reshard(self) -> None:
        """Free the weights gathered by an evaluation."""
        for unit in units(self.root):
            unit._free_full_params()


class Sharded(FullyShardedDataParallel):
    """An FSDP unit that keeps its weights gathered while the backward pass recomputes its forward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        if self.training_state in BACKWARD:
            return self.module(*args, **kwargs)
        return super().forward(*args, **kwargs)


def sharded(name: str, weight: nn.Parameter, placements: dict[str, Placement], mesh: Mesh) -> ShardedParameter:
    """A weight with this replica's slice of its flattened values."""
    begin = mesh.dp.rank * len(weight)
    count = prod(placements[name].local(mesh.tp))
    return ShardedParameter(name, weight, placements[name], begin, min(max(0, count - begin), len(weight)))


def fill(weight: nn.Parameter, initial: InitSpec, compute: Compute) -> None:
    """Allocate this replica's slice of a weight on the device (it is on the meta device) and initialise it."""
    mesh = compute.mesh
    run = torch.zeros(weight.shape, device=compute.device)
    count = prod(initial.placement.local(mesh.tp))
    begin = mesh.dp.rank * len(run)
    initial.fill(run[: max(0, count - begin)], begin, mesh.tp)
    filled = nn.Parameter(run, weight.requires_grad)
    vars(filled).update(vars(weight))  # attributes that the library has set
    # the library keeps the object ``weight`` in its lists, so swap its content rather than the object
    torch.utils.swap_tensors(weight, filled)


def units(root: nn.Module) -> Iterator[Sharded]:
    """The FSDP units: each block, and the rest of the model."""
    return (module for module in root.modules() if isinstance(module, Sharded))


class PatchedModule:
    """A module with some of its names replaced."""

    def __init__(self, module: ModuleType, **others: Any):
        self.module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


@cache
def modernise() -> None:
    """Map the collectives called by the library (last released in 2022) to current PyTorch ones, inside its modules only."""

    def gather(out: Tensor, x: Tensor, group: Any) -> None:
        gather_into(out, x, group=group)

    def scatter(out: Tensor, x: Tensor, group: Any) -> None:
        scatter_into(out, x.flatten(), group=group)

    # only in the library's modules: the rest of the process sees PyTorch unchanged
    library.dist = buckets.dist = PatchedModule(dist, _all_gather_base=gather, _reduce_scatter_base=scatter)
    with warnings.catch_warnings():  # PyTorch warns once per process; the library cannot avoid the call
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
        torch.empty(0).storage().size()


class NoStream(torch.Stream):
    """A no-op CUDA stream for CPUs, where operations are ordered anyway."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""


@cache
def without_streams() -> torch.library.Library:
    """Let the library run on a CPU: inside it, torch.cuda has a single no-op stream."""
    stream = NoStream(device="cpu")
    cuda = SimpleNamespace(
        is_available=lambda: True,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda entered: entered,
        synchronize=lambda: None,
    )
    library.torch = PatchedModule(torch, cuda=cuda)
    kernels = torch.library.Library("aten", "IMPL")  # active as long as this object lives
    kernels.impl("record_stream", lambda tensor, stream: None, "CPU")
    return kernels
