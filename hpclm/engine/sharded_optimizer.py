"""Plain PyTorch with the optimizer sharded over the replicas (ZeRO stage 1; Rajbhandari et al. 2020).

Every replica computes with all weights and accumulates all gradients. It keeps Adam's moments, and in bf16 and fp16 the fp32 weights,
only for its shard: an equal run of values of each bucket. After the update the replicas all-gather the weights, or their copies in the
compute type, while the first layers of the next step run. With parallel.shard, groups of replicas shard like this, and gradients are
all-reduced between the groups.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpclm.config import EngineSettings
from hpclm.engine.base import BaseEngine
from hpclm.engine.compute_copies import ComputeCopies, adds_in_place
from hpclm.engine.gradient_buckets import Bucket, GradientBuckets, by_mesh, grouped, megabytes, view
from hpclm.engine.native import NativeEngine, native_model
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.engine.step import GlobalNorm
from hpclm.parallel.collectives import gather_into, scatter_into
from hpclm.parallel.mesh import Compute, Mesh

ALIGN = 64  # values; CPU kernels then use the same vector instructions for a value as without sharding


def build(config: EngineSettings, compute: Compute) -> BaseEngine:
    """The engine named native with zero_stage=1; with one replica, the native engine."""
    if config.engine.zero_stage == 1 and compute.mesh.dp.size > 1:
        return ShardedOptimizerEngine(config, compute)
    return NativeEngine(config, compute)


def scatters(device: torch.device) -> bool:
    """Whether this device reduce-scatters gradients. CPUs all-reduce them, which costs gloo the same: the norm is then summed in the
    same order as without sharding, and results are equal to the last bit."""
    return device.type == "cuda"


class ShardedOptimizerEngine(BaseEngine):
    """The engine named native with engine.zero_stage=1."""

    def __init__(self, config: EngineSettings, compute: Compute):
        mesh = compute.mesh
        device = compute.device
        model = native_model(config, compute)
        self.copies = ComputeCopies(model, config.in_place and adds_in_place(config.engine, config.model, device))
        self.scatter = scatters(device)
        named = [(name, p, self.copies.master(p)) for name, p in model.weights()]
        leaves = {master: p for _, p, master in named}
        size = megabytes(config.engine.bucket_mb, sum(p.numel() for p in leaves), compute)
        self.buckets = [
            ShardedBucket([(m, leaves[m]) for m in group], home)
            for home, members in by_mesh({m: model.placements[name] for name, _, m in named}, mesh)
            # one type for each bucket: its weights are gathered as one tensor
            for kind in dict.fromkeys(leaves[m].dtype for m in members)
            for group in grouped((m for m in reversed(members) if leaves[m].dtype == kind), size)
        ]
        part_of = {p: (bucket, shard_part) for bucket in self.buckets for p, shard_part in bucket.shard_parameters()}
        self.whole = [
            ShardedParameter(name, master, model.placements[name], replicas=part_of[master][0].mesh.dp)
            for name, _, master in named
        ]
        weights = [
            ShardedParameter(
                *(name, shard_part, model.placements[name], bucket.local_range(master)(bucket.mesh.shard.rank)[0]),
                replicas=bucket.mesh.replicate,
                local_range=bucket.local_range(master),
                holders=bucket.mesh.holders,
                data_rank=mesh.dp.rank,
            )
            for name, _, master in named
            for bucket, shard_part in [part_of[master]]
        ]
        super().__init__(config, compute, model, weights)
        self.norm_of_whole = GlobalNorm(self.whole, mesh, False, self.norm.split)
        reduced = compute.dtype if config.engine.gradients == "compute" else torch.float32
        self.gradients = ShardedBuckets(self.buckets, leaves, reduced, self.scatter)
        self.copies.attach()
        homes = {leaves[master]: bucket for bucket in self.buckets for master in bucket.parameters}
        for name, layer in model.layers.items():
            # the final norm waits for the rest: the loss reads the output projection without calling its module
            needed = self.buckets if name == "norm" else {homes[p] for p in layer.parameters()}
            layer.register_forward_pre_hook(partial(_arrive, needed))

    def gradient_norm(self) -> Tensor:
        """Global norm of the gradients, summed over the replicas' shards unless every replica has all of them."""
        if self.scatter or self.deferred:
            return self.norm.of_gradients()
        return self.norm_of_whole.of_gradients()

    @torch.no_grad()
    def refresh(self) -> None:
        """Start to all-gather the weights, first layers first; each layer waits for its weights before it runs."""
        for bucket in reversed(self.buckets):
            bucket.gather()
        if self.copies.tables:
            _arrive(self.buckets)
        self.copies.refresh_tables()


class ShardedBucket(Bucket):
    """A bucket of gradients, the weights in the same layout, and the fp32 weights of this replica's shard."""

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, nn.Parameter]], mesh: Mesh):
        """``parameters``: pairs of a parameter with an fp32 gradient and the one that the model computes with (itself or a copy).
        ``mesh``: the mesh for these weights."""
        sizes = [aligned(p.numel(), ALIGN) for p, _ in parameters]
        self.mesh = mesh
        axis = mesh.shard
        self.gathering: Any = None
        """The pending all-gather of the weights, if any."""
        share = aligned(sum(sizes), ALIGN * axis.size) // axis.size
        self.share = share
        self.begin = axis.rank * share
        self.end = (axis.rank + 1) * share
        super().__init__([p for p, _ in parameters], mesh.dp, [0, *accumulate(sizes[:-1])], share * axis.size)
        self.weights = self.buffer.new_zeros(len(self.buffer), dtype=parameters[0][1].dtype)
        self.masters = self.weights[self.begin : self.end]
        # fp32 weights of this shard only; other shards exist only in the compute type
        if self.weights.dtype != torch.float32:
            self.masters = self.buffer.new_zeros(share)
        self._adopt(parameters)

    def local_range(self, parameter: nn.Parameter) -> Callable[[int], tuple[int, int]]:
        """Rank of a replica -> the range of the parameter's values in that rank's shard: index of the first in the flat parameter, and count."""
        start = next(start for p, start in zip(self.parameters, self.starts, strict=True) if p is parameter)
        size = parameter.numel()
        share = self.share

        def held_by(rank: int) -> tuple[int, int]:
            low, high = (min(max(rank * share - start, 0), size) for rank in (rank, rank + 1))
            return low, high - low

        return held_by

    def shard_parameters(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Each parameter with its run of values in this replica's shard (possibly empty), as a parameter of the optimizer."""
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            begin, count = self.local_range(parameter)(self.mesh.shard.rank)
            low = start + begin
            at = min(max(low - self.begin, 0), len(self.masters))
            part = nn.Parameter(self.masters[at : at + count])
            part.grad = self.buffer[low : low + count]
            yield parameter, part

    def gather(self) -> None:
        """Start to all-gather the weights from the replicas' shards."""
        self.arrive()
        shard_values = self.weights[self.begin : self.end]
        if self.masters.dtype != shard_values.dtype:
            # cast before sending: in bf16 the all-gather moves half of fp32's bytes
            shard_values.copy_(self.masters)
        shard = self.mesh.shard
        if shard.size > 1:
            self.gathering = gather_into(self.weights, shard_values, group=shard.group, async_op=True)

    def arrive(self) -> None:
        """Wait until the weights are gathered."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    @torch.no_grad()
    def _adopt(self, parameters: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Move the weights into the flat buffers, and free the fp32 weights of other shards."""
        for (parameter, used), start in zip(parameters, self.starts, strict=True):
            values = view(self.weights, parameter, start)
            values.copy_(used)
            if used is not parameter:
                low = max(start, self.begin)
                high = min(start + parameter.numel(), self.end)
                if low < high:
                    self.masters[low - self.begin : high - self.begin] = parameter.view(-1)[low - start : high - start]
                # from now on the parameter only carries its gradient
                parameter.data = parameter.new_zeros(1).expand(parameter.shape)
            used.data = values


class ShardedBuckets(GradientBuckets):
    """Buckets that are reduce-scattered, so that each replica gets the sums of its shard only."""

    def __init__(
        self,
        buckets: Sequence[ShardedBucket],
        leaves: Mapping[nn.Parameter, nn.Parameter],
        dtype: torch.dtype,
        scatter: bool,
    ):
        super().__init__(buckets, leaves, dtype)
        self.scatter = scatter
        replicated = any(bucket.mesh.replicate.size > 1 for bucket in buckets)
        self._stream = torch.cuda.Stream() if replicated and buckets[0].buffer.is_cuda else None
        """Waits for the sums of a group before they go to the other groups, so that the backward pass need not wait; None on CPUs."""

    def _reduce(self, bucket: Bucket) -> None:
        if not self.scatter or not isinstance(bucket, ShardedBucket):
            super()._reduce(bucket)
            return
        bucket.sent = bucket.buffer.to(self.dtype)
        shard_sums = bucket.sent[bucket.begin : bucket.end]
        mesh = bucket.mesh
        if mesh.shard.size == 1:  # all ranks of the axis hold these weights whole
            super()._reduce(bucket)
            return
        bucket.summed = slice(bucket.begin, bucket.end)
        bucket.work = scatter_into(shard_sums, bucket.sent, group=mesh.shard.group, async_op=True)
        if mesh.replicate.size > 1:
            with torch.cuda.stream(self._stream):
                bucket.work.wait()
                bucket.work = dist.all_reduce(shard_sums, group=mesh.replicate.group, async_op=True)


def _arrive(buckets: Iterable[ShardedBucket], *_: Any) -> None:
    """Wait for the weights of some buckets: the hook of a layer that is about to run."""
    for bucket in buckets:
        bucket.arrive()


def aligned(count: int, unit: int) -> int:
    """``count`` rounded up to a multiple of ``unit``."""
    return -(-count // unit) * unit
