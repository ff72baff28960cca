"""Plain PyTorch, one model a process: fp32 weights and optimizer, activations in the compute type.

Several replicas are kept the same by DistributedDataParallel, which sums gradients while the last micro-batch's backward
pass is under way (Li et al. 2020).
"""

import torch
import torch.distributed as dist
from torch import nn

from hpclm.config import RunConfig
from hpclm.engine.held import Held
from hpclm.engine.plain import PlainEngine, whole_model
from hpclm.engine.step import Replica
from hpclm.model import gpt
from hpclm.model.draw import on
from hpclm.model.stack import Stack
from hpclm.parallel.mesh import Axis, Mesh


class NativeEngine(PlainEngine):
    """One model, one optimizer, one device; the same on every replica."""

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype):
        engine = config.engine
        model = whole_model(config, mesh, dtype, on(device, mesh.tp))
        if engine.compile:
            model.compile_blocks()
        super().__init__(config, mesh, device, model, lambda stack: replicate(stack, mesh.dp, device, engine.bucket_mb))
        if mesh.dp.size > 1:
            self.choose_buckets()

    def choose_buckets(self) -> None:
        """Run an empty micro-batch: after its first one DistributedDataParallel divides the gradients anew, by when they come.

        Sums are rounded in another order then. So that a run that goes on sums as one that never stopped, no step comes before.
        """
        shape = (self.config.batch.micro_size, self.config.model.context)
        tokens = torch.zeros(shape, dtype=torch.int64, device=self.device)
        seed = 0 if gpt.random(self.config.model) else None
        weights = torch.zeros(shape, device=self.device)
        self.model.train()
        self.replica.forward(tokens, None, None, tokens, weights, seed).backward()
        for held in self.replica.held:
            held.parameter.grad = None


def replicate(model: Stack, dp: Axis, device: torch.device, bucket_mb: float | None) -> Replica:
    """``model`` as one of the replicas of ``dp``."""
    held = tuple(Held(name, p, model.forms[name]) for name, p in model.weights())
    if dp.size == 1:
        return Replica(model, held)
    wrapped = nn.parallel.DistributedDataParallel(
        model,
        [device.index] if device.type == "cuda" else None,
        process_group=dp.group,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_mb,
    )
    wrapped.register_comm_hook(dp.group, summed)
    return Replica(wrapped, held, wrapped.no_sync)


def summed(group: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Sum a bucket of gradients over the replicas, where DistributedDataParallel would take the mean."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
