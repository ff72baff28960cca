"""PyTorch's pipelines (torch.distributed.pipelining): GPipe, 1F1B, interleaved 1F1B and the zero-bubble schedule.

Every process of a replica reads its own micro-batches, so only activations are sent: [t, B, C] from stage to stage, and
their gradients back. T tokens in a sequence, t = T / tp, B sequences in a micro-batch, C hidden width.
"""

from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from hpclm.config import RunConfig
from hpclm.engine.base import BaseEngine, sum_later
from hpclm.engine.counted_reduction import CountedReduction
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.engine.stages import stages
from hpclm.engine.step import StepInputs
from hpclm.errors import ConfigError
from hpclm.model import gpt
from hpclm.model.init import materialize_on
from hpclm.model.loss import TokenLoss
from hpclm.model.stack import Stack, Stages
from hpclm.parallel.collectives import all_reduce, all_reduce_buckets
from hpclm.parallel.mesh import ALONE, Axis, Mesh, sub_axis

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
SINGLE = ("gpipe", "1f1b")
"""Schedules that take one stage, not a list."""


class PipeliningEngine(BaseEngine):
    """One or more pipeline stages on each process; gradients are all-reduced over the replicas as the last backward passes run."""

    backward_timer = "forward_backward"  # of several micro-batches at a time

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype):
        engine = config.engine
        specs = gpt.layers(config.model, engine, dtype, config.seed, mesh.tp)
        parts = stages(config, specs, mesh, device, dtype)
        mine = range(mesh.pp.rank, len(parts), mesh.pp.size)
        stacks = [
            Stack(
                config.model,
                parts[index],
                dtype,
                mesh.tp,
                TokenLoss(engine.loss_chunk, backward="twice" if config.parallel.schedule == "zero_bubble" else "once"),
                engine.recompute_every,
                wrap=materialize_on(device, mesh.tp),
            )
            for index in mine
        ]
        for stack in stacks:
            sum_later(stack, config, mesh, device)
        self.pipeline = Pipeline(config, mesh, device, dict(zip(mine, stacks, strict=True)), len(parts))
        super().__init__(config, mesh, device, Stages(stacks), self.pipeline.weights, self.pipeline.evaluate)

    def forward_backward(self, inputs: StepInputs, factor: float) -> Tensor:
        """Run the micro-batches through all stages."""
        with self.timers(self.backward_timer):
            return self.pipeline.train(inputs, factor)

    def finish_backward(self) -> None:
        """All-reduce gradients over the copies of each weight."""
        self.pipeline.sum_gradients()


@dataclass
class Pipeline:
    """The stages of this process, by their number among all ``count``."""

    config: RunConfig
    mesh: Mesh
    device: torch.device
    stacks: dict[int, Stack]
    count: int
    weights: tuple[ShardedParameter, ...] = field(init=False)
    tied: nn.Parameter | None = field(init=False)
    """The tied embedding, if the first and the last stage each hold a copy."""

    ends: Axis = field(init=False)
    """The processes that hold the tied embedding."""

    def __post_init__(self) -> None:
        tie = self.config.model.tied and self.count > 1
        found = [(index, name, p) for index, stack in self.stacks.items() for name, p in stack.weights()]
        self.weights = tuple(
            ShardedParameter(
                name,
                p,
                self.stacks[index].placements[name],
                copies=self.mesh.dp,
                duplicate=tie and index > 0 and name == "tokens.weight",
            )
            for index, name, p in found
        )
        self.tied = next((p for _, name, p in found if tie and name == "tokens.weight"), None)
        limit = timedelta(minutes=self.config.cluster.timeout_minutes)
        self.ends = sub_axis(self.mesh.pp, [0, self.mesh.pp.size - 1], limit) if self.tied is not None else ALONE
        every = [weight.parameter for weight in self.weights]
        # the zero-bubble schedule adds gradients of weights outside of autograd, which calls no hooks
        late = every if self.config.parallel.schedule == "zero_bubble" else [p for p in every if p is self.tied]
        self.reduction = CountedReduction(every, self.mesh.dp, set(late))
        self.schedule = cache(self._schedule)
        self.loaded: list[tuple[Any, ...]] = []

    def train(self, inputs: StepInputs, factor: float) -> Tensor:
        """Run the micro-batches forward and backward; the sum of their weighted losses, on every stage."""
        self.loaded = [
            (batch.positions, batch.documents, batch.labels, weight * factor, seed)
            for batch, weight, seed in zip(inputs.batches, inputs.weights, inputs.seeds, strict=True)
        ]
        numbers = torch.arange(len(inputs.batches))
        losses: list[Tensor] = []
        tokens = [torch.cat([batch.tokens for batch in inputs.batches])] if self.mesh.pp.first else []
        schedule = self.schedule(len(inputs.batches), len(inputs.batches[0].tokens))
        last = dict(target=numbers, losses=losses) if self.mesh.pp.last else {}
        self.reduction.begin(len(inputs.batches))
        schedule.step(*tokens, number=numbers, return_outputs=False, **last)
        self.loaded = []
        total = torch.stack(losses).sum() / factor if losses else torch.zeros((), device=self.device)
        return all_reduce(total.detach(), self.mesh.pp)

    def sum_gradients(self) -> None:
        """Finish reducing gradients over the copies of each weight: the two tied embeddings, then the replicas."""
        if self.tied is not None and self.tied.grad is not None:
            all_reduce_buckets([self.tied.grad], self.ends)
        self.reduction.finish()

    def evaluate(
        self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None, labels: Tensor, weights: Tensor
    ) -> Tensor:
        """The weighted loss of one micro-batch, passed from stage to stage; returned on every stage."""
        pp, x = self.mesh.pp, tokens
        value = torch.zeros((), device=self.device)
        for index in range(self.count):
            owner = index % pp.size
            if owner != pp.rank:
                continue
            if index:
                x = torch.empty(self._activations(len(tokens)), dtype=self.stacks[index].dtype, device=self.device)
                dist.recv(x, pp.ranks[(index - 1) % pp.size], group=pp.group)
            x = self.stacks[index](x, positions, documents, labels, weights)
            if index == self.count - 1:
                value = x
            else:
                dist.send(x.contiguous(), pp.ranks[(index + 1) % pp.size], group=pp.group)
        return all_reduce(value, pp)

    def _activations(self, sequences: int) -> tuple[int, int, int]:
        model = self.config.model
        return model.context // self.mesh.tp.size, sequences, model.hidden

    def _schedule(self, micro_batches: int, sequences: int) -> Any:
        """PyTorch's schedule for this number of micro-batches and sequences; ConfigError if it cannot run them."""
        pieces = [self._stage(index, sequences) for index in self.stacks]
        name = self.config.parallel.schedule
        kind = SCHEDULES[name]
        try:
            return kind(
                pieces[0] if name in SINGLE else pieces,
                micro_batches,
                loss_fn=lambda loss, _: loss,  # the last stage returns the loss itself
                scale_grads=False,  # the token weights already do that
            )
        except ValueError as error:
            raise ConfigError(
                f"parallel.schedule={name} cannot run {micro_batches} micro-batches a step on parallel.pipeline="
                f"{self.mesh.pp.size}: {error}; change batch.global_size or batch.micro_size"
            ) from error

    def _stage(self, index: int, sequences: int) -> PipelineStage:
        """A stage for PyTorch's schedules; shapes are given, so that no trial run is needed to infer them."""
        between = torch.empty(self._activations(sequences), dtype=self.stacks[index].dtype, device="meta")
        between.requires_grad_()
        ids = torch.empty(sequences, self.config.model.context, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        first, last = index == 0, index == self.count - 1
        return PipelineStage(
            Numbered(self.stacks[index], self.loaded_of),
            index,
            self.count,
            self.device,
            input_args=(ids if first else between,),
            output_args=(loss if last else between,),
            input_grads=(None if first else between.detach(),),
            output_grads=(None if last else between.detach(),),
            group=self.mesh.pp.group,
        )

    def loaded_of(self, number: int) -> tuple[Any, ...]:
        """Positions, documents, labels, weights and seed of one micro-batch of the current step."""
        return self.loaded[number]


class Numbered(nn.Module):
    """A stage that receives the index of its micro-batch, to look up labels and weights."""

    def __init__(self, stack: Stack, loaded: Any):
        super().__init__()
        self.stack, self.loaded = stack, loaded

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        """[B, T] ids or [t, B, C] -> [t, B, C], or the loss."""
        return self.stack(x, *self.loaded(int(number)))
