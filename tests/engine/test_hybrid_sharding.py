"""Weights sharded within groups of replicas (parallel.shard), which hold copies of each other."""

import re
from collections import Counter
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.engine import sharded_buckets
from tests import ranks
from tests.engine import sharded

FSDP2, ZERO1, SHARD = "engine.name=fsdp2", "engine.zero_stage=1", "parallel.shard=2"
WORDS = ["engine.precision=fp32", "batch.micro_size=1", "model.layers=2"]
GROUPS, MICRO_BATCHES = 3, 2  # of fsdp2: two blocks and the rest


class Collectives(TorchDispatchMode):
    """Counts collectives of more than one value by kind and ranks."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if (
            "c10d" in operation.namespace
            and max(x.numel() for x in tree_leaves(args) if isinstance(x, torch.Tensor)) > 4
        ):
            group = dist.ProcessGroup.unbox(next(value for value in args if isinstance(value, torch.ScriptObject)))
            self.found[operation.__name__.split(".")[0], tuple(dist.get_process_group_ranks(group))] += 1
        return operation(*args, **kwargs or {})


def held(words):
    """The parts of weights and moments that this rank's optimizer has, and the collectives of a step on the way that a GPU takes."""
    sharded_buckets.scatters = lambda device: True
    run, engine, batches, _ = sharded.made([*WORDS, *words])
    sharded.steps(run, engine, batches, 0, 1)
    with Collectives() as seen:
        sharded.steps(run, engine, batches, 1, 2)
    weights = sum(weight.parameter.numel() for weight in engine.weights)
    moments = sum(state["exp_avg"].numel() for state in engine.optimizer.state.values())
    whole = sum(prod(placement.shape) for placement in engine.model.placements.values())
    return weights / whole, moments / whole, seen.found


def groups_of(rank):
    """The ranks that share out the weights with this one, and those that hold the same shard."""
    return ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]


@pytest.mark.parametrize("more", [[], ["engine.zero_stage=2"], ["engine.defer_reduction=true"]], ids=str)
def test_fsdp2_holds_its_part_of_a_group_and_sums_between_groups_once_a_step(more):
    for rank, (weights, moments, seen) in enumerate(ranks.run(4, held, [FSDP2, SHARD, *more])):
        assert weights == pytest.approx(1 / 2, abs=0.01) and moments == weights
        group, others = groups_of(rank)
        deferred, kept = "engine.defer_reduction=true" in more, "engine.zero_stage=2" in more
        assert seen == {
            ("_allgather_base_", group): GROUPS if kept else MICRO_BATCHES * (2 * GROUPS - 1),
            ("_reduce_scatter_base_", group): GROUPS * (1 if deferred else MICRO_BATCHES),
            ("allreduce_", others): GROUPS,
        }


def test_partial_sums_in_a_smaller_type_than_fp32_are_not_kept():
    more = [FSDP2, SHARD, "engine.precision=bf16", "engine.gradients=compute"]
    [(_, _, seen), *_] = ranks.run(4, held, more)
    assert seen["allreduce_", (0, 2)] == GROUPS * MICRO_BATCHES


def test_native_shards_its_optimizer_within_a_group_and_sums_between_groups_once_a_step():
    for rank, (weights, moments, seen) in enumerate(ranks.run(4, held, [ZERO1, SHARD, "engine.bucket_mb=1"])):
        assert weights == pytest.approx(1 / 2, abs=0.1) and moments == weights
        group, others = groups_of(rank)
        kinds = {kind: count for (kind, members), count in seen.items() if members in (group, others)}
        assert set(kinds.values()) == {1} and len(kinds) == len(seen) == 3


REFUSED = {
    "engine.name=native": "engine 'native' does not support parallel.shard=2 at engine.zero_stage=0; it supports it at stage 1 without a pipeline",
    "engine.name=deepspeed engine.zero_stage=3": "at engine.zero_stage=3; engines that do: fsdp2",
    "engine.name=fairscale": "engine 'fairscale' does not support parallel.shard=2 at engine.zero_stage=3; engines that do: native with engine.zero_stage=1, fsdp2",
    "engine.name=pipelining parallel.pipeline=2": "engine 'pipelining' does not support parallel.shard=2 at engine.zero_stage=0 with parallel.pipeline=2",
    "engine.name=fsdp2 parallel.shard=1": "parallel.shard=1 must be at least 2",
}


@pytest.mark.parametrize("words", REFUSED)
def test_an_engine_that_cannot_shard_in_groups_says_so(words):
    with pytest.raises(ConfigError, match=re.escape(REFUSED[words])):
        config.load(None, [SHARD, *words.split()])


def test_groups_must_divide_the_replicas_unless_one_is_enough():
    run = config.load(None, [FSDP2, "parallel.shard=8", "batch.global_size=48", "batch.micro_size=1"])
    with pytest.raises(ConfigError, match=r"12 data-parallel ranks cannot be divided into groups of parallel\.shard=8"):
        run.plan(12)
    assert [run.parallel.shard_size(run.plan(size).data) for size in (1, 4, 8, 16)] == [1, 4, 8, 8]
