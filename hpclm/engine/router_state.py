"""What balances experts and is no weight: choice biases, which every step moves, and each expert's share of the tokens of the step before.

Both follow the counts of the global batch, so they are the same in every layout. A step whose update is skipped changes neither.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpclm.config import ModelConfig
from hpclm.engine import SavedState, Shard
from hpclm.model.balance import COUNTS
from hpclm.model.experts import Router, routers
from hpclm.model.stack import Stack
from hpclm.parallel.collectives import all_reduce
from hpclm.parallel.mesh import Compute


class RouterState:
    """The state of the routers of the whole model, of which this process may have some."""

    def __init__(self, stacks: Sequence[Stack], config: ModelConfig, compute: Compute):
        self.config, self.mesh, device = config, compute.mesh, compute.device
        names = [f"block{number}" for number in range(config.layers) if config.has_experts(number)]
        here = {name: layer for stack in stacks for name, layer in stack.layers.items() if name in names}
        self.rows = {name: row for row, name in enumerate(names)}
        """The row of each block, by name, in what follows."""
        self.routers: dict[str, Router] = {name: router for name, layer in here.items() for router in routers(layer)}
        """Of this process's blocks, by name."""
        shape = len(names), config.experts
        self.counts = torch.zeros(shape, dtype=torch.int64, device=device)
        """[layers, E]: tokens of the global batch that went to each expert in the last step."""
        self.load = torch.ones(shape, device=device)
        """[layers, E] fp32: the counts of the last step that was not skipped, divided by their mean."""
        self.bias = torch.zeros(shape, device=device)
        for name, router in self.routers.items():
            if config.balance_step:
                router.load = self.load[self.rows[name]]
            if router.choice_bias is not None:
                # in fp32 also where a library has cast the model's buffers
                router.choice_bias = self.bias[self.rows[name]]

    @torch.no_grad()
    def update(self, reported: dict[str, Tensor], skipped: Tensor | float) -> None:
        """Take this process's counts out of what its layers have ``reported`` in a step, and move the state unless its update was
        ``skipped``. A collective of all processes."""
        counts = torch.zeros_like(self.counts)
        for name in [name for name in reported if name.startswith(COUNTS)]:
            counts[self.rows[name.removeprefix(COUNTS)]] = reported.pop(name)
        self.counts = all_reduce(counts, self.mesh.world)
        mean = self.counts.double().mean(1, keepdim=True)
        changed = (mean > 0) & (torch.as_tensor(skipped, device=mean.device) == 0)
        load = (self.counts / mean.clamp(min=1e-9)).float()
        # in place: the routers have views
        self.load.copy_(torch.where(changed, load, self.load))
        if self.config.balance_bias:
            moved = self.config.balance_bias * (mean - self.counts).sign().float()
            self.bias.add_(torch.where(changed, moved, 0.0))

    def most_received(self) -> Iterator[str]:
        """With parallel.expert: the layer whose experts on this process received the most rows last, if that exceeds an even load."""
        received = {name: router.received for name, router in self.routers.items() if router.received}
        for name in sorted(received, key=received.__getitem__)[-1:]:
            rows, even = received[name]
            if rows > even:
                yield (
                    f"{name}: the experts of rank {self.mesh.world.rank} received {rows:,} rows, {rows / even:.1f} times the {even:,} of an "
                    "even load; balance experts (model.balance_sequence, model.balance_bias), or lower parallel.expert"
                )

    def tensors(self) -> Iterator[Shard]:
        """The choice biases of this process's blocks, from one of the processes that have them."""
        if self.config.router_choice_bias and self.mesh.dp.first and self.mesh.tp.first:
            for name in self.routers:
                yield Shard.whole(bias_name(name), self.bias[self.rows[name]])

    def scalars(self) -> dict[str, Any]:
        """The shares of the last step, as JSON."""
        return {"expert_load": self.load.tolist()}

    def load_saved(self, saved: SavedState, scalars: Mapping[str, Any]) -> None:
        """Load a saved state; imported weights have no shares of a last step, so all experts begin with the same."""
        if self.config.router_choice_bias:
            # also of other stages' blocks: every process moves the biases of all by the same counts, and they are compared
            for name, number in self.rows.items():
                row = self.bias[number]
                row.copy_(saved.block(bias_name(name), (0,), tuple(row.shape)))
        self.load.copy_(torch.tensor(scalars.get("expert_load", 1.0)))


def bias_name(block: str) -> str:
    """The name of a block's choice bias in a checkpoint."""
    return f"model.{block}.mlp.router.choice_bias"
