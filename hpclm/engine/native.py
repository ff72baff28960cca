"""Plain PyTorch with data parallelism: fp32 weights and optimizer, activations in the compute type.

In bf16 and fp16 the model computes with copies of the weights in that type, which are made once a step.
"""

from contextlib import AbstractContextManager

import torch

from hpclm.config import RunConfig
from hpclm.engine.base import BaseEngine, sum_later, whole_model
from hpclm.engine.compute_copies import ComputeCopies, adds_in_place
from hpclm.engine.gradient_buckets import Bucket, GradientBuckets, groups, megabytes
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.model.init import materialize_on
from hpclm.model.stack import Stack
from hpclm.parallel.mesh import Mesh


class ReplicatedEngine(BaseEngine):
    """The model and optimizer replicated on every data-parallel rank."""

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device, model: Stack):
        self.copies = ComputeCopies(model, adds_in_place(config, device))
        leaves = {self.copies.master(p): p for _, p in model.weights()}
        weights = [
            ShardedParameter(name, self.copies.master(p), model.placements[name], copies=mesh.dp)
            for name, p in model.weights()
        ]
        super().__init__(config, mesh, device, model, weights)
        self.kept_gradients = frozenset(self.copies.masters.values())
        self.gradients = None
        if mesh.dp.size > 1:
            reduced = model.dtype if config.engine.gradients == "compute" else torch.float32
            size = megabytes(config.engine.bucket_mb, sum(p.numel() for p in leaves), mesh, device)
            buckets = [Bucket(group) for group in groups(list(leaves), size)]
            self.gradients = GradientBuckets(buckets, leaves, mesh.dp, reduced)
        self.copies.attach()

    def no_sync(self) -> AbstractContextManager:
        """Inside this context, backward passes accumulate gradients locally."""
        return self.gradients.no_sync() if self.gradients else super().no_sync()

    def finish_backward(self) -> None:
        """Wait for the all-reduces to finish."""
        if self.gradients:
            self.gradients.finish()

    def zero_grad(self) -> None:
        """Reset the gradients; those that gradients are added to in place are zeroed in place."""
        if self.gradients:
            self.gradients.zero()
        else:
            super().zero_grad()

    def refresh(self) -> None:
        """Cast the weights again."""
        self.copies.refresh()


class NativeEngine(ReplicatedEngine):
    """The engine named native."""

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype):
        super().__init__(config, mesh, device, native_model(config, mesh, device, dtype))


def native_model(config: RunConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype) -> Stack:
    """The whole model, initialised on every replica."""
    model = whole_model(config, mesh, dtype, materialize_on(device, mesh.tp))
    sum_later(model, config, mesh, device)
    if config.engine.compile:
        model.compile_blocks()
    return model
