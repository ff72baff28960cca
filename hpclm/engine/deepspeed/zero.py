"""ZeRO without a pipeline: optimizer state, gradients and weights sharded over the replicas."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from hpclm.config import RunConfig
from hpclm.config.deepspeed import settings, stage_of
from hpclm.data.batches import Batch
from hpclm.engine import StepResult, keep_going
from hpclm.engine.base import BaseEngine
from hpclm.engine.deepspeed import library
from hpclm.engine.deepspeed.state import PartitionedOptimizer, PartitionedWeights, Wrapped
from hpclm.engine.sharded_parameter import ShardedParameter, decay_groups
from hpclm.engine.step import Timers, mean_loss, seed_step, seeds, token_weights
from hpclm.model import gpt
from hpclm.model.init import materialize_on
from hpclm.model.loss import TokenLoss
from hpclm.model.stack import Stack, WrapLayer
from hpclm.optim.adamw import groups
from hpclm.optim.scaler import LossScale
from hpclm.parallel.collectives import all_reduce
from hpclm.parallel.mesh import Mesh


def stack(config: RunConfig, mesh: Mesh, dtype: torch.dtype, wrap: WrapLayer) -> Stack:
    """The whole model."""
    engine = config.engine
    model = Stack(
        config.model,
        gpt.layers(config.model, engine, dtype, config.seed, mesh.tp),
        dtype,
        mesh.tp,
        TokenLoss(engine.loss_chunk, compile=bool(engine.compile)),
        engine.recompute_every,
        wrap,
    )
    if engine.compile:
        model.compile_blocks(whole=False)  # its hooks break graphs
    return model


class ReplicatedEngine(BaseEngine):
    """Stage 0: nothing is sharded, and DeepSpeed all-reduces the gradients. Clipping and the update are ours, because
    DeepSpeed's do not skip non-finite steps at this stage."""

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype):
        library.begin(device)
        tree = settings(config, config.plan(mesh.world.size), library.NAMES[dtype], device.type == "cuda")
        model = stack(config, mesh, dtype, materialize_on(device, mesh.tp))
        self.engine = library.initialize(model=model, config=tree, mpu=library.MeshView(mesh))
        self.engine.enable_backward_allreduce = False  # gradients are reduced once per step
        weights = [ShardedParameter(name, p, model.placements[name], copies=mesh.dp) for name, p in model.weights()]
        super().__init__(config, mesh, device, model, weights, self.engine)
        self.engine.optimizer = self.optimizer

    def backward(self, loss: Tensor) -> None:
        """The backward pass of one micro-batch."""
        # a new tensor, because DeepSpeed's hook on its forward output divides by the number of micro-batches
        self.engine.backward(loss * 1.0, scale_wrt_gas=False)

    def finish_backward(self) -> None:
        """All-reduce the gradients over the replicas."""
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.allreduce_gradients(bucket_size=self.engine.zero_reduce_bucket_size())


class ZeroEngine(Wrapped):
    """Stages 1 to 3: DeepSpeed's ZeRO optimizer wraps ours, with fp32 weights and moments."""

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype):
        if config.engine.offload_folder:
            library.check_disks()
        library.begin(device)
        self.config, self.mesh, self.device = config, mesh, device
        tree = settings(config, config.plan(mesh.world.size), library.NAMES[dtype], device.type == "cuda")
        stage = stage_of(config)
        wrap = partition(tree, mesh, device, dtype) if stage == 3 else materialize_on(device, mesh.tp)
        self.model = stack(config, mesh, dtype, wrap)
        self.weights = tuple(ShardedParameter(name, p, self.model.placements[name]) for name, p in self.model.weights())
        library.mark_split(self.weights)
        decaying, others = decay_groups(self.weights, config.optim.decayed == "all")
        optimizer = library.optimizer(groups(decaying, others, config.optim), config.optim)
        held = [list(group["params"]) for group in optimizer.param_groups]
        self.engine = library.initialize(model=self.model, optimizer=optimizer, config=tree, mpu=library.MeshView(mesh))
        wrapper = self.engine.optimizer
        if stage == 3:
            self.state = PartitionedWeights(wrapper, optimizer, mesh.shard)
        else:
            self.state = PartitionedOptimizer(wrapper, optimizer, held, mesh.dp)
        self.timers = Timers(device, config.log.timers)
        self.scale = LossScale.first(config.scaler) if dtype == torch.float16 else None
        self.mean_over = (
            mesh.dp.size if stage == 3 else 1
        )  # DeepSpeed averages, rather than sums, over this many replicas

    def train_step(
        self, batches: Sequence[Batch], lr: float, step: int, between: Callable[[int], None] = keep_going
    ) -> StepResult:
        """Forward and backward over the micro-batches; DeepSpeed reduces, clips, updates, and skips what is not finite."""
        config, mesh, engine = self.config, self.mesh, self.engine
        scale = self.scale.value if self.scale else 1.0
        # what DeepSpeed divides by at the end: the backward pass must see no more than the scale, or fp16 overflows sooner
        divisor = scale / self.mean_over if self.scale else 1.0
        if self.scale:
            engine.optimizer.override_loss_scale(divisor)
        seed_step(config.seed, step, mesh.world.rank)
        engine.train()
        random = gpt.random(config.model)
        found = seeds(config.seed, step, len(batches), mesh.dp) if random else [None] * len(batches)
        weights = token_weights(batches, config.batch.loss_norm, mesh.dp)
        factor = scale if self.scale else float(self.mean_over)
        total = torch.zeros((), device=self.device)
        with torch.autograd.set_detect_anomaly(config.engine.anomaly, check_nan=self.scale is None):
            for number, (batch, weight, seed) in enumerate(zip(batches, weights, found, strict=True)):
                if number:
                    between(number)
                engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
                tokens, labels, _, positions, documents = batch
                with self.timers("forward"):
                    value = engine(tokens, positions, documents, labels, weight * factor, seed)
                with self.timers("backward"):
                    # the token weights include the scale already; DeepSpeed multiplies by what it will divide by
                    engine.backward(finite_or_nan(value) / divisor, scale_wrt_gas=False)
                total += value.detach() / factor
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        with self.timers("optimizer"):
            engine.step()
        return self.result(all_reduce(total, mesh.dp), scale, self.timers.take())

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss per token."""
        self.engine.eval()
        return mean_loss(self.engine, batches, self.device, self.mesh.dp)


def finite_or_nan(loss: Tensor) -> Tensor:
    """``loss``; if it is not finite, its gradients are NaN too, so that the step is skipped."""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)


def partition(tree: dict[str, Any], mesh: Mesh, device: torch.device, dtype: torch.dtype) -> WrapLayer:
    """Stage 3: shard each layer as soon as it is built; one layer at a time is whole."""
    shared: dict[str, Any] = {}  # shared by all layers: the NVMe swapper, and hpZ's process groups
    view, materialize = library.MeshView(mesh), materialize_on(device, mesh.tp)

    def wrap(name: str, layer: nn.Module) -> nn.Module:
        materialize(name, layer)
        for weight in layer.parameters():  # DeepSpeed shards a weight in the type that it has
            weight.data = weight.data.to(dtype)
        group = view.get_data_parallel_group()
        with library.refusals():
            made = deepspeed.zero.Init(
                module=layer, data_parallel_group=group, mpu=view, config_dict_or_path=tree, **shared
            )
        shared.update(param_swapper=made.param_swapper, zero_param_parallel_group=made.zero_param_process_group)
        return layer

    return wrap
