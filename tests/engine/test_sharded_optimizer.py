"""The native engine with its optimizer sharded over the replicas."""

import math

import pytest
import torch

from hpclm.engine import sharded_buckets
from hpclm.engine.sharded_parameter import ShardedParameter, blocks, rectangles
from hpclm.parallel.mesh import Axis
from hpclm.parallel.placement import Fused, Placement
from tests import ranks
from tests.engine import sharded
from tests.parity import STYLES, alone, assembled, train, trained

ZERO = "engine.zero_stage=1"
PIPELINE = ["engine.name=pipelining", "parallel.pipeline=2", "batch.global_size=12"]
WORDS = ["batch.micro_size=2", "model.layers=2", "optim.clip=0.5"]


@pytest.mark.parametrize(
    "size, precision, more",
    [
        (2, "fp32", ["engine.bucket_mb=0.02"]),
        (2, "bf16", []),
        pytest.param(3, "fp32", ["batch.global_size=12"], marks=pytest.mark.whole),
        pytest.param(2, "fp16", ["scaler.initial=1048576", "scaler.hysteresis=1"], marks=pytest.mark.whole),
        pytest.param(4, "fp32", ["parallel.tensor=2", *STYLES["llama"]], marks=pytest.mark.whole),
        (4, "fp32", PIPELINE),
    ],
    ids=["fp32", "bf16", "three", "fp16", "tensor", "pipeline"],
)
def test_on_cpus_the_results_are_the_replicated_optimizers_to_the_last_bit(size, precision, more):
    words = [*WORDS, f"engine.precision={precision}", *more]
    wanted, found = trained(size, *words, steps=6), trained(size, *words, ZERO, steps=6)
    assert max(filter(math.isfinite, wanted["norms"])) > 0.5  # gradients are clipped
    exact = size != 3  # sums of two replicas
    for what in ("losses", "norms", "evaluation"):
        near = pytest.approx(wanted[what], abs=1e-5)
        assert repr(found[what]) == repr(wanted[what]) if exact else found[what] == near, what
    assert found["scalars"] == wanted["scalars"] and found["tensors"].keys() == wanted["tensors"].keys()
    if exact:
        assert all(torch.equal(found["tensors"][name], tensor) for name, tensor in wanted["tensors"].items())


def scattering(words, steps):
    """Train as on a GPU, with gradients reduce-scattered."""
    sharded_buckets.scatters = lambda device: True
    found = train(words, steps)
    return {what: found[what] for what in ("losses", "norms", "held")}


@pytest.mark.parametrize(
    "size, more",
    [
        (4, ["parallel.shard=2"]),
        pytest.param(2, [], marks=pytest.mark.whole),
        pytest.param(4, ["parallel.tensor=2"], marks=pytest.mark.whole),
        pytest.param(2, ["engine.precision=bf16", "engine.gradients=compute"], marks=pytest.mark.whole),
        (4, PIPELINE),
        pytest.param(6, [*PIPELINE, "parallel.schedule=zero_bubble"], marks=pytest.mark.whole),
    ],
    ids=["groups", "fp32", "tensor", "bf16", "pipeline", "zero bubble"],
)
def test_reduce_scattered_gradients_give_the_same_losses(size, more):
    words = ["engine.precision=fp32", *WORDS, *more]
    near = dict(abs=0.03 if "engine.precision=bf16" in more else 1e-5)
    wanted = alone(*(word for word in words if not word.startswith(("parallel", "engine.name", "engine.gradients"))))
    found = ranks.run(size, scattering, [*words, ZERO], 6)
    for each in found:
        assert each["losses"] == pytest.approx(wanted["losses"][:6], **near)
        assert each["norms"] == pytest.approx(wanted["norms"][:6], rel=0.1 if "engine.precision=bf16" in more else 1e-5)
    assert assembled(found).keys() == wanted["tensors"].keys()


def held(words):
    """Values of weights, of Adam's moments and of fp32 weights that a process of a run keeps, and those of the model."""
    run, engine, batches, _ = sharded.made(words)
    sharded.steps(run, engine, batches, 0, 1)
    moments = sum(state["exp_avg"].numel() for state in engine.optimizer.state.values())
    full = sum(p.numel() for p in engine.model.parameters())
    kept = sum(p.untyped_storage().nbytes() for p in engine.copies.masters.values())
    return moments, full, kept


def test_each_replica_keeps_its_part_of_the_moments_and_of_the_fp32_weights():
    words = ["engine.precision=bf16", "model.hidden=64", "model.layers=4", "batch.micro_size=1", ZERO]
    for moments, full, kept in ranks.run(4, held, words):
        assert moments == pytest.approx(full / 4, rel=0.1)
        assert kept < 4 * full / 50  # what the model's copies are made from is kept by the shards alone


def arrivals(words):
    """How many buckets are being gathered after a step, and when each layer runs in the next one; and how many there are."""
    run, engine, batches, _ = sharded.made(words)
    sharded.steps(run, engine, batches, 0, 1)

    def pending(*_):
        left.append(sum(bucket.gathering is not None for bucket in engine.shards.buckets))

    left = []
    pending()
    for layer in engine.model.layers.values():
        layer.register_forward_pre_hook(pending)
    sharded.steps(run, engine, batches, 1, 2)
    return left, len(engine.shards.buckets)


@pytest.mark.parametrize("tied", ["true", "false"])
def test_a_layer_waits_for_its_own_weights_only(tied):
    words = ["engine.precision=fp32", *WORDS, "batch.micro_size=4", "engine.bucket_mb=0.02", f"model.tied={tied}", ZERO]
    for left, buckets in ranks.run(2, arrivals, words):
        # tokens, entry, block0, block1, norm
        assert buckets == left[0] > left[1] > left[3] > left[4] >= left[5] == 0 and len(left) == 6


@pytest.mark.parametrize("shape", [(7,), (5, 3), (3, 4, 2), ()])
def test_a_run_of_values_is_a_few_blocks(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for begin in range(whole.numel()):
        for end in range(begin, whole.numel() + 1):
            parts = [
                whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))].flatten()
                for start, size in rectangles(shape, begin, end)
            ]
            assert torch.cat([torch.tensor([]), *parts]).tolist() == list(range(begin, end))
            assert len(parts) <= 2 * len(shape) + 1


@pytest.mark.parametrize(
    "placement",
    [Placement((8, 3), 0, Fused(1, (4, 4))), Placement((3, 8), 1), Placement((4, 5))],
    ids=["fused", "columns", "whole"],
)
def test_the_runs_of_tensor_parallel_slices_lie_where_the_whole_weight_has_them(placement):
    whole = torch.arange(float(torch.Size(placement.shape).numel())).view(placement.shape)
    for rank in range(2):
        tp = Axis(2, rank)
        local = torch.cat([piece_of(whole, piece) for piece in placement.pieces(tp)], placement.dim or 0).flatten()
        for begin in range(len(local)):
            run = local[begin : begin + 7]
            weight = ShardedParameter("w", torch.nn.Parameter(run.clone()), placement, begin=begin)
            for start, part in blocks(weight, begin, run, tp):
                inside = tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))
                assert torch.equal(whole[inside], part)


def piece_of(whole, piece):
    return whole[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))]
