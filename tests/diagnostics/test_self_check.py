"""The self-check at the start: what is broken on purpose is found, and replaced by what is right."""

import json
import os
import re
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpclm import config
from hpclm.base.errors import HpclmError
from hpclm.checkpoint import staging
from hpclm.config import ClusterConfig, ParallelConfig
from hpclm.diagnostics import known_numbers, self_check
from hpclm.diagnostics.known_numbers import lost_matrices
from hpclm.distributed.context import single
from hpclm.engine import base, matrix_exchange, models, native
from hpclm.engine.matrix_exchange import MatrixExchange
from hpclm.model import dropout, gpt, loss, stack
from hpclm.model.attention import scores
from hpclm.model.compiled import compiled
from hpclm.optim import muon
from hpclm.optim.adamw import AdamW
from hpclm.optim.muon import Muon
from hpclm.parallel import fp8, main_gradients
from hpclm.parallel.mesh import Compute, Mesh
from hpclm.parallel.placement import Fused
from tests import ranks
from tests.engine import sharded
from tests.engine.test_native import LLAMA, SHAPES, settings
from tests.forks import hpclm
from tests.parity import TINY, TYPES

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Nothing is remembered from another test, and attention is what it was after this one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


def checked(tmp_path, shape=LLAMA, dtype=torch.bfloat16, optim=None, **engine):
    """How a run computes after its check, and the report."""
    optim = dict(optim or {}, lr=3e-3, min_lr=1e-4, clip=100.0)  # more than the norm of the gradients
    run = settings(shape, engine=dict(dict(precision="auto"), **engine), optim=optim)
    run = replace(run, out=str(tmp_path), cluster=ClusterConfig(self_check=True))
    result = self_check.check_computation(run, single(), Compute(CPU, dtype, Mesh()))
    return result, json.loads((tmp_path / "self-check.json").read_text())


def compiled_wrongly(graph, inputs):
    """A compiler that has each graph give a little more."""
    return lambda *given: [1.1 * part if torch.is_tensor(part) else part for part in graph.forward(*given)]


USUAL = [(shape, "bf16") for shape in SHAPES] + [("gpt2", "fp32"), ("llama", "fp16")]


@pytest.mark.parametrize(
    "shape, precision",
    [
        pair if pair in USUAL else pytest.param(*pair, marks=pytest.mark.whole)
        for pair in product(SHAPES, ("fp32", "bf16", "fp16"))
    ],
)
def test_what_is_right_passes_as_it_is_set(shape, precision, tmp_path):
    result, report = checked(tmp_path, SHAPES[shape], TYPES[precision], precision=precision)
    assert (report["way"], report["problems"], result.background) == ("as set", [], True)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"attention.pattern": ["window"], "attention.window": 8},
        {"attention.score_cap": 5.0},
        {"attention.sinks": True},
    ],
    ids=str,
)
def test_on_a_gpu_flash_attention_is_tried_only_where_it_can_do_what_the_model_asks(more):
    ways = [way for way, _ in self_check._ways(settings(dict(LLAMA, **more)).for_engine(), torch.device("cuda"))]
    assert ("with FlashAttention" in ways) == (not more) and ways[-1] == "uncompiled, with plain attention"


def test_flash_attention_is_tried_compiled_and_uncompiled():
    ways = dict(self_check._ways(settings(LLAMA).for_engine(), torch.device("cuda")))
    assert list(ways) == [
        *("as set", "with FlashAttention", "uncompiled", "uncompiled, with FlashAttention"),
        "uncompiled, with plain attention",
    ]
    both = ways["uncompiled, with FlashAttention"]
    assert both.model.attention.kernel == "flash" and both.engine.compile is False


def attention_kernels(seen):
    """A compiler that notes which attention each forward graph has."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.compilers import nop

    def noted(graph, inputs):
        seen.append([str(node.target) for node in graph.graph.nodes if "attention" in str(node.target)])
        return nop(graph, inputs)

    return aot_autograd(fw_compiler=noted, bw_compiler=nop)


@pytest.mark.filterwarnings("ignore")  # of torch.compile
def test_what_was_compiled_for_one_way_is_not_used_in_the_next():
    """PyTorch does not look at the preferred kernels again; on a CPU, FlashAttention and plain attention stand for a GPU's."""
    seen, q = [], torch.randn(1, 2, 64, 16, requires_grad=True)

    def attend(x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    compiled = torch.compile(attend, backend=attention_kernels(seen), dynamic=False)
    for attention in ("auto", "auto", "math"):
        self_check._choose_kernels(settings({**LLAMA, "attention.kernel": attention}).for_engine(), CPU)
        compiled(q).sum().backward()
    first, again, plain = seen
    assert "flash" in first[0] and again == first and not any("flash" in name for name in plain)


@pytest.mark.parametrize(
    "dtype, kind",
    [("bf16", "bf16"), *(pytest.param("fp32", kind, marks=pytest.mark.whole) for kind in ("fp32", "bf16"))],
)
@pytest.mark.parametrize(
    "shape, own",
    [(LLAMA, dict(adjust="original")), (SHAPES["gpt2"], dict(split=False, nesterov=False))],
    ids=["llama", "gpt2"],
)
def test_muon_passes_as_it_is_set(shape, own, dtype, kind, tmp_path):
    own = dict(own, name="muon", newton_schulz_type=kind)
    _, report = checked(tmp_path, shape, TYPES[dtype], own, precision=dtype)
    assert (report["way"], report["problems"]) == ("as set", [])


@pytest.mark.filterwarnings("ignore")  # of torch.compile
def test_a_compiler_that_is_wrong_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(loss, "compiled", partial(compiled, backend="eager"))
    monkeypatch.setattr(stack, "compiled", partial(compiled, backend=compiled_wrongly))
    result, report = checked(tmp_path, compile=True)
    assert report["way"] == "uncompiled" and result.settings.engine.compile is False
    assert (
        "computed as set, " in report["problems"][0] and "times the error allowed for the type" in report["problems"][0]
    )


FP8 = dict(LLAMA, ffn=64)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("factor, way", [(1.0, "as set"), (1.2, "in bf16, not FP8")])
def test_products_in_fp8_that_a_kernel_makes_wrongly_are_made_in_bf16(recipe, factor, way, tmp_path, monkeypatch):
    def kernel(a, b, scale_a, _, scale_b, kind, use_fast_accum):
        return factor * ((a.bfloat16() * scale_a.bfloat16()) @ (b.bfloat16() * scale_b.bfloat16()))

    monkeypatch.setattr(fp8.F, "scaled_mm", kernel)
    monkeypatch.setattr(models, "FP8", lambda *given: fp8.FP8(*given[:3]))  # as on a GPU, not emulated
    result, report = checked(tmp_path, FP8, precision="bf16", fp8=recipe)
    assert report["way"] == way and (result.settings.engine.fp8 is None) == (factor != 1.0)
    assert len(report["problems"]) == (factor != 1.0)


def test_attention_that_is_wrong_is_not_used(tmp_path, monkeypatch):
    right = scores.dot_product_attention

    def kernel(q, k, v, how):
        y = right(q, k, v, how)
        plain = not torch.backends.cuda.flash_sdp_enabled()
        return y if plain else torch.cat([y[:, :, :-1], 1.5 * y[:, :, -1:]], 2)  # wrong in the last row of scores

    monkeypatch.setattr(scores, "dot_product_attention", kernel)
    result, _ = checked(tmp_path)
    assert result.settings.model.attention.kernel == "math"


def test_gradients_that_are_added_wrongly_in_place_are_added_in_the_plain_way(tmp_path, monkeypatch):
    def product(total, a, b):
        total.copy_(a.t() @ b)  # forgets the micro-batches before

    monkeypatch.setattr(native, "adds_in_place", lambda *_: True)
    monkeypatch.setattr(main_gradients, "_add_product", product)
    result, _ = checked(tmp_path)
    assert not result.settings.in_place


def test_gradients_that_are_added_rightly_in_place_stay_so(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "adds_in_place", lambda *_: True)
    result, report = checked(tmp_path)
    assert result.settings.in_place and report["way"] == "as set"


@pytest.mark.parametrize(
    "copied",
    [lambda tensor: tensor, lambda tensor: torch.cat([tensor[:1], 0.0 * tensor[1:]])],
    ids=["not at all", "one row"],
)
def test_snapshots_that_are_no_copies_of_the_state_are_taken_in_the_foreground(copied, tmp_path, monkeypatch):
    def take(self, shards):
        return [replace(shard, tensor=copied(shard.tensor)) for shard in shards]

    monkeypatch.setattr(staging.ShardSnapshot, "take", take)
    result, report = checked(tmp_path)
    assert not result.background and "snapshot" in report["problems"][0]


def test_other_bits_the_second_time_are_noticed(tmp_path, monkeypatch):
    right = scores.dot_product_attention
    monkeypatch.setattr(scores, "dot_product_attention", lambda *given: right(*given) + 1e-6 * torch.randn(()).item())
    draws = torch.Generator().manual_seed(0)
    monkeypatch.setattr(
        base, "seed_step", lambda *_: torch.manual_seed(int(torch.randint(1 << 30, (), generator=draws)))
    )
    with pytest.raises(HpclmError, match="has other bits the second time"):
        checked(tmp_path, dtype=torch.float32, precision="fp32")


def run_only(monkeypatch, where, what, fault):
    """Have the run's engine compute with a fault that plain steps and plain updates do not have, as a wrong kernel of a device is."""
    built, stepped, replayed = self_check.MiniatureRun.as_run, self_check.measured, self_check.MiniatureRun.replayed

    def faulty(right):
        def with_fault(*given, **more):
            with monkeypatch.context() as faults:
                if not more.get("plain"):
                    faults.setattr(where, what, fault)
                return right(*given, **more)

        return with_fault

    monkeypatch.setattr(self_check.MiniatureRun, "as_run", faulty(built))
    monkeypatch.setattr(self_check, "measured", faulty(stepped))
    monkeypatch.setattr(self_check.MiniatureRun, "replayed", faulty(replayed))


right_update = base.update
right_momentum, right_apply, right_exchange = Muon._update, Muon._apply, MatrixExchange.__call__


def clipped_too_little(optimizer, norm, clip, scale, bad):
    right_update(optimizer, norm * 0.9, clip, scale, bad)


def undecayed(optimizer, *given):
    """Forgets the weight decay of matrices, which is far less than what bf16 costs."""
    group = optimizer.param_groups[0]
    decay, group["weight_decay"] = group["weight_decay"], 0.0
    right_update(optimizer, *given)
    group["weight_decay"] = decay  # a group that has changed would be refused for that


def uncounted(optimizer, *given):
    """Takes every update for the first."""
    for entry in optimizer.state.values():
        entry["step"].zero_()
    right_update(optimizer, *given)


ADAMW = {
    "clip": (base, "update", clipped_too_little, "gradient of"),
    "lost": (base, "update", lambda *given: None, "gradient of .* is missing"),
    "decay": (base, "update", undecayed, "change of"),
    "count": (base, "update", uncounted, "updates after update 2 is off"),
}


@pytest.mark.parametrize("where, what, fault, message", ADAMW.values(), ids=ADAMW.keys())
def test_an_update_that_is_wrong_in_every_way_ends_the_run(where, what, fault, message, tmp_path, monkeypatch):
    run_only(monkeypatch, where, what, fault)
    with pytest.raises(HpclmError, match=f"(?s)self-check failed in every mode.*{message}") as error:
        checked(tmp_path)
    assert "cluster.self_check=false" in str(error.value)


def test_a_fused_kernel_that_is_wrong_wherever_it_runs_ends_the_run(tmp_path, monkeypatch):
    def fused_wrongly(optimizer):
        right_step(optimizer)
        for entry in optimizer.state.values() if optimizer.param_groups[0]["fused"] else ():
            entry["exp_avg_sq"].view(-1)[::100] *= 1.01

    right_step = AdamW.pytorch_step
    monkeypatch.setattr(AdamW, "pytorch_step", fused_wrongly)
    with pytest.raises(HpclmError, match=r"(?s)self-check failed in every mode.*exp_avg_sq of .* after update"):
        checked(tmp_path)


def without_nesterov(muon, *given):
    muon.optim = replace(muon.optim, nesterov=False)
    return right_momentum(muon, *given)


def matrices_undecayed(muon, number, *given):
    group = muon._group[muon.matrices[number].parameter]
    decay, group["weight_decay"] = group["weight_decay"], 0.0
    right_apply(muon, number, *given)
    group["weight_decay"] = decay


def one_left_out(exchange, numbers, held, work):
    """The last matrix of each round is used as it was."""
    return [*right_exchange(exchange, numbers, held, work)[:-1], held[-1].flatten()]


MUON = {
    "coefficients": (muon, "COEFFICIENTS", (3.4445, -4.7750, 2.0315 * 1.05), "change of"),
    "not split": (Muon, "_parts", lambda muon, matrix: Fused(1, (matrix.shape[0],)), "change of"),
    "nesterov": (Muon, "_update", without_nesterov, "change of"),
    "scale": (Muon, "_ratio", lambda *_: 0.3, "change of"),
    "decay": (Muon, "_apply", matrices_undecayed, "change of"),
    "exchange": (MatrixExchange, "__call__", one_left_out, "change of"),
}


@pytest.mark.parametrize("kind", ["bf16", pytest.param("fp32", marks=pytest.mark.whole)])
@pytest.mark.parametrize("where, what, fault, message", MUON.values(), ids=MUON.keys())
def test_a_wrong_update_of_muon_ends_the_run(where, what, fault, message, kind, tmp_path, monkeypatch):
    own = dict(name="muon", newton_schulz_type=kind)
    run_only(monkeypatch, where, what, fault)
    with pytest.raises(HpclmError, match=f"(?s)self-check failed in every mode.*({message})"):
        checked(tmp_path, optim=own)


TWO = {
    "fsdp2-muon": ["engine.name=fsdp2", "optim.name=muon", "engine.precision=bf16"],
    "zero1-muon": ["engine.zero_stage=1", "optim.name=muon", "engine.precision=fp32"],
    "tensor-muon": ["parallel.tensor=2", "optim.name=muon", "engine.precision=fp32"],
}
"""Layouts of two ranks."""
ON_ONE_RANK = {
    "fsdp2-muon": (Muon, "_update", without_nesterov),
    "zero1-muon": (Muon, "_update", without_nesterov),
}
"""Faults that only the second rank has."""


def on_two_ranks(folder):
    """What the check of two ranks says of groups, of matrices, of layouts, and of layouts with a fault on the second rank."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    rank, said, faulty = torch.distributed.get_rank(), {}, {}
    *_, context = sharded.made(TWO["fsdp2-muon"])
    for name, words in TWO.items():
        run = config.load(None, [*TINY, *words, "cluster.self_check=true", f"out={folder}"])
        compute = Compute(CPU, TYPES[run.engine.precision], Mesh.build(rank, 2, run.parallel))
        said[name] = self_check.check_computation(run, context, compute) and json.loads(
            (folder / "self-check.json").read_text()
        )
        if name in ON_ONE_RANK:
            where, what, fault = ON_ONE_RANK[name]
            with pytest.MonkeyPatch.context() as patches, pytest.raises(HpclmError) as error:
                if rank:
                    run_only(patches, where, what, fault)
                self_check.check_computation(replace(run, seed=2), context, compute)
            faulty[name] = str(error.value)
    return exchanged(), said, faulty


MESSAGES = {"sum": "all_reduce", "gather": "all_gather", "scatter": "start_scatter"}
"""How known numbers are sent, by the names that the check has for it."""


def sums():
    """What is wrong with the process group of two ranks; and what, where the second one loses what it sends in one of the ways."""
    rank = torch.distributed.get_rank()
    compute = Compute(CPU, torch.float32, Mesh.build(rank, 2, ParallelConfig()))
    whole, lossy = list(known_numbers.wrong_sums(compute)), {}
    for kind, name in MESSAGES.items():
        right = getattr(known_numbers, name)
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(known_numbers, name, lambda x, axis, right=right: right(x * (rank != 1), axis))
            lossy[kind] = list(known_numbers.wrong_sums(compute))
    return whole, lossy


def exchanged():
    """What is wrong with the exchange of two ranks; and what, where each keeps its own parts of matrices."""
    _, engine, _, _ = sharded.made(
        ["optim.name=muon", "model.layers=2", "engine.zero_stage=1", "engine.precision=fp32"]
    )

    def kept(sent, counts, like, axis):
        return [part if peer == axis.rank else 0 * part for peer, part in enumerate(right(sent, counts, like, axis))]

    right = matrix_exchange.all_to_all
    arrived = lost_matrices(engine.exchange)
    matrix_exchange.all_to_all = kept
    return arrived, lost_matrices(engine.exchange)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What ``on_two_ranks`` gives on each of them."""
    return ranks.run(2, on_two_ranks, tmp_path_factory.mktemp("two"))


def test_a_group_in_which_numbers_change_on_the_way_is_named():
    problem = "over the process group world (ranks [0, 1]): known numbers arrive changed"
    for whole, lossy in ranks.run(2, sums):
        assert whole == []
        assert lossy == {kind: [f"{kind} {problem}"] for kind in MESSAGES}


def test_a_matrix_whose_parts_are_not_exchanged_is_named(two_ranks):
    for (right, wrong), *_ in two_ranks:
        assert right == ""
        assert "do not arrive where" in wrong or "do not come back as" in wrong


@pytest.mark.parametrize("layout", TWO)
def test_two_ranks_pass_as_they_are_set(layout, two_ranks):
    for _, said, _ in two_ranks:
        assert (said[layout]["way"], said[layout]["problems"]) == ("as set", [])


@pytest.mark.parametrize("layout", ON_ONE_RANK)
def test_an_update_that_is_wrong_on_one_rank_only_ends_the_run(layout, two_ranks):
    for *_, faulty in two_ranks:
        assert re.search(r"(?s)self-check failed in every mode.* update \d is off", faulty[layout])


def test_what_was_checked_is_remembered_for_the_same_settings_only(tmp_path, monkeypatch):
    checked(tmp_path)
    monkeypatch.setattr(self_check, "_compared", lambda *_: pytest.fail("checked again"))
    _, report = checked(tmp_path)
    assert report["remembered"] and report["way"] == "as set"
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _, report = checked(tmp_path, SHAPES["gpt2"])
    assert not report["remembered"]


def test_dropout_is_drawn_alike_in_both_ways(tmp_path, monkeypatch):
    _, report = checked(tmp_path, dict(LLAMA, dropout=0.3), torch.float32, precision="fp32")
    assert report["way"] == "as set"
    right, plain, done = dropout.dropout, self_check.MiniatureRun.plainly, []

    def other(x, probability, keys=None, *where):
        return right(x, probability, keys + 1 if done and keys is not None else keys, *where)

    monkeypatch.setattr(
        self_check.MiniatureRun, "plainly", lambda miniature, exact: (plain(miniature, exact), done.append(exact))[0]
    )
    for module in (dropout, gpt):
        monkeypatch.setattr(module, "dropout", other)
    with pytest.raises(HpclmError, match="self-check failed in every mode"):
        checked(tmp_path, dict(LLAMA, dropout=0.31), torch.float32, precision="fp32")


LAYOUTS = {
    "zero1": (2, ["engine.zero_stage=1"]),
    "fsdp2": (2, ["engine.name=fsdp2", "engine.precision=bf16"]),
    "tensor": (2, ["parallel.tensor=2", "engine.precision=bf16"]),
    "context": (4, ["parallel.context=2", "parallel.tensor=2", "engine.precision=bf16"]),
    "hybrid": (4, ["engine.name=fsdp2", "parallel.shard=2"]),
    "pipelining": (4, ["engine.name=pipelining", "parallel.pipeline=2", "engine.precision=bf16"]),
    "interleaved": (2, ["engine.name=pipelining", "parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.chunks=2", "model.layers=4"]),
    "muon-zero1-tensor": (4, ["engine.zero_stage=1", "parallel.tensor=2", "optim.name=muon", "engine.precision=bf16"]),
    "muon-fsdp2": (2, ["engine.name=fsdp2", "optim.name=muon"]),
    "muon-hybrid": (4, ["engine.name=fsdp2", "parallel.shard=2", "optim.name=muon", "engine.precision=bf16"]),
    "muon-pipelining": (4, ["engine.name=pipelining", "parallel.pipeline=2", "optim.name=muon", "optim.newton_schulz_type=fp32"]),
    "fairscale": (2, ["engine.name=fairscale", "engine.precision=bf16"]),
    **{f"deepspeed{stage}": (2, ["engine.name=deepspeed", f"engine.zero_stage={stage}", "engine.precision=bf16"]) for stage in range(4)},
    "deepspeed-pipeline": (2, ["engine.name=deepspeed", "parallel.pipeline=2", "engine.precision=bf16"]),
}  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [name if name == "zero1" else pytest.param(name, marks=pytest.mark.whole) for name in LAYOUTS],
)
def test_every_engine_and_layout_is_checked(layout, tiny, tmp_path):
    size, words = LAYOUTS[layout]
    job = ["--gpus", str(size), "job.cluster=local", "cluster.self_check=true", "batch.micro_size=1", "budget.steps=1"]
    hpclm("submit", *tiny("out", *job, *words), check=0)
    report = json.loads((tmp_path / "out/self-check.json").read_text())
    assert (report["way"], report["problems"], report["background"]) == ("as set", [], True)


@pytest.mark.parametrize(
    "content, remembered",
    [
        ('{"way": "as set", "problems": [], "background": true}', True),
        ('{"way": "as set", "problems": [], "background": false}', True),
        ('{"way": "uncompiled", "problems": [], "background": true}', False),
        ('{"way": "as set", "problems": ["x"], "background": true}', False),
        ('{"way": "as set", "problems": [], "background": 3}', False),
        ('{"way": "as set"}', False),
        ("[]", False),
        ("{", False),
    ],
)
def test_only_a_check_in_which_all_was_right_is_remembered(content, remembered, tmp_path):
    (tmp_path / "x.json").write_text(content)
    assert (self_check._read(tmp_path / "x.json") is not None) == remembered
    assert self_check._read(tmp_path / "none.json") is None
