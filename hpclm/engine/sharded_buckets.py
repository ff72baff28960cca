"""Weights in buckets that replicas shard (ZeRO stage 1; Rajbhandari et al. 2020): each replica updates an equal run of values of each.

The update needs gradients, optimizer state, and in bf16 and fp16 fp32 weights of this run only. The replicas then all-gather the weights,
or their copies in the compute type, while the first layers of the next step run.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpclm.engine.gradient_buckets import Bucket, GradientBuckets, grouped, view
from hpclm.engine.sharded_parameter import Homes, ShardedParameter
from hpclm.engine.step import GlobalNorm
from hpclm.model.stack import Stack
from hpclm.parallel.collectives import gather_into, scatter_into
from hpclm.parallel.mesh import Mesh

ALIGN = 64  # values; CPU kernels then use the same vector instructions for a value as without sharding


class ShardedWeights:
    """The weights of a process in buckets, and this replica's shard of each."""

    def __init__(
        self,
        whole: Sequence[ShardedParameter],
        homes: Homes,
        leaves: Mapping[nn.Parameter, nn.Parameter],
        size_mb: float,
        device: torch.device,
        alone: Set[nn.Parameter] = frozenset(),
    ):
        """``whole`` and ``homes``: see whole_slices(). ``leaves``: see GradientBuckets. ``alone``: weights that share no bucket with others."""
        self.whole = whole
        self.leaves = leaves
        self.scatter = scatters(device)
        # one type for each bucket: its weights are gathered as one tensor
        kinds = {p: (leaf.dtype, p in alone) for p, leaf in leaves.items()}
        self.buckets = [
            ShardedBucket([(p, leaves[p]) for p in group], home)
            for home, members in homes
            for kind in dict.fromkeys(kinds[p] for p in members)
            for group in grouped((p for p in reversed(members) if kinds[p] == kind), size_mb)
        ]
        part_of = {p: (bucket, part) for bucket in self.buckets for p, part in bucket.shard_parameters()}
        self.weights = [
            self._part(weight, *part_of[weight.parameter]) if weight.parameter in part_of else weight
            for weight in whole
        ]
        """The parts that this process updates, and frozen weights whole."""

    def _part(self, weight: ShardedParameter, bucket: "ShardedBucket", part: nn.Parameter) -> ShardedParameter:
        """This replica's part of a weight."""
        held_by = bucket.local_range(weight.parameter)
        return replace(
            weight,
            parameter=part,
            begin=held_by(bucket.mesh.shard.rank)[0],
            replicas=bucket.mesh.replicate,
            local_range=held_by,
            holders=bucket.mesh.holders,
        )

    def gradients(self, dtype: torch.dtype, late: Collection[nn.Parameter] = ()) -> "ShardedBuckets":
        """The reduction of the gradients over the replicas; see GradientBuckets."""
        return ShardedBuckets(self.buckets, self.leaves, dtype, late, self.scatter)

    def gradient_norm(self, norm: GlobalNorm, summed_parts: bool) -> Tensor:
        """Global norm of the reduced gradients. ``norm``: the norm of the parts. ``summed_parts``: only the parts have all sums."""
        if self.scatter or summed_parts:
            return norm.of_gradients()
        # every replica has all gradients: the same order of additions as without sharding
        return GlobalNorm(self.whole, norm.compute, False, norm.split).of_gradients()

    def summed(self, parameter: nn.Parameter) -> Tensor:
        """The reduced gradients of the bucket of ``parameter``: all of them, or this replica's shard."""
        [bucket] = [bucket for bucket in self.buckets if any(p is parameter for p in bucket.parameters)]
        return bucket.buffer[bucket.summed]

    def gather(self) -> None:
        """Start to all-gather the updated weights, first layers first."""
        for bucket in reversed(self.buckets):
            bucket.gather()

    def arrive(self) -> None:
        """Wait for all weights."""
        _arrive(self.buckets)

    def wait_before_layers(self, stack: Stack) -> None:
        """Make each layer wait for its weights before it runs."""
        homes = {self.leaves[p]: bucket for bucket in self.buckets for p in bucket.parameters}
        for name, layer in stack.layers.items():
            # the final norm waits for the rest: the loss reads the output projection without calling its module
            needed = self.buckets if name == "norm" else {homes[p] for p in layer.parameters() if p.requires_grad}
            layer.register_forward_pre_hook(partial(_arrive, needed))


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
        late: Collection[nn.Parameter],
        scatter: bool,
    ):
        super().__init__(buckets, leaves, dtype, late)
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


def scatters(device: torch.device) -> bool:
    """Whether this device reduce-scatters gradients. CPUs all-reduce them, which costs gloo the same: the norm is then summed in the
    same order as without sharding, and results are equal to the last bit."""
    return device.type == "cuda"


def aligned(count: int, unit: int) -> int:
    """``count`` rounded up to a multiple of ``unit``."""
    return -(-count // unit) * unit
