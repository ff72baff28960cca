"""Experts that fsdp2 shards further, and pipelines with several stages on each process, some of them without experts."""

from math import prod

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import ranks
from tests.engine.sharded import made, steps
from tests.engine.test_experts import BALANCE, EXPERTS
from tests.parity import trained

WORDS = [*EXPERTS, *BALANCE["sequence and bias"], "batch.micro_size=1", "batch.global_size=8"]
STAGES = {"zero_bubble": "[dense,experts]", "interleaved": "[experts,dense]"}


@pytest.mark.parametrize("schedule", ["zero_bubble", pytest.param("interleaved", marks=pytest.mark.whole)])
def test_processes_whose_stages_have_no_experts_train_with_the_others(schedule):
    words = [*WORDS, "model.layers=4", f"model.experts.pattern={STAGES[schedule]}"]
    layout = ["engine.name=pipelining", "parallel.pipeline=2", "parallel.expert=2", "parallel.chunks=2"]
    alone, together = (
        trained(1, *words, steps=3),
        trained(4, *words, *layout, f"parallel.schedule={schedule}", steps=3),
    )
    for what in ("losses", "norms", "evaluation"):
        assert together[what] == pytest.approx(alone[what], rel=1e-5), what
    for name, right in alone["tensors"].items():
        assert torch.allclose(together["tensors"][name], right, rtol=1e-3, atol=1e-5), name


def held(words):
    """How many experts this process updates of each layer, after a step, and how many processes update the same ones."""
    run, engine, batches, _ = made(words)
    steps(run, engine, batches, 0, 1)
    weights = [weight for weight in engine.weights if weight.name.endswith("experts.up")]
    return {(weight.count * weight.shape[0] / prod(weight.shape), weight.replicas.size) for weight in weights}


@pytest.mark.parametrize(
    "more, share",
    [
        ([], (2, 1)),  # each part is sharded over the two ranks that have it
        (["parallel.shard=2"], (4, 2)),  # groups of two ranks have each part once
        pytest.param(
            ["engine.precision=bf16", "engine.zero_stage=2", "engine.recompute=full"], (2, 1), marks=pytest.mark.whole
        ),
    ],
    ids=["sharded", "in groups", "bf16, stage 2"],
)
def test_fsdp2_shards_experts_over_the_ranks_that_have_the_same_ones(more, share):
    assert ranks.run(4, held, [*WORDS, "parallel.expert=2", "engine.name=fsdp2", *more]) == [{share}] * 4


class Order(TorchDispatchMode):
    """The collectives that move weights (W), rows (r) and gradients (G), in the order in which the host starts them."""

    def __init__(self):
        super().__init__()
        self.seen = ""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kinds = {"_allgather_base_": "W", "alltoall_base_": "r", "_reduce_scatter_base_": "G"}
        self.seen += kinds.get(operation.__name__.split(".")[0], "") if "c10d" in operation.namespace else ""
        return operation(*args, **kwargs or {})


def order(words):
    run, engine, batches, _ = made(words)
    steps(run, engine, batches, 0, 1)
    with Order() as recorded:
        steps(run, engine, batches, 1, 2)
    return recorded.seen


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.whole)])
def test_fsdp2_gathers_experts_before_the_host_waits_for_those_of_the_block_before(recompute):
    words = ["batch.global_size=4", "parallel.expert=2", "engine.name=fsdp2", f"engine.recompute={recompute}"]
    [seen, *others] = ranks.run(4, order, [*WORDS, *words])
    # the rest of the model, a dense block, two blocks with experts; backwards the last two blocks, and at last the dense one
    assert (
        seen
        == {
            "none": "WWWWWW" + "rrrr" * 2 + "WWWW" + "rGrrG" + "W" + "rGrrG" + "GG",
            "full": "WWWWWW" + "rrrr" * 2 + "WWWW" + "rrrrrGrrG" + "W" + "rrrrrGrrG" + "GG",
        }[recompute]
    )
    assert others == [seen] * 3


def test_experts_that_fsdp2_shards_are_resumed_by_all_layouts():
    words, sharded = WORDS, ["parallel.expert=2", "engine.name=fsdp2"]
    full = trained(4, *words, *sharded, steps=4)
    half = trained(4, *words, *sharded, steps=2)
    same = trained(4, *words, *sharded, steps=4, first=2, saved=half)
    assert full["losses"][2:] == same["losses"]
    assert all(torch.equal(same["tensors"][name], right) for name, right in full["tensors"].items())
    for size, other in ((1, []), (4, ["parallel.expert=4", "engine.zero_stage=1"])):
        resumed = trained(size, *words, *other, steps=4, first=2, saved=half)
        assert resumed["losses"] == pytest.approx(full["losses"][2:], rel=1e-6)
        back = trained(4, *words, *sharded, steps=4, first=3, saved=trained(size, *words, *other, steps=3))
        assert back["losses"] == pytest.approx(full["losses"][3:], rel=1e-6)


def exhausted(words):
    """The notes on an error of a step whose tokens all go to the first two experts, and which runs out of memory on its way back."""
    run, engine, batches, _ = made(words)
    engine.router_state.bias[:, :2] = 9.0

    def backward(loss):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    engine.backward = backward
    with pytest.raises(torch.OutOfMemoryError) as caught:
        steps(run, engine, batches, 0, 1)
    return getattr(caught.value, "__notes__", [])


def test_an_out_of_memory_error_says_which_experts_received_too_many_rows():
    words = [*WORDS, "parallel.expert=2", "model.experts.router_groups=1", "model.experts.router_top_groups=1"]
    [[note], none] = ranks.run(2, exhausted, words)
    # each process sends the rows of 8 tokens, two for each token
    assert note.startswith("block2: the experts of rank 0 received 32 rows, 2.0 times the even load of 16") and not none


def graphs_of(words, count):
    """Losses of ``count`` steps, the graphs that PyTorch had compiled after each, and how many routings there were."""
    run, engine, batches, _ = made(words)
    losses, graphs, routings = [], [], set()
    for step in range(count):
        losses += [result.loss for result in steps(run, engine, batches, step, step + 1)]
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] if "engine.compile=true" in words else 0)
        routings.add(str(engine.router_state.counts.tolist()))
    return losses, graphs, len(routings)


@pytest.mark.parametrize(
    "size, more",
    [
        pytest.param(1, ["engine.precision=bf16"], marks=pytest.mark.whole),
        pytest.param(1, [], marks=pytest.mark.whole),
        pytest.param(1, ["engine.precision=fp16", "model.experts.ffn=22"], marks=pytest.mark.whole),
        pytest.param(2, ["engine.precision=bf16", "parallel.expert=2"], marks=pytest.mark.whole),
        pytest.param(4, ["parallel.expert=2", "engine.name=fsdp2"], marks=pytest.mark.whole),
    ],
    ids=["grouped", "fp32", "loop", "expert 2", "fsdp2"],
)
def test_other_routings_compile_nothing_again(size, more):
    words = [*WORDS, "model.experts.pattern=[experts]", "batch.global_size=4", *more]
    plain = ranks.run(size, graphs_of, words, 3)[0][0]
    for losses, graphs, routings in ranks.run(size, graphs_of, [*words, "engine.compile=true"], 50):
        assert routings == 50
        assert graphs[0] > 0 and set(graphs) == {graphs[0]}
        assert losses[:3] == pytest.approx(plain, rel=1e-6 if not any("precision" in word for word in more) else 5e-3)
