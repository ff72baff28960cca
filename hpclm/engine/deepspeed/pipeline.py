"""DeepSpeed's pipeline: 1F1B over stages, each with ZeRO-1 among its replicas.

Every process of a stage reads its replica's micro-batches itself, so only activations [t, B, C] and their gradients are sent.
"""

import contextlib
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.pipe import LayerSpec as DeepSpeedLayer
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from hpclm.base.errors import ConfigError
from hpclm.config import EngineSettings
from hpclm.config.deepspeed import json_settings
from hpclm.engine.deepspeed import library
from hpclm.engine.deepspeed.state import PartitionedOptimizer
from hpclm.engine.deepspeed.zero import WrappedEngine, finite_or_nan, place_on
from hpclm.engine.models import layers_of, stack_of
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.engine.stages import owners, stages
from hpclm.engine.step import StepInputs
from hpclm.model.spec import LayerSpec
from hpclm.model.stack import Stack
from hpclm.parallel.collectives import all_reduce, all_reduce_max
from hpclm.parallel.mesh import SINGLE, Compute, Mesh
from hpclm.parallel.micro_batch import MicroBatch, add


class Part(nn.Module):
    """The layers of one stage, as DeepSpeed's pipeline calls them."""

    def __init__(self, stack: Stack):
        super().__init__()
        self.stack = stack
        self.queue: Iterator[MicroBatch] = iter(())
        """The upcoming micro-batches, queued here because DeepSpeed passes only tensors between stages."""
        self.reported: dict[str, Tensor] = {}
        """Values reported by layers and loss since the last reset."""
        self.factor = 1.0
        """Factor on the loss, in addition to the token weights."""

    def forward(self, x: Tensor) -> Any:
        """[B, T] ids or [t, B, C] activations of the next micro-batch -> activations, or in the last stage the loss."""
        y, scalars = self.stack(next(self.queue), x if x.is_floating_point() else None)
        add(self.reported, scalars)
        if y.ndim:
            return y
        return finite_or_nan(y) * self.factor


class Pipeline(PipelineModule):
    """DeepSpeed's pipeline with one layer for each of hpclm's stages."""

    def __init__(self, stack: Stack, parts: Sequence[Sequence[LayerSpec]], mesh: Mesh):
        """``stack``: this process's stage, the only one that DeepSpeed builds. ``parts``: the layers of all stages."""
        shared = [name for name, members in owners(parts).items() if len(members) > 1]
        weights = [
            f"stack.layers.{name}.{weight}"
            for name in shared
            if name in stack.layers
            for weight, _ in stack.layers[name].named_parameters()
        ]
        layers = []
        for part in parts:
            if any(spec.name in shared for spec in part):
                layers.append(TiedLayerSpec("shared", Part, stack, tied_weight_attr=weights))
            else:
                layers.append(DeepSpeedLayer(Part, stack))
        topology = PipeModelDataParallelTopology(mesh.pp.size, mesh.tp.size, mesh.dp.size)
        with contextlib.redirect_stdout(io.StringIO()):
            # one layer for each stage, so "uniform" keeps our division
            super().__init__(layers, topology=topology, partition_method="uniform")

    def get_tied_weights_and_groups(self) -> list[tuple[Any, Any]]:
        """The weights that several stages share, for DeepSpeed to sum their gradients.

        If gradients are accumulated in another type, DeepSpeed keeps them in `grad_accum`, but sums only `grad`.
        """
        tied = [
            (getattr(weight, "grad_accum", None), weight, group)
            for weight, group in super().get_tied_weights_and_groups()
            if weight.requires_grad
        ]
        return [(weight if kept is None else SimpleNamespace(grad=kept), group) for kept, weight, group in tied]


class PipelineEngine(WrappedEngine):
    """One stage of a pipeline. A step cannot be abandoned, because the stages work on different micro-batches."""

    backward_timer = "forward_backward"

    def __init__(self, config: EngineSettings, compute: Compute):
        mesh = compute.mesh
        device = compute.device
        dtype = compute.dtype
        library.begin(device)
        specs = layers_of(config, compute)
        parts = stages(config, specs)
        model = stack_of(config, compute, parts[mesh.pp.rank], place_on(compute))
        if config.engine.compile:
            model.compile_blocks(whole=False)  # DeepSpeed's hooks break graphs
        first = {name: holders[0] for name, holders in owners(parts).items() if mesh.pp.rank in holders}
        weights = [
            ShardedParameter(
                name,
                p,
                model.placements[name],
                replicas=SINGLE if p.requires_grad else mesh.dp,
                duplicate=first[name.split(".")[0]] != mesh.pp.rank,
            )
            for name, p in model.weights()
        ]
        library.mark_split(weights)
        super().__init__(config, compute, model, weights)
        pipeline = Pipeline(model, parts, mesh)
        self.part: Any = pipeline.forward_funcs[0]
        for weight in weights:
            weight.parameter.ds_pipe_replicated = weight.duplicate  # type: ignore[attr-defined]  # the norm counts it once
        optimizer = self.optimizer
        equalize_groups(optimizer, compute)
        group_weights = [list(group["params"]) for group in optimizer.param_groups]
        tree = json_settings(config, library.NAMES[dtype])
        self.engine = library.initialize(model=pipeline, optimizer=optimizer, config=tree)
        self.state = PartitionedOptimizer(self.engine.optimizer, optimizer, config.optim, group_weights, mesh.dp)

    def forward_backward(self, inputs: StepInputs) -> Tensor:
        """Run all micro-batches through all stages and update the weights.

        DeepSpeed reduces and clips the gradients, and skips steps that are not finite.
        """
        engine = self.engine
        count = len(inputs.batches)
        factor = inputs.factor
        if self.scale:
            engine.optimizer.override_loss_scale(factor)
        # a batch ramp-up changes the number of micro-batches, which DeepSpeed reads from its settings only once
        if count != engine.micro_batches:
            engine.set_train_batch_size(count * self.config.plan.micro_size * self.mesh.dp.size)
        # DeepSpeed averages over micro-batches; in fp16 the token weights already include the loss scale
        self.part.queue = iter(inputs.batches)
        self.part.reported = self.reported
        self.part.factor = count / factor
        with self.timers(self.backward_timer):
            loss = engine.train_batch(ids(inputs.batches))
        return loss.double()  # the same mean on every replica; the sum over replicas is the sum of the weighted losses

    def finish_backward(self) -> None:
        """Nothing to do: train_batch has reduced the gradients."""

    def update(self, loss: Tensor, scale: float) -> dict[str, Tensor | float]:
        """Returns the outcome; train_batch has updated the weights."""
        return self.outcome()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], alone: bool = False) -> float | None:
        """See Engine.evaluate; holds one micro-batch per stage, so that every stage is busy."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.part.factor = 1.0
        for _, alike in groupby(batches, lambda batch: batch.tokens.shape):
            # DeepSpeed sends the shape of activations only before the first batch, so a new shape needs a reset
            self.engine.reset_activation_shape()
            while some := list(islice(alike, self.mesh.pp.size)):
                masks = [batch.mask() for batch in some]
                self.part.queue = iter([batch.weighted(mask) for batch, mask in zip(some, masks, strict=True)])
                losses = self.engine.eval_batch(
                    ids(some), reduce_output=None, bcast_loss=False, num_micro_batches=len(some)
                )
                if self.mesh.pp.last:
                    shares = [
                        torch.stack([x.double(), m.sum(dtype=torch.float64)])
                        for x, m in zip(losses, masks, strict=True)
                    ]
                    sums += torch.stack(shares).sum(0)
        self.engine.reset_activation_shape()
        axis = self.mesh.pp if alone else self.mesh.world
        total, counted = all_reduce(sums, axis).tolist()
        return total / counted if counted else None


def equalize_groups(optimizer: torch.optim.Optimizer, compute: Compute) -> None:
    """Split groups of weights until all stages have equally many: DeepSpeed's gradient norm is a collective for each group."""
    groups = optimizer.param_groups
    counts = torch.tensor([float(len(groups))], device=compute.device)
    count = int(all_reduce_max(counts, compute.mesh.pp).item())
    while len(groups) < count:
        widest = max(groups, key=lambda group: len(group["params"]))
        half = len(widest["params"]) // 2
        if not half:
            raise ConfigError(
                f"optim.groups makes {count} groups of weights on one stage, but another stage has {len(groups)} weights; lower parallel.pipeline"
            )
        groups.append({**widest, "params": widest["params"][half:]})
        widest["params"] = widest["params"][:half]


def ids(batches: Sequence[MicroBatch]) -> Iterator[tuple[Tensor, None]]:
    """The inputs of the first stage; the last stage takes the labels from its queue."""
    return ((batch.tokens, None) for batch in batches)
