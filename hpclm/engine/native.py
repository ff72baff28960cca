"""Plain PyTorch with data parallelism: fp32 weights and optimizer, activations in the compute type.

In bf16 and fp16 the model computes with copies of the weights in that type, cast once a step.
"""

import torch

from hpclm.config import EngineSettings
from hpclm.engine.base import BaseEngine
from hpclm.engine.compute_copies import ComputeCopies, adds_in_place
from hpclm.engine.gradient_buckets import Bucket, GradientBuckets, grouped, megabytes
from hpclm.engine.models import defer_tp_grad_sum, whole_model
from hpclm.engine.sharded_parameter import whole_slices
from hpclm.model.init import materialize_on
from hpclm.model.stack import Stack
from hpclm.parallel.mesh import Compute


class NativeEngine(BaseEngine):
    """The engine named native: the model and optimizer replicated on every data-parallel rank."""

    def __init__(self, config: EngineSettings, compute: Compute):
        mesh = compute.mesh
        device = compute.device
        model = native_model(config, compute)
        self.copies = ComputeCopies(model, config.in_place and adds_in_place(config.engine, config.model, device))
        leaves = {self.copies.master(p): p for _, p in model.weights()}
        named = ((name, self.copies.master(p)) for name, p in model.weights())
        weights, homes = whole_slices(named, model.placements, mesh)
        super().__init__(config, compute, model, weights)
        self.kept_gradients = frozenset(self.copies.masters.values())
        if mesh.dp.size > 1:
            sent = model.dtype if config.engine.gradients == "compute" else torch.float32
            size = megabytes(config.engine.bucket_mb, sum(p.numel() for p in leaves), compute)
            # from last to first, the order of the backward pass
            buckets = [Bucket(group, home.dp) for home, members in homes for group in grouped(reversed(members), size)]
            self.gradients = GradientBuckets(buckets, leaves, sent)
        # after the buckets, which place the gradients in their buffers
        self.copies.attach()

    def refresh(self) -> None:
        """Cast the weights again."""
        self.copies.refresh()


def native_model(config: EngineSettings, compute: Compute) -> Stack:
    """The whole model, initialised on every replica."""
    mesh = compute.mesh
    model = whole_model(config, compute, materialize_on(compute.device, mesh.tp, mesh.dp.rank))
    defer_tp_grad_sum(model, compute)
    if config.engine.compile:
        model.compile_blocks()
    return model
