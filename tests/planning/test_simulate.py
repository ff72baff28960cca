"""A rank that is simulated on a fake GPU: it waits for nothing within a step, and holds and sends what the planner's arithmetic says."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.model.layers import RowLinear
from hpclm.node.gpus import KINDS
from hpclm.optim.muon import newton_schulz
from hpclm.parallel.mesh import Mesh
from hpclm.planning import forecast, layout, ranks, suggest
from hpclm.planning.fake_gpu import fake_gpu
from hpclm.planning.matrices import exchange
from hpclm.planning.simulate import SHORT as SIMULATED_MICRO_BATCHES
from hpclm.planning.simulate import build_engine, micro_batch, simulate
from tests.forks import hpclm

# what the fake GPU claims to have, so that the loss chooses the same number of tokens
KIND = replace(KINDS["H200"], memory=128)
ALLOWED, APART = 0.03, 0.08
SHORT = ["model.layers=6"]
SMALL = [*SHORT, "batch.micro_size=8"]
DP, TP, PP = "job.gpus=8", "parallel.tensor=2", "parallel.pipeline=4"
SEVEN = [*SHORT, DP, "batch.micro_size=2"]
NODES = [DP, "job.nodes=2", "parallel.shard=8"]
HYBRID = [*SHORT, *NODES, "batch.micro_size=2"]
ONE = ["batch.micro_size=1", "batch.global_size=64", "model.context=128"]
ALONE = ["engine.name=fsdp2", "batch.micro_size=1"]  # so there is nothing to shard
LONG = [*SHORT, DP, "parallel.context=4", "model.context=8192", "batch.micro_size=1", "batch.global_size=16"]
EXPERTS = [
    "model.experts.count=8",
    "model.experts.ffn=1024",
    "model.experts.pattern=[dense,experts,experts]",
    "batch.micro_size=2",
]
EXPERTS += [*SHORT, DP, "batch.global_size=64", "model.vocab_size=1000", "engine.loss_chunk=1024"]
EXPERTS += ["engine.name=native"]
LATENT = ["model.attention.head_dim=128", "model.attention.kv_heads=null", "model.attention.latent.kv_rank=512"]
LATENT += ["model.attention.latent.q_rank=768"]
STAGES = ["model.layers=8", "batch.micro_size=4", DP, PP, "batch.global_size=64", "engine.name=pipelining"]
# preset, settings, rank
LAYOUTS = {
    "native": ("gpt2-124m", SHORT, 0),
    "native, replicas": ("gpt-1b3", [*SMALL, DP], 7),
    "native, optimizer sharded": ("gpt2-124m", [*SHORT, DP, "engine.zero_stage=1"], 3),
    "native, optimizer sharded in groups": ("gpt2-124m", [*SHORT, *NODES, "engine.zero_stage=1"], 12),
    "native, compute gradients": ("gpt2-124m", [*SHORT, DP, "engine.gradients=compute"], 3),
    "native, tensor": ("gpt-1b3", [*SMALL, DP, TP], 5),
    "native, context": ("llama-1b", [*LONG, TP, "parallel.context=2"], 5),
    "native, context, recomputed": ("llama-1b", [*LONG, "engine.recompute=full"], 3),
    "fsdp2, context": ("llama-1b", [*LONG, "engine.name=fsdp2"], 7),
    "native, fp8": ("llama-1b", [*SMALL, "engine.fp8=rowwise", "batch.micro_size=4"], 0),
    "native, tensor, fp8": ("gpt-1b3", [*SMALL, DP, TP, "engine.fp8=tensorwise"], 5),
    "latent": ("llama-1b", [*SMALL, *LATENT, "batch.micro_size=4"], 0),
    "latent, tensor": ("llama-1b", [*SMALL, *LATENT, DP, TP, "batch.micro_size=4"], 5),
    "latent, context": ("llama-1b", [*LONG, *LATENT, TP, "parallel.context=2"], 5),
    "latent, experts over 4": ("llama-1b", [*EXPERTS, *LATENT, "parallel.expert=4", TP], 3),
    "native, selective": ("gpt-1b3", [*SMALL, "engine.recompute=selective"], 0),
    "native, recomputed": ("gpt-1b3", [*SMALL, "engine.recompute=full"], 0),
    "native, dropout": ("gpt2-345m", SHORT, 0),
    "native, one micro-batch": ("small", [], 0),
    "fsdp2": ("llama-7b", [*SEVEN, "batch.global_size=64"], 7),
    "fsdp2, one rank": ("gpt2-124m", ALONE, 0),
    "fsdp2, 512 ranks": ("llama-7b", [*SEVEN, "job.nodes=64", "parallel.shard=null"], 511),
    "fsdp2, stage 2": ("llama-7b", [*SEVEN, "engine.zero_stage=2"], 0),
    "fsdp2, tensor": ("llama-7b", [*SEVEN, TP], 0),
    "fsdp2, recomputed": ("llama-7b", [*SEVEN, "engine.recompute=full"], 0),
    "fsdp2, hybrid": ("llama-7b", [*HYBRID, "batch.global_size=128"], 9),
    "fsdp2, hybrid, stage 2": ("llama-7b", [*HYBRID, "engine.zero_stage=2"], 15),
    "fsdp2, hybrid, tensor": ("llama-7b", [*HYBRID, TP, "parallel.shard=4"], 3),
    "fsdp2, hybrid, deferred": ("llama-7b", [*HYBRID, "engine.defer_reduction=true"], 0),
    "fsdp2, hybrid, compute gradients": ("llama-7b", [*HYBRID, "engine.gradients=compute"], 0),
    "experts": ("llama-1b", EXPERTS, 0),
    "experts over 2": ("llama-1b", [*EXPERTS, "parallel.expert=2"], 5),
    "experts over 4, optimizer sharded": ("llama-1b", [*EXPERTS, "parallel.expert=4", "engine.zero_stage=1"], 3),
    "experts over 2, in groups": (
        "llama-1b",
        [*EXPERTS, "parallel.expert=2", "engine.zero_stage=1", "parallel.shard=4"],
        3,
    ),
    "experts, fsdp2": ("llama-1b", [*EXPERTS, "engine.name=fsdp2"], 3),
    "experts over 2, fsdp2": ("llama-1b", [*EXPERTS, "engine.name=fsdp2", "parallel.expert=2"], 3),
    "experts over 4, tensor": ("llama-1b", [*EXPERTS, "parallel.expert=4", TP], 3),
    "experts over 2, whole": ("llama-1b", [*EXPERTS, "parallel.expert=2", TP, "parallel.split_experts=false"], 3),
    "experts over 2, context": (
        "llama-1b",
        [*EXPERTS, "parallel.expert=2", "parallel.context=2", "model.experts.shared_ffn=2048"],
        3,
    ),
    "experts over 4, recomputed": ("llama-1b", [*EXPERTS, "parallel.expert=4", "engine.recompute=full"], 3),
    "experts over 2, pipelining": (
        "llama-1b",
        [*EXPERTS, "parallel.expert=2", "parallel.pipeline=2", "engine.name=pipelining"],
        0,
    ),
    "experts over 2, pipelining, optimizer sharded": (
        "llama-1b",
        [*EXPERTS, "parallel.expert=2", "parallel.pipeline=2", "engine.name=pipelining", "engine.zero_stage=1"],
        0,
    ),
    "pipelining, optimizer sharded": ("gpt-1b3", [*STAGES, "engine.zero_stage=1"], 2),
    "pipelining, optimizer sharded, last stage": ("gpt-1b3", [*STAGES, "engine.zero_stage=1"], 7),
    "pipelining, first stage": ("gpt-1b3", STAGES, 0),
    "pipelining, second stage": ("gpt-1b3", STAGES, 2),
    "pipelining, last stage": ("gpt-1b3", STAGES, 7),
}
USUAL = (
    "native, optimizer sharded",
    "native, tensor",
    "native, fp8",
    "fsdp2, 512 ranks",
    "experts over 4, optimizer sharded",
    "pipelining, second stage",
    "pipelining, optimizer sharded, last stage",
)
PRESETS = [path.stem for path in sorted(Path("configs").glob("*.yaml")) if path.stem != "gpt-13b-3d"]  # DeepSpeed
TINY = ["model.layers=2", "model.hidden=64", "model.attention.heads=4", "model.vocab_size=256", "model.context=32"]
TINY += ["batch.micro_size=2", "batch.global_size=16"]


def load(preset, words):
    words = ["engine.precision=bf16", "engine.compile=false", *words]
    return suggest.with_micro_size(config.load(f"configs/{preset}.yaml", words), KIND)


def sent(rank):
    """Bytes that a rank sends along each axis, if collectives are rings. pipeline: what is sent to neighbours, and summed with them."""
    axes = dict.fromkeys(("tensor", "context", "expert", "pipeline", "data", "replicate"), 0.0)
    for total in rank.collectives:
        axis = total.group.removeprefix("expert ")
        axis, ring = "data" if axis == "shard" else axis, (total.size - 1) / total.size
        times = {"allreduce": 2 * ring, "allgather": ring, "reduce_scatter": ring, "reduce": ring, "recv": 0.0}
        times["alltoall"] = ring
        axes[axis if axis in axes else "pipeline"] += total.bytes * times.get(total.kind, 1.0)
    return axes


def compare(preset, words, number):
    """The arithmetic against a simulated rank."""
    run = load(preset, words)
    planned, rank = forecast.predict(run, KIND), simulate(run, number)
    stage = number * run.parallel.pipeline // rank.world
    # fsdp2 gathers experts that are shared out apart from their block, which the planner does not know
    apart = run.engine.name == "fsdp2" and run.parallel.expert > 1
    allowed = APART if apart else ALLOWED
    assert planned.memory[stage].tensors == pytest.approx(sum(rank.memory.values()), rel=allowed)
    # a layer's experts wait once in each forward pass to learn how many rows are sent
    passes = min(rank.micro_batches, SIMULATED_MICRO_BATCHES) * (1 + (run.engine.recompute == "full"))
    waits = passes * (run.model.layers - run.model.dense_layers) * (run.parallel.expert > 1)
    assert rank.waits == waits or run.parallel.pipeline > 1  # whose micro-batches are numbered by a tensor of the host
    axes, volumes = sent(rank), asdict(planned.volumes[stage])
    for axis, size in axes.items():
        assert volumes[axis] == pytest.approx(size, rel=ALLOWED, abs=ALLOWED / 10 * sum(axes.values())), axis


@pytest.mark.parametrize(
    "preset, words, rank",
    [pytest.param(*row, id=name, marks=[] if name in USUAL else [pytest.mark.whole]) for name, row in LAYOUTS.items()],
)
def test_memory_and_communication_of_every_layout_are_the_planners_and_a_step_does_not_wait(preset, words, rank):
    compare(preset, words, rank)


@pytest.mark.parametrize(
    "preset, words, rank",
    [
        ("gpt2-124m", [*SHORT, DP, "engine.zero_stage=1"], 3),
        pytest.param("llama-7b", [*SEVEN, TP], 0, marks=pytest.mark.whole),
        pytest.param("gpt-1b3", STAGES, 2, marks=pytest.mark.whole),
        pytest.param("gpt-1b3", [*SHORT, DP, "job.nodes=8", *ONE], 5, marks=pytest.mark.whole),  # fullest as it gathers
    ],
    ids=["native", "fsdp2, tensor", "pipelining", "native, 64 replicas"],
)
def test_memory_with_muon_is_the_planners_and_a_step_does_not_wait(preset, words, rank):
    run = load(preset, [*words, "optim.name=muon"])
    planned, simulated = forecast.predict(run, KIND), simulate(run, rank)
    memory = planned.memory[rank * run.parallel.pipeline // simulated.world]
    assert memory.tensors == pytest.approx(sum(simulated.memory.values()), rel=ALLOWED)
    assert memory.optimizer == pytest.approx(simulated.memory["optimizer"], rel=ALLOWED)
    assert simulated.waits == 0 or run.parallel.pipeline > 1


@pytest.mark.parametrize(
    "preset, words",
    [
        ("gpt2-124m", [*SHORT, DP, "engine.zero_stage=1"]),
        pytest.param("gpt2-124m", SHORT, marks=pytest.mark.whole),
        pytest.param("llama-7b", [*SEVEN, TP], marks=pytest.mark.whole),
        pytest.param("gpt-1b3", STAGES, marks=pytest.mark.whole),
    ],
    ids=["native, sharded", "native", "fsdp2, tensor", "pipelining"],
)
def test_an_average_of_the_weights_takes_4_bytes_for_each_weight_that_a_rank_updates_and_a_step_does_not_wait(
    preset, words
):
    (planned, rank), (with_average, averaging) = (
        (forecast.predict(run, KIND).memory[0], simulate(run))
        for run in (load(preset, [*words, *more]) for more in ([], ["optim.ema=0.999"]))
    )
    assert averaging.memory["optimizer"] - rank.memory["optimizer"] == 4 * rank.updated
    assert with_average.optimizer - planned.optimizer == pytest.approx(4 * rank.updated, rel=1e-3)
    assert with_average.tensors == pytest.approx(sum(averaging.memory.values()), rel=ALLOWED)
    assert averaging.waits == rank.waits


@pytest.mark.parametrize(
    "words",
    [
        [DP, TP, "engine.zero_stage=1", "optim.split=false"],
        *(
            pytest.param(words, marks=pytest.mark.whole)
            for words in (
                [DP],
                [DP, TP, "job.nodes=2", "engine.name=fsdp2", "parallel.shard=4", "optim.newton_schulz_steps=3"],
                [DP, "engine.name=pipelining", "parallel.pipeline=2"],
            )
        ),
    ],
    ids=["zero1, tensor", "native", "hybrid, tensor", "pipelining"],
)
def test_muons_products_and_messages_are_those_of_the_engine(words):
    words = [
        *TINY,
        "model.layers=6",
        "model.attention.kv_heads=2",
        "model.activation=swiglu",
        "optim.name=muon",
        *words,
    ]
    run = load("gpt2-124m", words)
    world, planned = run.job.nodes * run.job.gpus, forecast.predict(run, KIND)
    first = layout.stages(run.model, planned.layout)[0]
    costs = exchange(run.model, planned.layout, planned.costs.optim, planned.costs.zero, first)
    with fake_gpu(0, world):
        muon = build_engine(run, Mesh.build(0, world, run.parallel)).optimizer

    def flops(number):
        """Of one matrix, as PyTorch counts them."""
        matrix = muon.exchange.matrices[number]
        columns = matrix.shape[1]
        fused = muon._parts(matrix)
        with FlopCounterMode(display=False) as counter:
            for size in fused.rows:
                newton_schulz(torch.empty(fused.groups * size, columns, device="meta"), run.optim.newton_schulz_steps)
        return counter.get_total_flops()

    assert costs.flops == sum(max(map(flops, numbers)) for numbers in muon.exchange.rounds)
    sent = {c.kind: c.bytes * (c.size - 1) / c.size for c in simulate(run).collectives}
    assert costs.sent == pytest.approx(sent.get("alltoall", 0) + sent.get("broadcast", 0), rel=0.01)


@pytest.mark.whole
@pytest.mark.parametrize("preset", PRESETS)
def test_memory_and_communication_of_every_preset_are_the_planners(preset):
    compare(preset, [DP] if config.load(f"configs/{preset}.yaml").parallel.shard else [], 0)


@pytest.mark.parametrize(
    "words",
    (
        ["model.dropout=0.1"],
        ["model.dropout=0.1", "engine.recompute=full"],
        ["data.reset_attention_mask=true", "data.reset_position_ids=true"],
        ["model.positions=alibi"],
        ["job.gpus=2", "engine.zero_stage=1"],
        ["job.gpus=4", TP, "engine.name=fsdp2", "engine.zero_stage=2"],
    ),
    ids=str,
)
def test_the_host_waits_for_nothing_within_a_step(words):
    assert simulate(load("gpt2-124m", [*TINY, *words])).waits == 0


def test_weights_gradients_and_moments_of_a_rank_are_what_zero_says():
    rank = simulate(load("llama-7b", [*SHORT, DP, "batch.micro_size=1", "batch.global_size=16"]), 3)
    assert rank.parameters == 8 * rank.updated
    assert rank.memory["gradients"] == 4 * rank.updated < rank.memory["weights"]
    assert rank.memory["optimizer"] == pytest.approx(8 * rank.updated, rel=1e-3)


@pytest.mark.parametrize("name", ["native, optimizer sharded", "fsdp2", "experts over 4, optimizer sharded"])
def test_the_planner_knows_the_gradients_and_state_of_frozen_weights(name):
    preset, words, number = LAYOUTS[name]
    run = load(preset, [*words, "model.freeze=[tokens.*, block0.*, 'block?.mlp.*']"])
    planned, rank = forecast.predict(run, KIND).memory[0], simulate(run, number)
    assert rank.memory["gradients"] == pytest.approx(planned.gradients, rel=ALLOWED)
    assert rank.memory["optimizer"] == pytest.approx(planned.optimizer, rel=ALLOWED)
    assert sum(rank.memory.values()) < planned.tensors  # in which the activations are those of training all weights


def test_what_a_step_keeps_and_waits_for_by_mistake_is_seen(monkeypatch):
    """As if each layer kept an activation for no reason, and looked at it."""
    run, forward, kept = load("gpt2-124m", ["model.layers=2", "batch.global_size=64"]), RowLinear.forward, []
    before = simulate(run)

    def keeping(self, x):
        kept.append(x.float())
        kept[-1].sum().item()
        return forward(self, x)

    monkeypatch.setattr(RowLinear, "forward", keeping)
    after = simulate(run)
    assert sum(after.memory.values()) > 1.1 * sum(before.memory.values())
    assert (before.waits, after.waits) == (0, 3 * 2 * 2)


def test_submit_shows_any_rank_of_a_large_run_without_a_gpu(tmp_path):
    words = [
        "--nodes",
        "64",
        "--gpus",
        "8",
        "llama-7b",
        "data.source=synthetic",
        "model.layers=2",
        f"out={tmp_path}/run",
    ]
    ended = hpclm("submit", "--dry-run", "--ranks", "0,511", *words)
    assert "rank 0 of 512: engine fsdp2" in ended.stdout and "rank 511 of 512" in ended.stdout
    assert "over shard      (   8 ranks)" in ended.stdout and "over replicate  (  64 ranks)" in ended.stdout
    assert not (tmp_path / "run").exists()


def test_ranks_are_checked_and_need_a_dry_run():
    assert ranks.parse_ranks("0,8-10,511", 512) == [0, 8, 9, 10, 511]
    for text, message in (("512", "ranks 0 to 511"), ("one", "such as 0,511"), ("5-3", "ranks 0 to")):
        with pytest.raises(ConfigError, match=message):
            ranks.parse_ranks(text, 512)
    assert "--ranks is for --dry-run" in hpclm("submit", "--ranks", "0", "debug", check=2).stderr


LATENT = ["model.attention.head_dim=128", "model.attention.kv_heads=null", "model.attention.latent.kv_rank=512"]
LATENT += ["model.attention.latent.q_rank=768"]
STAGES = ["engine.name=pipelining", "job.gpus=2", "parallel.pipeline=2", "model.layers=4", "batch.micro_size=1"]


def test_every_schedule_but_one_is_simulated_and_a_block_that_reports():
    held = {}
    for schedule in ("gpipe", "1f1b", "interleaved"):
        chunks = ["parallel.chunks=2"] if schedule == "interleaved" else []
        held[schedule] = simulate(load("debug", [*STAGES, *chunks, f"parallel.schedule={schedule}"])).memory
    assert held["gpipe"]["activations"] > held["interleaved"]["activations"] >= held["1f1b"]["activations"] > 0
    own = simulate(load("debug", [*STAGES, "model.block=tests.model.test_reports:Balanced"]))
    assert own.memory["weights"] > held["1f1b"]["weights"]
    with pytest.raises(ConfigError, match="zero_bubble"):
        simulate(load("debug", [*STAGES, "parallel.chunks=2", "parallel.schedule=zero_bubble"]))


def test_an_engine_that_cannot_be_simulated_is_refused():
    for words in (["engine.name=deepspeed"], ["engine.name=fairscale"], ["engine.offload_activations=true"]):
        with pytest.raises(ConfigError, match="native, fsdp2, pipelining"):
            simulate(load("debug", words))


class Largest(TorchDispatchMode):
    """Notes the number of values of the largest tensor."""

    values = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **kwargs or {})
        self.values = max([self.values, *(t.numel() for t in tree_leaves(out) if torch.is_tensor(t))])
        return out


@pytest.mark.parametrize(
    "words, limit",
    [
        ([], 2**17 * 2048),
        pytest.param(["data.reset_attention_mask=true"], 2**34 / 16, marks=pytest.mark.whole),
    ],
    ids=["no whole sequence", "documents"],
)
def test_of_131072_tokens_no_process_of_8_holds_a_whole_sequence_or_all_pairs(words, limit):
    words = ["model.layers=1", "model.context=131072", "parallel.context=8", DP, "engine.loss_chunk=1024", *words]
    run = load("llama-1b", [*words, "batch.micro_size=1", "batch.global_size=1"])
    with fake_gpu(3, 8), Largest() as largest:
        mesh = Mesh.build(3, 8, run.parallel)
        build_engine(run, mesh).train_step([micro_batch(run).part(mesh.cp)], 1e-4, 0)
    assert 2048 * 32000 <= largest.values < limit
