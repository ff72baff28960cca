"""When, and in which type, gradients are summed over replicas and tensor-parallel ranks."""

import pytest
import torch
import torch.distributed as dist

from hpclm.engine import models
from tests import ranks
from tests.engine import sharded
from tests.parity import STYLES, alone, assembled, train

WORDS = ["batch.micro_size=1", "model.layers=2"]
TENSOR = ["parallel.tensor=2", "engine.precision=fp32", *WORDS]


def counted(words, later, steps=2):
    """Losses and shards of a run, and how many all-reduces ran, by the type of what they summed."""
    models.defers = lambda device: later
    calls = {}

    def counting(tensor, *given, **more):
        calls[str(tensor.dtype)] = calls.get(str(tensor.dtype), 0) + 1
        return reduce(tensor, *given, **more)

    reduce, dist.all_reduce = dist.all_reduce, counting
    found = train(words, steps)
    return {"losses": found["losses"], "norms": found["norms"], "held": found["held"], "calls": calls}


@pytest.mark.parametrize(
    "size, words",
    [
        (2, [*TENSOR, *STYLES["bloom"]]),
        pytest.param(2, [*TENSOR, *STYLES["llama"]], marks=pytest.mark.whole),
        pytest.param(4, [*TENSOR, "engine.name=fsdp2"], marks=pytest.mark.whole),
        pytest.param(4, [*TENSOR, "engine.name=pipelining", "parallel.pipeline=2"], marks=pytest.mark.whole),
    ],
    ids=["native-bloom", "native-llama", "fsdp2", "pipelining"],
)
def test_gradients_of_norms_and_biases_can_be_summed_once_a_step(size, words):
    each, once = (ranks.run(size, counted, words, later) for later in (False, True))
    assert once[0]["losses"] == pytest.approx(each[0]["losses"], abs=1e-5)
    assert once[0]["norms"] == pytest.approx(each[0]["norms"], rel=1e-5)
    wanted = assembled(each)
    for name, tensor in assembled(once).items():
        assert (tensor - wanted[name]).abs().max().item() < 1e-5, name
    fewer = each[0]["calls"]["torch.float32"] - once[0]["calls"]["torch.float32"]
    assert fewer > 2 * 8 * 4  # steps, micro-batches, and at least two in each of two blocks


def test_fsdp2_can_reduce_once_a_step():
    words = ["engine.name=fsdp2", "engine.precision=fp32", *WORDS]
    found = {
        defer: ranks.run(2, counted, [*words, f"engine.defer_reduction={defer}"], False)[0] for defer in (False, True)
    }
    wanted = alone("engine.precision=fp32", *WORDS)
    for each in found.values():
        assert each["losses"] == pytest.approx(wanted["losses"][:2], abs=1e-5)
        assert each["norms"] == pytest.approx(wanted["norms"][:2], rel=1e-5)


def reduced(words):
    """The type in which gradients are reduced, and how often in one step."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as library

    run, engine, batches, _ = sharded.made(words)
    types, before = [], library.foreach_reduce

    def recorded(*given, **more):
        types.append(next(value for value in [*given, *more.values()] if isinstance(value, torch.dtype)))
        return before(*given, **more)

    library.foreach_reduce = recorded
    sharded.steps(run, engine, batches, 0, 1)
    return types


def test_fsdp2_reduces_in_fp32_unless_it_is_told_otherwise():
    words = ["engine.name=fsdp2", "engine.precision=bf16", *WORDS]
    groups, micro_batches = 3, 4  # two blocks and the rest
    for more, count in (([], groups * micro_batches), (["engine.defer_reduction=true"], groups)):
        assert ranks.run(2, reduced, [*words, *more])[0] == [torch.float32] * count


def buckets(words):
    """Losses of two steps, and the types that were sent."""
    run, engine, batches, _ = sharded.made(words)
    types, reduce = set(), engine.gradients._reduce

    def recorded(bucket):
        reduce(bucket)
        types.add(str(bucket.sent.dtype))

    engine.gradients._reduce = recorded
    return [result.loss for result in sharded.steps(run, engine, batches, 0, 3)], types


def test_native_sends_gradients_in_bf16_if_it_is_told_to():
    words = ["engine.precision=bf16", *WORDS]
    exact, types = ranks.run(2, buckets, words)[0]
    assert types == {"torch.float32"}
    found, types = ranks.run(2, buckets, [*words, "engine.gradients=compute"])[0]
    assert types == {"torch.bfloat16"}
    assert found != exact and found == pytest.approx(exact, abs=0.01)
