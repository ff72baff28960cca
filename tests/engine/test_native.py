import json
import math
import os
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from hpclm import engine as engines
from hpclm.base.errors import ConfigError
from hpclm.config import BatchConfig, BudgetConfig, DataConfig, EngineConfig, ModelConfig, OptimConfig, RunConfig
from hpclm.config.optimizers import OPTIMIZERS, OptimizerKind
from hpclm.data.batches import Batches
from hpclm.data.synthetic import synthetic
from hpclm.model import count
from hpclm.node import environment
from hpclm.optim import adamw
from hpclm.optim.stability import LossScale
from hpclm.parallel.mesh import Compute
from tests import ranks, weights
from tests.forks import hpclm
from tests.runs import figures
from tests.states import Kept, state

CPU = torch.device("cpu")
GPT2 = {
    "vocab_size": 60,
    "vocab_multiple": 16,
    "layers": 4,
    "hidden": 32,
    "attention.heads": 4,
    "context": 16,
    "init_std": 0.1,
}
LLAMA = {
    **GPT2,
    "positions": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "tied": False,
    "attention.kv_heads": 2,
    "ffn": 48,
}
SHAPES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "sinusoidal-scaled": dict(GPT2, positions="sinusoidal", embed_scale=True, activation="relu", tied=False),
    "alibi-embed-norm": dict(GPT2, positions="alibi", embed_norm=True, activation="gelu"),
    "qk-norm-geglu": {**GPT2, "positions": "none", "attention.qk_norm": True, "activation": "geglu"},
    "llama-qk-norm": {**LLAMA, "attention.qk_norm": True},
}


def settings(model, engine=None, optim=None, batch=None, data=None):
    return RunConfig(
        model=ModelConfig.of(model),
        data=DataConfig(source="synthetic", **(data or {})),
        batch=BatchConfig(**(batch or dict(global_size=8, micro_size=4))),
        budget=BudgetConfig(steps=10),
        optim=OptimConfig(**(optim or dict(lr=3e-3, min_lr=1e-4))),
        engine=EngineConfig(**dict(dict(precision="fp32"), **(engine or {}))),
    )


def batches_of(config):
    source = synthetic(config.data, config.model.context, 7, config.model.vocab_size)
    return Batches(
        source.samples("train", 1000), config.plan(), config.data, config.model, source.eod, Compute(CPU, torch.float32)
    )


def engine_of(config, dtype=torch.float32):
    return engines.build(config.for_engine(), Compute(CPU, dtype))


def train(config, steps=4, dtype=torch.float32):
    engine, batches = engine_of(config, dtype), batches_of(config)
    results = [engine.train_step(batches.step(step * config.batch.global_size), 3e-3, step) for step in range(steps)]
    return engine, results


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_shape_counts_its_parameters_and_learns(shape):
    config = settings(shape)
    engine, results = train(config, 30)
    assert sum(p.numel() for p in engine.model.parameters()) == count.parameters(config.model)
    assert results[-1].loss < results[0].loss - 0.5
    assert all(p.grad is None for p in engine.model.parameters())


@pytest.mark.parametrize(
    "recompute",
    [dict(recompute="full"), dict(recompute="full", recompute_every=3), dict(recompute="selective")],
    ids=str,
)
@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_recomputation_changes_nothing_even_with_dropout(shape, recompute):
    shape = {**shape, "dropout": 0.2, "attention.dropout": 0.2}
    plain, stored = train(settings(shape))
    again, recomputed = train(settings(shape, recompute))
    assert recomputed == stored
    for (name, a), (_, b) in zip(plain.model.weights(), again.model.weights(), strict=True):
        assert torch.equal(a, b), name


def saved_bytes(engine, config):
    """Bytes that autograd keeps from one forward pass."""
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.data_ptr(), t.numel() * 4) and t, lambda t: t
    ):
        [batch, _] = batches_of(config).step(0)
        engine.model.train().head(batch.tokens)
    return sum(kept.values())


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_offloaded_activations_are_copied_and_change_nothing(recompute):
    config = settings(dict(LLAMA, dropout=0.1), dict(recompute=recompute))
    exact = train(config, 2)[1]
    engine, batches = engine_of(config), batches_of(config)
    kept = saved_bytes(engine, config)
    engine.model.offload = True
    assert saved_bytes(engine, config) < kept / 2
    for step, wanted in enumerate(exact):  # copies lie otherwise in memory, which may choose another kernel
        result = engine.train_step(batches.step(8 * step), 3e-3, step)
        assert (result.loss, result.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-6)


def test_activations_of_a_cpu_are_not_offloaded():
    with pytest.raises(ConfigError, match="computes on the CPU; leave it out"):
        engine_of(settings(GPT2, dict(offload_activations=True)))


def test_recomputation_keeps_less():
    shape = {**GPT2, "hidden": 64, "attention.dropout": 0.1}
    sizes = {}
    for name, engine in {
        "none": {},
        "selective": dict(recompute="selective"),
        "each": dict(recompute="full"),
        "two": dict(recompute="full", recompute_every=2),
    }.items():
        config = settings(shape, engine)
        sizes[name] = saved_bytes(engine_of(config), config)
    assert sizes["two"] < sizes["each"] < sizes["selective"] < sizes["none"]


def test_accumulated_micro_batches_are_one_large_batch():
    whole = train(settings(GPT2, batch=dict(global_size=8, micro_size=8)))
    parts = train(settings(GPT2, batch=dict(global_size=8, micro_size=2)))
    for a, b in zip(whole[1], parts[1], strict=True):
        assert (a.loss, a.grad_norm) == pytest.approx((b.loss, b.grad_norm), rel=1e-5)


def test_the_loss_is_the_mean_over_tokens_or_over_micro_batches_as_set():
    shape = dict(GPT2, vocab_size=20)
    masked = dict(eod_mask_loss=True)
    found = {}
    for norm in ("token", "microbatch"):
        config = settings(shape, batch=dict(global_size=8, micro_size=2, loss_norm=norm), data=masked)
        batches = batches_of(config).step(0)
        assert any(not b.loss_mask.all() for b in batches)
        engine = engine_of(config)
        with torch.no_grad():
            heads = [engine.model.eval().head(b.tokens).logits() for b in batches]
        nll = [
            torch.nn.functional.cross_entropy(h.flatten(0, 1), b.labels.flatten(), reduction="none")
            for h, b in zip(heads, batches)
        ]
        masks = [b.loss_mask.flatten().float() for b in batches]
        if norm == "token":
            wanted = sum((n * m).sum() for n, m in zip(nll, masks)) / sum(m.sum() for m in masks)
        else:
            wanted = sum((n * m).sum() / m.sum() for n, m in zip(nll, masks)) / len(masks)
        found[norm] = engine.train_step(batches, 1e-3, 0).loss
        assert found[norm] == pytest.approx(wanted.item(), rel=1e-5)
    assert found["token"] != pytest.approx(found["microbatch"], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_are_clipped_on_the_global_norm_whatever_the_loss_scale(dtype):
    config = settings(GPT2, optim=dict(lr=1.0, min_lr=0.1, clip=0.01, weight_decay=0.0, betas=(0.0, 0.0), eps=1.0))
    engine, batches = engine_of(config, dtype), batches_of(config).step(0)
    before = [w.parameter.detach().clone() for w in engine.weights]
    result = engine.train_step(batches, 1.0, 0)
    exact = engine_of(config).train_step(batches, 1.0, 0)
    assert result.grad_norm == pytest.approx(exact.grad_norm, rel=0.01) and exact.grad_norm > 0.05
    # with eps this large and no momentum, AdamW's update is g / (|g| + 1), nearly g itself
    moved = torch.cat([(a - w.parameter).flatten() for a, w in zip(before, engine.weights)]).norm().item()
    assert moved == pytest.approx(0.01, rel=0.05)


def test_a_step_is_adamw_as_published():
    optim = dict(lr=0.01, min_lr=0.001, clip=0.0, weight_decay=0.3, betas=(0.7, 0.8), eps=1e-2)
    config = settings(GPT2, optim=optim)
    engine, batches = engine_of(config), batches_of(config)
    twin = engine_of(config)
    twin.load(Kept(state(engine)), engine.scalars())
    m, v = {}, {}
    for step, lr in enumerate((0.01, 0.002), 1):
        micro = batches.step(8 * (step - 1))
        heads = [twin.model.train().head(b.tokens).logits().flatten(0, 1) for b in micro]
        loss = sum(torch.nn.functional.cross_entropy(h, b.labels.flatten()) for h, b in zip(heads, micro)) / len(micro)
        gradients = torch.autograd.grad(loss, list(twin.model.parameters()))
        with torch.no_grad():
            for (name, p), g in zip(twin.model.weights(), gradients):
                m[name] = 0.7 * m.get(name, 0) + 0.3 * g
                v[name] = 0.8 * v.get(name, 0) + 0.2 * g * g
                p -= lr * (0.3 if p.ndim > 1 else 0.0) * p
                p -= lr * (m[name] / (1 - 0.7**step)) / ((v[name] / (1 - 0.8**step)).sqrt() + 1e-2)
        engine.train_step(micro, lr, step - 1)
        for (name, ours), (_, theirs) in zip(engine.model.weights(), twin.model.weights(), strict=True):
            assert torch.allclose(ours, theirs, atol=2e-5), (step, name)


@pytest.mark.parametrize("kind", ["dropout", "attention.dropout"])
def test_dropout_is_drawn_anew_each_step_and_only_in_training(kind):
    config = settings(dict(GPT2, **{kind: 0.3}), optim=dict(lr=1e-3, min_lr=0.0))
    engine, batches = engine_of(config), batches_of(config).step(0)
    found = [engine.train_step(batches, 0.0, step).loss for step in (0, 1, 1)]
    plain = engine_of(settings(GPT2)).train_step(batches, 0.0, 0).loss
    assert found[0] != found[1] == found[2]
    assert plain not in found and found[0] == pytest.approx(plain, rel=0.2)
    engine.model.train()
    assert engine.evaluate(batches) == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("policy, undecayed", {"matrices": {1}, "all": set(), "non_embedding": {1, 2}}.items())
def test_weight_decay_reaches_what_the_policy_says(policy, undecayed):
    config = settings(GPT2, optim=dict(decayed=policy, weight_decay=0.3))
    engine = engine_of(config)
    none = {"params": [], "weight_decay": 0.0}
    decayed, rest = sorted([*engine.optimizer.param_groups, none][:2], key=lambda group: -group["weight_decay"])
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert {p.ndim for p in rest["params"]} == undecayed
    assert len(decayed["params"]) + len(rest["params"]) == len(list(engine.model.parameters()))


def test_groups_set_learning_rate_and_decay_by_the_names_of_weights_and_later_ones_win():
    entries = [
        dict(match=r"norm|bias$", lr=0.5),
        dict(match=r"^tokens\.", weight_decay=0),
        dict(match=r"^norm\.", lr=2),
    ]
    config = settings(GPT2, optim=dict(lr=3e-3, min_lr=1e-4, weight_decay=0.3, groups=entries))
    engine, _ = train(config, 1)
    found = {
        p: (group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups for p in group["params"]
    }
    by_name = {weight.name: found[weight.parameter] for weight in engine.weights}
    assert by_name["tokens.weight"] == (3e-3, 0.0) and by_name["block1.mlp.up.weight"] == (3e-3, 0.3)
    assert by_name["block0.norm1.weight"] == by_name["block3.mlp.down.bias"] == (1.5e-3, 0.0)
    assert by_name["norm.weight"] == (6e-3, 0.0)


@pytest.mark.parametrize(
    "entry, message",
    [
        (
            dict(match="outptu", lr=2),
            r"'outptu'.* matches no weight that is trained; weights are tokens\.weight, .*block0\.norm1\.weight",
        ),
        (dict(match="", lr=0), "sets the learning rate of every trained weight to 0"),
        (dict(match="(", lr=2), "match is not a regular expression"),
        (dict(match="norm", rate=2), "unknown rate; an entry has match, and lr or weight_decay"),
        (dict(match="norm"), "needs match, a regular expression, and lr or weight_decay"),
        (dict(match="norm", lr=-1), "must be numbers of at least 0"),
    ],
)
def test_an_entry_of_groups_that_cannot_be_honoured_is_refused_by_name(entry, message):
    with pytest.raises(ConfigError, match=message):
        engine_of(settings(GPT2, optim=dict(groups=[entry])))


def test_padding_of_the_vocabulary_changes_nothing():
    curves = []
    for multiple in (1, 64):
        config = settings(dict(GPT2, vocab_multiple=multiple, vocab_size=60))
        engine = engine_of(config)
        with torch.no_grad():  # the same rows, whatever the padding drew
            engine.model.layers["tokens"].weight[:60] = (
                torch.randn(60, 32, generator=torch.Generator().manual_seed(1)) * 0.1
            )
            for name, layer in engine.model.layers.items():
                if name != "tokens":
                    for p in layer.parameters():
                        p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)
        batches = batches_of(config)
        curves.append([engine.train_step(batches.step(8 * s), 3e-3, s).loss for s in range(4)])
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.05), (torch.float16, 0.02)])
def test_half_precision_tracks_single(dtype, tolerance):
    exact = [r.loss for r in train(settings(GPT2), 12)[1]]
    engine, results = train(settings(GPT2), 12, dtype)
    assert [r.loss for r in results] == pytest.approx(exact, rel=tolerance)
    assert all(w.parameter.dtype == torch.float32 for w in engine.weights)
    assert not any(r.skipped for r in results)
    assert results[0].loss_scale == (65536.0 if dtype == torch.float16 else 1.0)


def test_a_saved_state_goes_on_bit_for_bit_with_dropout():
    config = settings({**GPT2, "dropout": 0.3, "attention.dropout": 0.3})
    batches = batches_of(config)
    engine, _ = train(config, 3)
    other = engine_of(config)
    other.load(Kept(state(engine)), engine.scalars())
    for step in range(3, 6):
        assert engine.train_step(batches.step(8 * step), 1e-3, step) == other.train_step(
            batches.step(8 * step), 1e-3, step
        )
    for (name, a), (_, b) in zip(engine.model.weights(), other.model.weights(), strict=True):
        assert torch.equal(a, b), name


class Mixed(torch.optim.Optimizer):
    """Momentum for matrices, moments for the rest, as a user's optimizer may keep them."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                kept = state.setdefault("momentum_buffer" if p.ndim > 1 else "exp_avg", torch.zeros_like(p))
                kept.mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] * kept)
                state["step"] = state.get("step", 0) + 1


def mixed(weights, optim):
    return Mixed(adamw.groups(weights, optim), dict(lr=optim.lr))


def test_an_optimizers_state_is_saved_under_the_names_that_it_gives_it(monkeypatch):
    kept = OptimizerKind(
        f"{__name__}:mixed",
        "",
        lambda placement: ["momentum_buffer" if placement.dimensions > 1 else "exp_avg"],
    )
    monkeypatch.setitem(OPTIMIZERS, "adamw", kept)
    config = settings(GPT2)
    engine, _ = train(config, 3)
    names = {name for name in state(engine) if name.startswith("optim.")}
    assert {"optim.momentum_buffer.tokens.weight", "optim.exp_avg.norm.weight"} < names
    assert len(names) == len(engine.weights)
    other, batches = engine_of(config), batches_of(config)
    other.load(Kept(state(engine)), engine.scalars())
    assert engine.train_step(batches.step(24), 1e-3, 3) == other.train_step(batches.step(24), 1e-3, 3)
    after = state(other)
    assert all(torch.equal(tensor, after[name]) for name, tensor in state(engine).items())


def test_the_loss_scale_is_part_of_the_saved_state():
    config = settings(GPT2)
    engine = engine_of(config, torch.float16)
    engine.scale = LossScale(8.0, 1, 5)
    other = engine_of(config, torch.float16)
    other.load(Kept(state(engine)), json.loads(json.dumps(engine.scalars())))
    assert other.scale == LossScale(8.0, 1, 5)


def test_weights_of_another_shape_are_refused_by_name():
    engine = engine_of(settings(GPT2))
    tensors = state(engine)
    tensors["model.norm.weight"] = torch.ones(1)
    del tensors["model.norm.bias"]
    with pytest.raises(ConfigError) as caught:
        engine_of(settings(GPT2)).load(Kept(tensors), engine.scalars())
    assert caught.value.problems == [
        "the checkpoint has no weight norm.bias (expected shape (32,))",
        "weight norm.weight has shape (1,) in the checkpoint, but this model expects (32,)",
    ]


def test_evaluation_is_the_mean_loss_and_changes_nothing():
    config = settings(dict(GPT2, dropout=0.5))
    engine, _ = train(config, 1)
    batches = batches_of(config).step(0)
    before = state(engine)
    with torch.no_grad():
        wanted = [
            torch.nn.functional.cross_entropy(
                engine.model.eval().head(b.tokens).logits().flatten(0, 1), b.labels.flatten()
            )
            for b in batches
        ]
    assert engine.evaluate(batches) == pytest.approx(torch.stack(wanted).mean().item(), rel=1e-5)
    assert engine.evaluate(batches) == engine.evaluate(batches)
    assert all(torch.equal(before[s.name], s.tensor) for s in engine.tensors())


def test_a_metric_that_an_engine_adds_is_written_under_its_name(tiny, tmp_path):
    hpclm("train", *tiny("run", "engine.name=tests.engine.sharded:Measured"), check=0)
    rows = figures(tmp_path / "run", "step", "loss", "perplexity")
    assert len(rows) > 1 and all(perplexity == pytest.approx(math.exp(loss)) for _, loss, perplexity in rows)


HEADER = Path(sysconfig.get_path("include"), "Python.h")


def losses_as_they_are_and_compiled(shape, folder):
    import torch._inductor.config as inductor

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # what another run has compiled is not taken
    os.environ[environment.PRECOMPILED_HEADERS] = "1"  # minutes faster
    inductor.compile_threads = 1  # each of its processes would load PyTorch
    return [[r.loss for r in train(settings(shape, engine))[1]] for engine in ({}, dict(compile=True))]


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") and HEADER.exists()), reason="no C++ compiler, or no Python.h")
@pytest.mark.parametrize(
    "shape", [dict(GPT2, layers=1), *(SHAPES[name] for name in ("gpt2", "llama"))], ids=["small", "gpt2", "llama"]
)
def test_compiled_blocks_give_the_same_losses(shape, tmp_path):
    # In a new process: PyTorch's C++ builder imports setuptools, which fails once pip or distutils is imported.
    [(exact, compiled)] = ranks.run(1, losses_as_they_are_and_compiled, shape, str(tmp_path))
    assert compiled == pytest.approx(exact, abs=1e-4)
    assert any(tmp_path.rglob("*.so"))


def test_initial_weights_follow_from_the_seed_and_the_layer_alone():
    short, long = (dict(weights.build(ModelConfig.of(dict(GPT2, layers=n)), seed=3).weights()) for n in (2, 4))
    for name in ("tokens.weight", "block1.attention.qkv.weight", "entry.table"):
        assert torch.equal(short[name], long[name])
    other = dict(weights.build(ModelConfig.of(GPT2), seed=4).weights())
    assert not torch.equal(other["tokens.weight"], long["tokens.weight"])
    assert not torch.equal(long["block0.mlp.up.weight"], long["block1.mlp.up.weight"])
    assert long["block0.mlp.up.weight"].std().item() == pytest.approx(0.1, rel=0.1)
    assert long["block0.mlp.down.weight"].std().item() == pytest.approx(0.1 / 8**0.5, rel=0.1)


def test_documents_in_a_sample_restart_positions_and_stay_apart_as_set():
    config = settings(
        dict(GPT2, vocab_size=20), data=dict(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    )
    batch = batches_of(config).step(0)[0]
    eod = config.model.vocab_size - 1
    for row in range(len(batch.tokens)):
        position = document = 0
        for column, token in enumerate(batch.tokens[row].tolist()):
            assert (batch.positions[row, column], batch.documents[row, column]) == (position, document)
            assert batch.loss_mask[row, column] == (token != eod)
            position, document = (0, document + 1) if token == eod else (position + 1, document)
    assert batch.documents.max() > 0


def test_flops_are_those_of_the_published_shapes():
    gpt2 = ModelConfig()
    assert count.flops_per_token(gpt2) == pytest.approx(6 * 123_532_032 + 6 * 12 * 768 * 1024, rel=0.001)
    assert count.flops_per_token(gpt2, causal=False) == pytest.approx(6 * 123_532_032 + 12 * 12 * 768 * 1024, rel=0.001)
    assert count.parameters(ModelConfig.of({"layers": 24, "hidden": 1024, "attention.heads": 16})) == 354_871_296
