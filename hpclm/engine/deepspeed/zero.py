"""ZeRO without a pipeline: optimizer state, gradients and weights sharded over the replicas."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn

from hpclm.config import EngineSettings
from hpclm.config.deepspeed import json_settings, stage_of
from hpclm.engine import StepResult
from hpclm.engine.base import BaseEngine
from hpclm.engine.deepspeed import library
from hpclm.engine.deepspeed.state import PartitionedOptimizer, PartitionedState, PartitionedWeights
from hpclm.engine.models import whole_model
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.engine.step import StepInputs
from hpclm.model.init import materialize_on
from hpclm.model.own_block import is_own, use_every_weight
from hpclm.model.spec import LayerSpec
from hpclm.model.stack import Stack, WrapLayer
from hpclm.parallel.mesh import SINGLE, Compute


def stack(config: EngineSettings, compute: Compute, wrap: WrapLayer) -> Stack:
    """The whole model, prepared for DeepSpeed's hooks."""
    engine = config.engine
    model = whole_model(config, compute, wrap, backward="once")
    if stage_of(engine) == 3:
        blocks = set(model.blocks)
        for name, layer in model.layers.items():
            # gather all weights of a block before it runs: hooks inside it would break its graph, and in a user's
            # block replicas may run different layers. From disk, weights are gathered a few at a time.
            if is_own(layer) or (engine.compile and name in blocks and not engine.offload_folder):
                set_z3_leaf_module(layer, True)
    if engine.compile:
        model.compile_blocks(whole=False)  # DeepSpeed's hooks break graphs
    return model


def place_on(compute: Compute) -> WrapLayer:
    """A function that places and initialises a layer on the device."""
    materialize = materialize_on(compute.device, compute.mesh.tp)

    def wrap(spec: LayerSpec, layer: nn.Module) -> nn.Module:
        use_every_weight(layer)
        return materialize(spec, layer)

    return wrap


class ReplicatedEngine(BaseEngine):
    """ZeRO stage 0: nothing is sharded, and DeepSpeed all-reduces the gradients. hpclm clips and updates, because DeepSpeed does not
    skip non-finite steps at this stage."""

    def __init__(self, config: EngineSettings, compute: Compute):
        mesh = compute.mesh
        device = compute.device
        library.begin(device)
        tree = json_settings(config, library.NAMES[compute.dtype])
        model = stack(config, compute, place_on(compute))
        self.engine = library.initialize(model=model, config=tree, mpu=library.MeshView(mesh))
        self.engine.enable_backward_allreduce = False  # gradients are reduced once per step
        weights = [ShardedParameter(name, p, model.placements[name], replicas=mesh.dp) for name, p in model.weights()]
        super().__init__(config, compute, model, weights, self.engine)
        self.engine.optimizer = self.optimizer

    def close(self) -> None:
        """Remove DeepSpeed's hooks from the model."""
        library.destroy(self.engine)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of one micro-batch."""
        # a new tensor, because DeepSpeed's hook on its forward output divides by the number of micro-batches
        self.engine.backward(loss * 1.0, scale_wrt_gas=False)

    def finish_backward(self) -> None:
        """All-reduce the gradients over the replicas."""
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.allreduce_gradients(bucket_size=self.engine.zero_reduce_bucket_size())


class WrappedEngine(BaseEngine):
    """DeepSpeed updates: its ZeRO optimizer wraps ours, reduces, clips, and skips steps that are not finite."""

    engine: Any
    state: PartitionedState

    def close(self) -> None:
        """Remove DeepSpeed's hooks from the model."""
        library.destroy(self.engine)

    def update(self, loss: Tensor, scale: float) -> dict[str, Tensor | float]:
        """DeepSpeed's update, after which the host knows the norm and any overflow."""
        self.engine.step()
        return self.outcome()

    def outcome(self) -> dict[str, Tensor | float]:
        """grad_norm and skipped of DeepSpeed's last step."""
        norm = self.engine.get_global_grad_norm()  # a CPU tensor if the optimizer is offloaded
        if isinstance(norm, Tensor):
            norm = norm.to(self.engine.device)
        return {"grad_norm": norm, "skipped": float(self.engine.optimizer.overflow)}

    def refresh(self) -> None:
        """Copy the fp32 weights into the model, if they have changed outside an update."""
        self.state.publish()

    def overflowed(self, result: StepResult) -> bool:
        """Whether DeepSpeed skipped the step; known on the host."""
        return bool(self.engine.optimizer.overflow)


class ZeroEngine(WrappedEngine):
    """ZeRO stages 1 to 3."""

    def __init__(self, config: EngineSettings, compute: Compute):
        if config.engine.offload_folder:
            library.check_disks()
        mesh = compute.mesh
        device = compute.device
        library.begin(device)
        tree = json_settings(config, library.NAMES[compute.dtype])
        stage = stage_of(config.engine)
        wrap = partition(tree, compute) if stage == 3 else place_on(compute)
        model = stack(config, compute, wrap)
        weights = [
            ShardedParameter(
                name, p, model.placements[name], replicas=SINGLE if p.requires_grad or stage == 3 else mesh.dp
            )
            for name, p in model.weights()
        ]
        library.mark_split(weights)
        super().__init__(config, compute, model, weights)
        optimizer = self.optimizer
        optim = config.optim
        group_weights = [list(group["params"]) for group in optimizer.param_groups]
        self.engine = library.initialize(model=model, optimizer=optimizer, config=tree, mpu=library.MeshView(mesh))
        self.forward = self.engine
        wrapper = self.engine.optimizer
        if stage == 3:
            self.state = PartitionedWeights(wrapper, optimizer, optim, mesh.shard)
        else:
            self.state = PartitionedOptimizer(wrapper, optimizer, optim, group_weights, mesh.dp)
        self.mean_over = mesh.dp.size if stage == 3 else 1
        """Number of replicas over which DeepSpeed averages gradients instead of summing them."""
        self.divisor = 1.0

    def settle(self) -> None:
        """Free gathered weights."""
        if isinstance(self.state, PartitionedWeights):
            self.state.wrapper.parameter_offload.partition_all_parameters()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside this context, backward passes accumulate gradients; DeepSpeed reduces them as its stage requires."""
        self.engine.set_gradient_accumulation_boundary(False)
        yield
        self.engine.set_gradient_accumulation_boundary(True)

    def loss_factor(self, scale: float) -> float:
        """DeepSpeed's divisor of gradients. In fp16, the loss scale: a larger factor would overflow sooner."""
        if self.scale:
            return scale
        return float(self.mean_over)

    def forward_backward(self, inputs: StepInputs) -> Tensor:
        """Give DeepSpeed the factor of the gradients; then see BaseEngine.forward_backward."""
        self.engine.set_gradient_accumulation_boundary(True)
        if self.scale:
            self.divisor = inputs.factor / self.mean_over
            self.engine.optimizer.override_loss_scale(self.divisor)
        return super().forward_backward(inputs)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of one micro-batch, multiplied by the factor that DeepSpeed divides by later."""
        self.engine.backward(finite_or_nan(loss) / self.divisor, scale_wrt_gas=False)

    def finish_backward(self) -> None:
        """DeepSpeed reduces gradients during the backward pass and the update."""


def finite_or_nan(loss: Tensor) -> Tensor:
    """``loss`` unchanged, but with NaN gradients if it is not finite, so that the step is skipped."""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)


def partition(tree: dict[str, Any], compute: Compute) -> WrapLayer:
    """ZeRO stage 3: shard each layer as soon as it is built, so that only one layer at a time is whole."""
    shared: dict[str, Any] = {}  # shared by all layers: the NVMe swapper and hpZ's process groups
    mesh = compute.mesh
    view = library.MeshView(mesh)
    group = library.group(mesh.dp)
    materialize = materialize_on(compute.device, mesh.tp)

    def wrap(spec: LayerSpec, layer: nn.Module) -> nn.Module:
        materialize(spec, layer)
        for weight in layer.parameters():  # DeepSpeed keeps the type of a weight when it shards it
            if weight.requires_grad:  # the only values of frozen weights, in fp32
                weight.data = weight.data.to(compute.dtype)
        with library.refusals():
            initialized = deepspeed.zero.Init(
                module=layer, data_parallel_group=group, mpu=view, config_dict_or_path=tree, **shared
            )
        # otherwise DeepSpeed would create a swapper with its buffers, and process groups, for every layer
        shared.update(
            param_swapper=initialized.param_swapper, zero_param_parallel_group=initialized.zero_param_process_group
        )
        return layer

    return wrap
