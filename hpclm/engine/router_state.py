"""State that balances experts but is not a weight: choice biases, which move every step, and each expert's load in the last step.

Both follow the counts of the global batch, so they are the same in every layout. A skipped step changes neither.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpclm.config import ModelConfig
from hpclm.engine import SavedState, Shard
from hpclm.model.balance_losses import COUNTS
from hpclm.model.expert_mlp import Router, routers
from hpclm.model.stack import Stack
from hpclm.parallel.collectives import all_reduce
from hpclm.parallel.mesh import Compute


class RouterState:
    """The router state of the whole model; this process may have only some of the routers."""

    def __init__(self, stacks: Sequence[Stack], config: ModelConfig, compute: Compute):
        self.config = config
        self.mesh = compute.mesh
        device = compute.device
        names = [f"block{number}" for number, layer in enumerate(config.blocks) if layer.experts]
        here = {name: layer for stack in stacks for name, layer in stack.layers.items() if name in names}
        self.rows = {name: row for row, name in enumerate(names)}
        """The row of each block in the tensors below, by name."""
        self.routers: dict[str, Router] = {name: router for name, layer in here.items() for router in routers(layer)}
        """This process's routers, by block name."""
        shape = len(names), config.experts.count
        self.counts = torch.zeros(shape, dtype=torch.int64, device=device)
        """[layers, E]: tokens of the global batch routed to each expert in the last step."""
        self.load = torch.ones(shape, device=device)
        """[layers, E] fp32: the counts of the last step that was not skipped, divided by their mean."""
        self.bias = torch.zeros(shape, device=device)
        frozen = [config.freezes(bias_name(name).removeprefix("model.")) for name in names]
        self.frozen = torch.tensor(frozen, device=device)[:, None]
        """[layers, 1]: whether model.freeze matches a layer's choice bias."""
        for name, router in self.routers.items():
            if config.experts.balance_step:
                router.load = self.load[self.rows[name]]
            if router.choice_bias is not None:
                # fp32 even if a library has cast the model's buffers
                router.choice_bias = self.bias[self.rows[name]]

    @torch.no_grad()
    def update(self, reported: dict[str, Tensor], skipped: Tensor | float) -> None:
        """Remove this process's counts from ``reported``; update the state unless the update was ``skipped``. A collective."""
        counts = torch.zeros_like(self.counts)
        for name in [name for name in reported if name.startswith(COUNTS)]:
            counts[self.rows[name.removeprefix(COUNTS)]] = reported.pop(name)
        self.counts = all_reduce(counts, self.mesh.world)
        mean = self.counts.double().mean(1, keepdim=True)
        changed = (mean > 0) & (torch.as_tensor(skipped, device=mean.device) == 0)
        load = (self.counts / mean.clamp(min=1e-9)).float()
        # in place, because the routers hold views
        self.load.copy_(torch.where(changed, load, self.load))
        if self.config.experts.balance_bias:
            moved = self.config.experts.balance_bias * (mean - self.counts).sign().float()
            self.bias.add_(torch.where(changed & ~self.frozen, moved, 0.0))

    def most_received(self) -> Iterator[str]:
        """A message on the layer with the most rows for this process's experts in the last step, if more than an even load."""
        received = {name: router.received for name, router in self.routers.items() if router.received}
        for name in sorted(received, key=received.__getitem__)[-1:]:
            rows, even = received[name]
            if rows > even:
                yield (
                    f"{name}: the experts of rank {self.mesh.world.rank} received {rows:,} rows, {rows / even:.1f} times the even "
                    f"load of {even:,}; balance experts (model.experts.balance_sequence, model.experts.balance_bias), or lower parallel.expert"
                )

    def tensors(self) -> Iterator[Shard]:
        """The choice biases of this process's blocks, saved by one of the processes with these blocks."""
        if self.config.experts.router_choice_bias and self.mesh.dp.first and self.mesh.tp.first:
            for name in self.routers:
                yield Shard.whole(bias_name(name), self.bias[self.rows[name]])

    def scalars(self) -> dict[str, Any]:
        """The loads of the last step, as JSON."""
        return {"expert_load": self.load.tolist()}

    def load_saved(self, saved: SavedState, scalars: Mapping[str, Any]) -> None:
        """Load a saved state. Imported weights have no loads; all experts then begin with equal loads."""
        if self.config.experts.router_choice_bias:
            # also the biases of other stages: every process updates all biases, and the copies are compared
            for name, number in self.rows.items():
                row = self.bias[number]
                row.copy_(saved.block(bias_name(name), (0,), tuple(row.shape)))
        self.load.copy_(torch.tensor(scalars.get("expert_load", 1.0)))


def bias_name(block: str) -> str:
    """A block's choice bias as a checkpoint names it."""
    return f"model.{block}.mlp.router.choice_bias"
