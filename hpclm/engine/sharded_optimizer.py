"""Plain PyTorch with the optimizer sharded over the replicas (ZeRO stage 1; Rajbhandari et al. 2020).

Every replica computes with all weights and accumulates all gradients. It keeps Adam's moments, and in bf16 and fp16 the fp32 weights,
only for its shard: an equal run of values of each bucket. After the update the replicas all-gather the weights, or their copies in the
compute type, while the first layers of the next step run. With parallel.shard, groups of replicas shard like this, and gradients are
all-reduced between the groups.
"""

import torch
from torch import Tensor

from hpclm.config import EngineSettings
from hpclm.engine.base import BaseEngine
from hpclm.engine.compute_copies import ComputeCopies, adds_in_place
from hpclm.engine.gradient_buckets import megabytes
from hpclm.engine.native import NativeEngine, native_model
from hpclm.engine.sharded_buckets import ShardedWeights
from hpclm.engine.sharded_parameter import whole_slices
from hpclm.parallel.mesh import Compute


def build(config: EngineSettings, compute: Compute) -> BaseEngine:
    """The engine named native with zero_stage=1; with one replica, the native engine."""
    if config.engine.zero_stage == 1 and compute.mesh.dp.size > 1:
        return ShardedOptimizerEngine(config, compute)
    return NativeEngine(config, compute)


class ShardedOptimizerEngine(BaseEngine):
    """The engine named native with engine.zero_stage=1."""

    def __init__(self, config: EngineSettings, compute: Compute):
        mesh = compute.mesh
        device = compute.device
        model = native_model(config, compute)
        self.copies = ComputeCopies(model, config.in_place and adds_in_place(config.engine, config.model, device))
        named = [(name, self.copies.master(p)) for name, p in model.weights()]
        leaves = {self.copies.master(p): p for _, p in model.weights()}
        size = megabytes(config.engine.bucket_mb, sum(p.numel() for p in leaves), compute)
        self.shards = ShardedWeights(*whole_slices(named, model.placements, mesh), leaves, size, device)
        super().__init__(config, compute, model, self.shards.weights)
        self.gradients = self.shards.gradients(compute.dtype if config.engine.gradients == "compute" else torch.float32)
        self.copies.attach()
        self.shards.wait_before_layers(model)

    def gradient_norm(self) -> Tensor:
        """Global norm of the gradients."""
        return self.shards.gradient_norm(self.norm, bool(self.deferred))

    def settle(self) -> None:
        """Wait for all weights."""
        self.shards.arrive()

    @torch.no_grad()
    def refresh(self) -> None:
        """Start to all-gather the weights, first layers first; each layer waits for its weights before it runs."""
        self.shards.gather()
        if self.copies.tables:
            self.shards.arrive()
        self.copies.refresh_whole()
