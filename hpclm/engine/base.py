"""Base engine with our own backward pass and optimizer. Subclasses override how the model is wrapped and gradients reduced."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hpclm.config import RunConfig
from hpclm.config.model import BLOCKS
from hpclm.data.batches import Batch
from hpclm.engine import DeviceResult, SavedState, Shard, StepResult, keep_going
from hpclm.engine.sharded_parameter import ShardedParameter, decay_groups
from hpclm.engine.sharing import Sharing
from hpclm.engine.step import StepInputs, Timers, gradient_norm, mean_loss, seed_step, seeds, token_weights
from hpclm.model import gpt
from hpclm.model.init import TensorParallelModule
from hpclm.model.loss import TokenLoss
from hpclm.model.stack import Stack, Stages, WrapLayer, check_shapes
from hpclm.optim.adamw import adamw, groups, reset_state, restore, steps_taken, update
from hpclm.optim.scaler import LossScale
from hpclm.parallel.collectives import all_reduce, all_reduce_buckets
from hpclm.parallel.mesh import Mesh

MOMENTS = ("exp_avg", "exp_avg_sq")


class BaseEngine:
    """One model and one optimizer per replica: fp32 weights and optimizer state, activations in the compute type."""

    sharded = False
    """Whether weights are sharded over the replicas."""
    backward_timer = "backward"
    """What log.timers counts the reduction of gradients to."""
    kept_gradients: Collection[nn.Parameter] = ()
    """Weights whose gradients keep their memory between steps."""

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        device: torch.device,
        model: Stack | Stages,
        weights: Sequence[ShardedParameter],
        forward: Callable[..., Tensor] | None = None,
    ):
        """``weights``: what the optimizer updates. ``forward``: as Stack.forward, if not the model itself is to be called."""
        self.forward: Callable[..., Tensor] = forward or model
        self.config, self.mesh, self.device, self.model = config, mesh, device, model
        self.weights = tuple(weights)
        decaying, others = decay_groups(self.weights, config.optim.decayed == "all")
        self.optimizer = adamw(groups(decaying, others, config.optim), config.optim)
        self.timers = Timers(device, config.log.timers)
        self.scale = LossScale.first(config.scaler) if model.dtype == torch.float16 else None

        self.summed_later = [w for w in self.weights if sums_later(model) and w.placement.dim is None]
        """Weights whose gradients are summed over the tensor-parallel ranks after the backward pass."""

    # hooks for subclasses

    def backward(self, loss: Tensor) -> None:
        """The backward pass of one micro-batch."""
        loss.backward()

    def no_sync(self) -> AbstractContextManager:
        """Inside this context, backward passes accumulate gradients locally, as DistributedDataParallel.no_sync does."""
        return nullcontext()

    def finish_backward(self) -> None:
        """After the last backward pass: finish reducing gradients over the replicas."""

    def gradient_norm(self) -> Tensor:
        """Global norm of the reduced gradients."""
        return gradient_norm(self.weights, self.mesh, self.sharded)

    def zero_grad(self) -> None:
        """Reset the gradients after a step; those that this engine adds to in place are zeroed in place."""
        for weight in self.weights:
            if weight.parameter not in self.kept_gradients:
                weight.parameter.grad = None
        kept = [weight.grad for weight in self.kept_gradients if weight.grad is not None]
        if kept:
            torch._foreach_zero_(kept)

    def refresh(self) -> None:
        """After the optimizer's weights have changed: update what the model computes with, if that is a copy."""

    def reshard(self) -> None:
        """After an evaluation: free weights that forward passes have gathered."""

    def forward_backward(self, inputs: StepInputs, factor: float) -> Tensor:
        """Run this replica's micro-batches; the sum of their weighted losses, a scalar in fp32.

        Gradients are scaled by ``factor``.
        """
        total = torch.zeros((), device=self.device)
        last = len(inputs.batches) - 1
        for number, (batch, weight, seed) in enumerate(zip(inputs.batches, inputs.weights, inputs.seeds, strict=True)):
            if number:
                inputs.between(number)
            with self.no_sync() if number < last else nullcontext():
                tokens, labels, _, positions, documents = batch
                with self.timers("forward"):
                    scaled = weight if factor == 1.0 else weight * factor
                    value = self.forward(tokens, positions, documents, labels, scaled, seed)
                with self.timers("backward"):
                    self.backward(value)
            total += value.detach() if factor == 1.0 else value.detach() / factor
        return total

    # shared implementation

    def train_step(
        self, batches: Sequence[Batch], lr: float, step: int, between: Callable[[int], None] = keep_going
    ) -> StepResult:
        """Forward and backward over the micro-batches, clip, update; skips the update if loss or gradients are not finite."""
        config, mesh = self.config, self.mesh
        scale = self.scale.value if self.scale else 1.0
        seed_step(config.seed, step, mesh.world.rank)
        self.model.train()
        random = gpt.random(config.model)
        found = seeds(config.seed, step, len(batches), mesh.dp) if random else [None] * len(batches)
        inputs = StepInputs(batches, token_weights(batches, config.batch.loss_norm, mesh.dp), found, between)
        # fp16 overflows are expected: the loss scale handles them
        with torch.autograd.set_detect_anomaly(config.engine.anomaly, check_nan=self.scale is None):
            loss = all_reduce(self.forward_backward(inputs, scale), mesh.dp)
            with self.timers(self.backward_timer):
                self.finish_backward()
                replicated = [w.parameter.grad for w in self.summed_later if w.parameter.grad is not None]
                all_reduce_buckets(replicated, mesh.tp)
        with self.timers("optimizer"):
            norm = self.gradient_norm()
            bad = (~torch.isfinite(norm + loss)).float()
            update(self.optimizer, lr, norm, config.optim.clip, scale, bad)
            self.refresh()
        self.zero_grad()
        result = DeviceResult(torch.stack([loss, norm / scale, bad]), scale, self.timers.take())
        if self.scale:  # the scale of the next step follows from this one's norm: fp16 waits for the device here
            self.scale = self.scale.after(not math.isfinite(result.grad_norm), config.scaler)
        return result

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss per token."""
        self.model.eval()
        loss = mean_loss(self.forward, batches, self.device, self.mesh.dp)
        self.reshard()
        return loss

    @cached_property
    def sharing(self) -> Sharing:
        """What this process saves and reads."""
        return Sharing.among(self.weights, self.mesh, self.config.checkpoint.file_mb)

    def tensors(self) -> Iterator[Shard]:
        """Weights, and Adam's moments if there are any yet."""
        for number, weight in enumerate(self.weights):
            yield from self.sharing.shards(number, f"model.{weight.name}", weight.parameter)
            state = self.optimizer.state.get(weight.parameter, {})
            for moment in MOMENTS:
                if moment in state:
                    yield from self.sharing.shards(number, f"optim.{moment}.{weight.name}", state[moment])

    def scalars(self) -> dict[str, Any]:
        """Adam's step count, and the loss scale."""
        return {"optimizer_steps": steps_taken(self.optimizer), "loss_scale": self.scale and asdict(self.scale)}

    @torch.no_grad()
    def load(self, saved: SavedState, scalars: dict[str, Any]) -> None:
        """Load a saved state."""
        given = {name.removeprefix("model."): shape for name, shape in saved.shapes().items() if name[:6] == "model."}
        elsewhere = given.keys() - self.model.placements.keys() if self.mesh.pp.size > 1 else set()
        check_shapes(self.model.placements, {name: shape for name, shape in given.items() if name not in elsewhere})
        steps = scalars["optimizer_steps"]
        for number, weight in enumerate(self.weights):
            own = weight.parameter
            self.sharing.load(number, f"model.{weight.name}", saved, own)
            if steps:
                moments = {moment: torch.empty_like(own) for moment in MOMENTS}
                for moment, values in moments.items():
                    self.sharing.load(number, f"optim.{moment}.{weight.name}", saved, values)
                restore(self.optimizer, own, moments, steps)
            else:
                reset_state(self.optimizer, own)
        self.refresh()
        if self.scale:
            self.scale = LossScale.of(scalars["loss_scale"], self.config.scaler)


def sum_later(model: Stack | Stages, config: RunConfig, mesh: Mesh, device: torch.device) -> None:
    """On GPUs, sum the gradients of norms and biases over the tensor-parallel ranks once a step and together, rather than six
    times in each block and micro-batch. On CPUs, where messages cost less, the order of the sums stays what it was."""
    if defers(device) and mesh.tp.size > 1 and config.model.block in BLOCKS:
        for module in model.modules():
            if isinstance(module, TensorParallelModule):
                module.sums_later = True


def defers(device: torch.device) -> bool:
    """Whether sums over tensor-parallel ranks wait for the end of the step on this device."""
    return device.type == "cuda"


def sums_later(model: Stack | Stages) -> bool:
    """Whether sum_later() has had an effect."""
    return any(isinstance(module, TensorParallelModule) and module.sums_later for module in model.modules())


def whole_model(config: RunConfig, mesh: Mesh, dtype: torch.dtype, wrap: WrapLayer) -> Stack:
    """The whole model; each layer is passed to ``wrap`` as it is built."""
    engine = config.engine
    specs = gpt.layers(config.model, engine, dtype, config.seed, mesh.tp)
    loss = TokenLoss(engine.loss_chunk, bool(engine.compile), backward="unscaled")
    offload = engine.offload_activations
    return Stack(config.model, specs, dtype, mesh.tp, loss, engine.recompute_every, wrap, offload)
