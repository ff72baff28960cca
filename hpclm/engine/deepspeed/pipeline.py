"""DeepSpeed's pipeline: 1F1B over stages, each with ZeRO-1 among its replicas.

Every process of a stage reads its replica's micro-batches itself, so only activations [t, B, C] and their gradients are sent.
"""

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.pipe import LayerSpec as DeepSpeedLayer
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from hpclm.config import RunConfig
from hpclm.config.deepspeed import settings
from hpclm.data.batches import Batch
from hpclm.engine import StepResult, keep_going
from hpclm.engine.deepspeed import library
from hpclm.engine.deepspeed.state import PartitionedOptimizer, Wrapped
from hpclm.engine.deepspeed.zero import finite_or_nan
from hpclm.engine.sharded_parameter import ShardedParameter, decay_groups
from hpclm.engine.stages import owned_weights, owners, stages
from hpclm.engine.step import seed_step, seeds, token_weights
from hpclm.model import gpt
from hpclm.model.gpt import LayerSpec
from hpclm.model.init import materialize_on
from hpclm.model.loss import TokenLoss
from hpclm.model.stack import Stack
from hpclm.optim.adamw import groups
from hpclm.optim.scaler import LossScale
from hpclm.parallel.collectives import all_reduce
from hpclm.parallel.mesh import Mesh


class Part(nn.Module):
    """The layers of one stage, as DeepSpeed's pipeline calls them."""

    def __init__(self, stack: Stack):
        super().__init__()
        self.stack = stack
        self.queue: Iterator[tuple[Batch, Tensor, int | None]] = iter(())
        """The upcoming micro-batches, with their token weights and seeds."""
        self.factor = 1.0
        """Factor on the loss, beyond the token weights."""

    def forward(self, x: Tensor) -> Any:
        """[B, T] ids or [t, B, C] activations of the next micro-batch -> activations, or in the last stage the loss."""
        (_, labels, _, positions, documents), weights, seed = next(self.queue)
        y = self.stack(x, positions, documents, labels, weights, seed)
        return finite_or_nan(y) * self.factor if y.ndim == 0 else y


class Pipeline(PipelineModule):
    """DeepSpeed's pipeline, of which each of our stages is one layer."""

    def __init__(self, stack: Stack, parts: Sequence[Sequence[LayerSpec]], mesh: Mesh):
        """``stack``: this process's stage, which is the only one that DeepSpeed builds. ``parts``: the layers of all."""
        shared = [name for name, members in owners(parts).items() if len(members) > 1]
        weights = [
            f"stack.layers.{name}.{weight}" for name in shared if name in stack.layers for weight in named(stack, name)
        ]
        layers = [
            TiedLayerSpec("shared", Part, stack, tied_weight_attr=weights)
            if any(spec.name in shared for spec in part)
            else DeepSpeedLayer(Part, stack)
            for part in parts
        ]
        topology = PipeModelDataParallelTopology(mesh.pp.size, mesh.tp.size, mesh.dp.size)
        with contextlib.redirect_stdout(io.StringIO()):
            super().__init__(layers, topology=topology, partition_method="uniform")

    def get_tied_weights_and_groups(self) -> list[tuple[Any, Any]]:
        """Weights whose gradients are summed with those of other stages.

        If DeepSpeed accumulates gradients in another type, it keeps them in ``grad_accum`` but does not look for them there.
        """
        found = [
            (getattr(weight, "grad_accum", None), weight, group)
            for weight, group in super().get_tied_weights_and_groups()
        ]
        return [(weight if kept is None else SimpleNamespace(grad=kept), group) for kept, weight, group in found]


def named(stack: Stack, layer: str) -> list[str]:
    """The names of the weights in a layer."""
    return [name for name, _ in stack.layers[layer].named_parameters()]


class PipelineEngine(Wrapped):
    """One stage of a pipeline."""

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype):
        library.begin(device)
        self.config, self.mesh, self.device = config, mesh, device
        self.specs = gpt.layers(config.model, config.engine, dtype, config.seed, mesh.tp)
        parts = stages(config, self.specs, mesh, device, dtype)
        self.model = Stack(
            config.model,
            parts[mesh.pp.rank],
            dtype,
            mesh.tp,
            TokenLoss(config.engine.loss_chunk, compile=bool(config.engine.compile)),
            config.engine.recompute_every,
            wrap=materialize_on(device, mesh.tp),
        )
        if config.engine.compile:
            self.model.compile_blocks(whole=False)  # its hooks break graphs
        where = {name: found for name, found in owners(parts).items() if mesh.pp.rank in found}
        self.weights = tuple(
            ShardedParameter(
                name, p, self.model.placements[name], duplicate=where[name.split(".")[0]][0] != mesh.pp.rank
            )
            for name, p in self.model.weights()
        )
        library.mark_split(self.weights)
        pipeline = Pipeline(self.model, parts, mesh)
        self.part: Any = pipeline.forward_funcs[0]
        for weight in self.weights:
            weight.parameter.ds_pipe_replicated = weight.duplicate  # type: ignore[attr-defined]  # the norm counts it once
        self.plan = config.plan(mesh.world.size)
        decaying, others = decay_groups(self.weights, config.optim.decayed == "all")
        optimizer = library.optimizer(groups(decaying, others, config.optim), config.optim)
        held = [list(group["params"]) for group in optimizer.param_groups]
        self.engine = library.initialize(
            model=pipeline,
            optimizer=optimizer,
            config=settings(config, self.plan, library.NAMES[dtype], device.type == "cuda"),
        )
        self.state = PartitionedOptimizer(self.engine.optimizer, optimizer, held, mesh.dp)
        self.scale = LossScale.first(config.scaler) if dtype == torch.float16 else None

    def train_step(
        self, batches: Sequence[Batch], lr: float, step: int, between: Callable[[int], None] = keep_going
    ) -> StepResult:
        """All micro-batches through all stages; DeepSpeed reduces, clips, updates, and skips what is not finite.

        ``between`` is not called: the stages are never between the same two micro-batches.
        """
        config, mesh, engine, part = self.config, self.mesh, self.engine, self.part
        scale = self.scale.value if self.scale else 1.0
        if self.scale:
            engine.optimizer.override_loss_scale(scale)
        seed_step(config.seed, step, mesh.world.rank)
        count = len(batches)
        if count != engine.micro_batches:
            engine.set_train_batch_size(count * self.plan.micro_size * mesh.dp.size)
        random = gpt.random(config.model)
        found = seeds(config.seed, step, count, mesh.dp) if random else [None] * count
        # DeepSpeed averages over micro-batches; the token weights include the scale already, where fp16 needs it
        weights = [w * scale for w in token_weights(batches, config.batch.loss_norm, mesh.dp)]
        part.queue, part.factor = iter(zip(batches, weights, found, strict=True)), count / scale
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        with torch.autograd.set_detect_anomaly(config.engine.anomaly, check_nan=self.scale is None):
            loss = engine.train_batch(ids(batches))
        return self.result(
            loss.double() * mesh.dp.size, scale
        )  # DeepSpeed returns the mean over replicas of their contributions

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss per token; holds one micro-batch per stage, so that every stage is busy."""
        found = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.part.factor = 1.0
        for _, alike in groupby(batches, lambda batch: batch.tokens.shape):
            self.engine.reset_activation_shape()
            while some := list(islice(alike, self.mesh.pp.size)):
                masks = [torch.ones_like(b.labels) if b.loss_mask is None else b.loss_mask for b in some]
                self.part.queue = iter([(batch, mask.float(), None) for batch, mask in zip(some, masks, strict=True)])
                losses = self.engine.eval_batch(
                    ids(some), reduce_output=None, bcast_loss=False, num_micro_batches=len(some)
                )
                if self.mesh.pp.last:
                    shares = [torch.stack([x.double(), m.sum().double()]) for x, m in zip(losses, masks, strict=True)]
                    found += torch.stack(shares).sum(0)
        self.engine.reset_activation_shape()
        total, counted = all_reduce(found, self.mesh.world)
        return (total / counted.clamp(min=1)).item()

    def expected_weights(self, given: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The weights of this stage's layers, and any that belong to no layer."""
        return owned_weights(given, self.specs, self.model)


def ids(batches: Sequence[Batch]) -> Iterator[tuple[Tensor, None]]:
    """The inputs of the first stage; the last stage takes labels from its own queue."""
    return ((batch.tokens, None) for batch in batches)
