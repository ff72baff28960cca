"""PyTorch's pipelines (torch.distributed.pipelining): GPipe, 1F1B, interleaved 1F1B and the zero-bubble schedule.

Every process of a replica reads its micro-batches itself, so only activations travel: [t, B, C] from stage to stage, and
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
from hpclm.engine.held import Held
from hpclm.engine.plain import PlainEngine
from hpclm.engine.stages import stages
from hpclm.engine.step import Replica, Work
from hpclm.errors import ConfigError
from hpclm.model import gpt
from hpclm.model.draw import on
from hpclm.model.loss import TokenLoss
from hpclm.model.stack import Stack, Stages
from hpclm.parallel.collectives import all_reduce, sum_together
from hpclm.parallel.mesh import ALONE, Axis, Mesh, among

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
SINGLE = ("gpipe", "1f1b")
"""Schedules that take one stage, not a list."""


class PipeliningEngine(PlainEngine):
    """One or more stages of a model on each process; replicas are kept the same by summing gradients after a step."""

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
                TokenLoss(engine.loss_chunk, twice=config.parallel.schedule == "zero_bubble"),
                engine.recompute_every,
                place=on(device, mesh.tp),
            )
            for index in mine
        ]
        self.pipeline = Pipeline(config, mesh, device, dict(zip(mine, stacks, strict=True)), len(parts))
        super().__init__(config, mesh, device, Stages(stacks), lambda _: self.pipeline.replica())


@dataclass
class Pipeline:
    """The stages of this process, by their number among all ``count``."""

    config: RunConfig
    mesh: Mesh
    device: torch.device
    stacks: dict[int, Stack]
    count: int
    held: tuple[Held, ...] = field(init=False)
    tied: nn.Parameter | None = field(init=False)
    """The token table, where the first and the last stage have one each."""

    ends: Axis = field(init=False)
    """The processes that have the tied table."""

    def __post_init__(self) -> None:
        tie = self.config.model.tied and self.count > 1
        found = [(index, name, p) for index, stack in self.stacks.items() for name, p in stack.weights()]
        self.held = tuple(
            Held(name, p, self.stacks[index].forms[name], copy=tie and index > 0 and name == "tokens.weight")
            for index, name, p in found
        )
        self.tied = next((p for _, name, p in found if tie and name == "tokens.weight"), None)
        limit = timedelta(minutes=self.config.cluster.timeout_minutes)
        self.ends = among(self.mesh.pp, [0, self.mesh.pp.size - 1], limit) if self.tied is not None else ALONE
        self.schedule = cache(self._schedule)
        self.loaded: list[tuple[Any, ...]] = []

    def replica(self) -> Replica:
        """The whole pipeline as one of the data-parallel replicas."""
        return Replica(self.evaluate, self.held, pipeline=self.train, finish=self.finish)

    def train(self, work: Work, factor: float) -> Tensor:
        """Run the micro-batches forward and backward; the sum of their weighted losses, on every stage."""
        self.loaded = [
            (batch.positions, batch.documents, batch.labels, weight * factor, seed)
            for batch, weight, seed in zip(work.batches, work.weights, work.seeds, strict=True)
        ]
        numbers = torch.arange(len(work.batches))
        losses: list[Tensor] = []
        tokens = [torch.cat([batch.tokens for batch in work.batches])] if self.mesh.pp.first else []
        schedule = self.schedule(len(work.batches), len(work.batches[0].tokens))
        last = dict(target=numbers, losses=losses) if self.mesh.pp.last else {}
        schedule.step(*tokens, number=numbers, return_outputs=False, **last)
        self.loaded = []
        total = torch.stack(losses).sum() / factor if losses else torch.zeros((), device=self.device)
        return all_reduce(total.detach(), self.mesh.pp)

    def finish(self) -> None:
        """Sum gradients over the copies of a weight: the tied table's two, then the replicas'."""
        if self.tied is not None and self.tied.grad is not None:
            sum_together([self.tied.grad], self.ends)
        gradients = [held.parameter.grad for held in self.held if held.parameter.grad is not None]
        sum_together(gradients, self.mesh.dp)

    def evaluate(
        self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None, labels: Tensor, weights: Tensor
    ) -> Tensor:
        """The weighted loss of one micro-batch, which goes from stage to stage; on every stage."""
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
        """PyTorch's schedule for so many micro-batches of so many sequences; ConfigError where it has none."""
        pieces = [self._stage(index, sequences) for index in self.stacks]
        name = self.config.parallel.schedule
        kind = SCHEDULES[name]
        try:
            return kind(
                pieces[0] if name in SINGLE else pieces,
                micro_batches,
                loss_fn=lambda loss, _: loss,  # the last stage computes it itself
                scale_grads=False,  # the weights of the loss do that
            )
        except ValueError as error:
            raise ConfigError(
                f"parallel.schedule={name} cannot run {micro_batches} micro-batches a step on parallel.pipeline="
                f"{self.mesh.pp.size}: {error}; change batch.global_size or batch.micro_size"
            ) from error

    def _stage(self, index: int, sequences: int) -> PipelineStage:
        """A stage as PyTorch's schedules drive it; shapes are given, so that nothing is run to find them."""
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
        """Positions, documents, labels, weights and seed of a micro-batch of the step under way."""
        return self.loaded[number]


class Numbered(nn.Module):
    """A stage that is told the number of the micro-batch it gets."""

    def __init__(self, stack: Stack, loaded: Any):
        super().__init__()
        self.stack, self.loaded = stack, loaded

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        """[B, T] ids or [t, B, C] -> [t, B, C], or the loss."""
        return self.stack(x, *self.loaded(int(number)))
