"""PyTorch's pipelines (torch.distributed.pipelining): GPipe, 1F1B, interleaved 1F1B and the zero-bubble schedule.

Every process of a replica reads its own micro-batches, so only activations are sent: [t, B, C] from stage to stage, and
their gradients back. T tokens in a sequence, t = T / (cp tp), B sequences in a micro-batch, C hidden width.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
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

from hpclm.base.errors import ConfigError
from hpclm.config import EngineSettings
from hpclm.config.engine import torch_too_old
from hpclm.engine.base import BaseEngine
from hpclm.engine.gradient_buckets import Bucket, GradientBuckets, grouped
from hpclm.engine.models import defer_tp_grad_sum, layers_of, stack_of
from hpclm.engine.sharded_buckets import ShardedWeights
from hpclm.engine.sharded_parameter import whole_slices
from hpclm.engine.stages import stages
from hpclm.engine.step import StepInputs
from hpclm.model.init import materialize_on
from hpclm.model.stack import Stack, Stages
from hpclm.parallel.collectives import all_reduce, all_reduce_in_place
from hpclm.parallel.mesh import SINGLE, Compute, sub_axis
from hpclm.parallel.micro_batch import MicroBatch, ModelOutput, add

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
ONE_STAGE = ("gpipe", "1f1b")
"""Schedules that take one stage instead of a list."""
BUCKET_MB = 32.0


def unavailable() -> str | None:
    """The reason why this PyTorch cannot run the engine; None if it can. An old PipelineStage does not take the shapes of gradients."""
    if "input_grads" in inspect.signature(PipelineStage).parameters:
        return None
    return torch_too_old("pipelining", torch.__version__)


class PipeliningEngine(BaseEngine):
    """One or more pipeline stages on each process; gradients are reduced over the replicas during the last backward passes. With
    engine.zero_stage=1 the replicas shard the optimizer."""

    backward_timer = "forward_backward"  # of several micro-batches at a time

    def __init__(self, config: EngineSettings, compute: Compute):
        mesh = compute.mesh
        late = config.parallel.schedule == "zero_bubble"
        parts = stages(config, layers_of(config, compute))
        wrap = materialize_on(compute.device, mesh.tp, mesh.dp.rank)
        self.count = len(parts)
        self.stacks = {
            index: stack_of(config, compute, parts[index], wrap, "twice" if late else "once")
            for index in range(mesh.pp.rank, len(parts), mesh.pp.size)
        }
        """This process's stages, by their number among all ``count``."""
        for stack in self.stacks.values():
            defer_tp_grad_sum(stack, compute)
        model = Stages([*self.stacks.values()])
        weights, homes = whole_slices(model.weights(), model.placements, mesh)
        shared = "tokens.weight" if config.model.tied else None
        weights = [replace(w, duplicate=w.name == shared and not mesh.pp.first) for w in weights]
        self.tied = [w.parameter for w in weights if w.name == shared and w.trained]
        """The tied embedding, if the first and the last stage each train a copy."""
        self.ends = sub_axis(mesh.pp, [0, mesh.pp.size - 1]) if self.tied else SINGLE
        """The processes that hold the tied embedding."""
        leaves = {w.parameter: w.parameter for w in weights}
        # the zero-bubble schedule adds gradients of weights outside autograd, so no hooks run
        late_gradients = set(leaves if late else ())
        self.shards: ShardedWeights | None = None
        if config.engine.zero_stage == 1 and mesh.dp.size > 1:
            self.shards = ShardedWeights(weights, homes, leaves, BUCKET_MB, compute.device, alone={*self.tied})
            weights = self.shards.weights
        super().__init__(config, compute, model, weights, self.evaluate_one)
        if self.shards:
            self.gradients = self.shards.gradients(torch.float32, late_gradients)
            for stack in self.stacks.values():
                self.shards.wait_before_layers(stack)
        elif mesh.dp.size > 1:
            buckets = [
                Bucket(group, home.dp)
                for home, members in homes
                for group in grouped(members, BUCKET_MB, first=int(BUCKET_MB * 2**20))
            ]
            self.gradients = GradientBuckets(buckets, leaves, late=late_gradients)
        # a batch ramp-up uses several numbers of micro-batches, and a schedule keeps its receive buffers
        self.schedule = cache(self._schedule)
        self.micro_batches: Sequence[MicroBatch] = ()
        """The micro-batches of the current step."""

    def forward_backward(self, inputs: StepInputs) -> Tensor:
        """Run the micro-batches through all stages. Returns the sum of this replica's weighted losses, on every stage."""
        self.micro_batches = inputs.batches
        numbers = torch.arange(len(inputs.batches))
        losses: list[Tensor] = []
        # PyTorch's schedule takes one batch and divides it into micro-batches again
        tokens = [torch.cat([batch.tokens for batch in inputs.batches])] if self.mesh.pp.first else []
        last = dict(target=numbers, losses=losses) if self.mesh.pp.last else {}
        with self.timers(self.backward_timer):
            schedule = self.schedule(len(inputs.batches), len(inputs.batches[0].tokens))
            schedule.step(*tokens, number=numbers, return_outputs=False, **last)
        self.micro_batches = ()
        total = torch.stack(losses).sum() / inputs.factor if losses else torch.zeros((), device=self.device)
        # only the last stage has losses; the others add 0
        return all_reduce(total.detach(), self.mesh.pp)

    def finish_backward(self) -> None:
        """Sum the gradients over the replicas, then over the two tied embeddings, which thereby get the same bits."""
        super().finish_backward()
        # with a sharded optimizer, both ends divide their bucket at the same places, and each process has the sums of its shard
        summed = [self.shards.summed(p) if self.shards else p.grad for p in self.tied]
        all_reduce_in_place([gradients for gradients in summed if gradients is not None], self.ends)

    def gradient_norm(self) -> Tensor:
        """Global norm of the reduced gradients."""
        if self.shards:
            return self.shards.gradient_norm(self.norm, bool(self.deferred))
        return super().gradient_norm()

    def settle(self) -> None:
        """Wait for all weights."""
        if self.shards:
            self.shards.arrive()

    @torch.no_grad()
    def refresh(self) -> None:
        """Start to all-gather the weights that other replicas have updated."""
        if self.shards:
            self.shards.gather()

    def evaluate_one(self, batch: MicroBatch) -> ModelOutput:
        """Pass one micro-batch from stage to stage; returns its weighted loss on every stage."""
        pp = self.mesh.pp
        x = None
        value = torch.zeros((), device=self.device)
        for index in range(self.count):
            owner = index % pp.size
            if owner != pp.rank:
                continue
            if index:
                x = torch.empty(
                    self._activations(len(batch.tokens)), dtype=self.stacks[index].dtype, device=self.device
                )
                # every process visits the stages in order, so that each receive meets its send
                dist.recv(x, pp.ranks[(index - 1) % pp.size], group=pp.group)
            x = self.stacks[index](batch, x).value
            if index == self.count - 1:
                value = x
            else:
                dist.send(x.contiguous(), pp.ranks[(index + 1) % pp.size], group=pp.group)
        return ModelOutput(all_reduce(value, pp), {})

    def _activations(self, sequences: int) -> tuple[int, int, int]:
        model = self.config.model
        return model.context // self.mesh.cp.size // self.mesh.tp.size, sequences, model.hidden

    def _schedule(self, micro_batches: int, sequences: int) -> Any:
        """PyTorch's schedule for ``micro_batches`` of ``sequences``; ConfigError if it cannot run them."""
        pieces = [self._stage(index, sequences) for index in self.stacks]
        name = self.config.parallel.schedule
        kind = SCHEDULES[name]
        try:
            return kind(
                pieces[0] if name in ONE_STAGE else pieces,
                micro_batches,
                loss_fn=lambda loss, _: loss,  # the last stage returns the loss itself
                scale_grads=False,  # the token weights already scale gradients
            )
        except ValueError as error:
            raise ConfigError(
                f"parallel.schedule={name} cannot run {micro_batches} micro-batches a step on parallel.pipeline="
                f"{self.mesh.pp.size}: {error}; change batch.global_size or batch.micro_size"
            ) from error

    def _stage(self, index: int, sequences: int) -> PipelineStage:
        """A stage for PyTorch's schedules. Shapes are given, so PyTorch needs no trial run to infer them."""
        passed = torch.empty(self._activations(sequences), dtype=self.stacks[index].dtype, device="meta")
        passed.requires_grad_()
        ids = torch.empty(sequences, self.config.model.context // self.mesh.cp.size, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        # the shape of a value, and the shape of its gradient
        received: tuple[Tensor, Tensor | None] = (passed, passed.detach())
        sent: tuple[Tensor, Tensor | None] = (passed, passed.detach())
        if index == 0:
            received = (ids, None)
        if index == self.count - 1:
            sent = (loss, None)
        return PipelineStage(
            Numbered(self.stacks[index], self.compute),
            index,
            self.count,
            self.device,
            input_args=received[:1],
            output_args=sent[:1],
            input_grads=received[1:],
            output_grads=sent[1:],
            group=self.mesh.pp.group,
        )

    def compute(self, stack: Stack, number: int, x: Tensor) -> Tensor:
        """A stage's activations, or the loss, of micro-batch ``number`` of the current step; records its reports."""
        value, scalars = stack(self.micro_batches[number], x if x.is_floating_point() else None)
        add(self.reported, scalars)
        # PyTorch receives a gradient for every result, even that of a first stage without trained weights
        result: Tensor = value if value.requires_grad else value.requires_grad_()
        return result


class Numbered(nn.Module):
    """A stage that receives the number of its micro-batch instead of the batch, which every stage has."""

    def __init__(self, stack: Stack, compute: Callable[[Stack, int, Tensor], Tensor]):
        super().__init__()
        self.stack = stack
        self.compute = compute

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        """[B, T] ids or [t, B, C] -> [t, B, C], or the loss."""
        return self.compute(self.stack, int(number), x)
