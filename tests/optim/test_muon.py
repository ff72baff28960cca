"""Muon's arithmetic is that of torch.optim.Muon, and of torch.optim.AdamW for what is no matrix of a block."""

import pytest
import torch

from hpclm.base.errors import ConfigError
from hpclm.config.optimizers import hidden_matrix
from hpclm.model.weights import of_block
from hpclm.optim.adamw import update
from hpclm.optim.muon import newton_schulz
from hpclm.parallel.placement import Fused
from tests.engine.test_native import GPT2, LLAMA, batches_of, engine_of, settings
from tests.parity import STYLES, trained
from tests.states import Kept, state


def reference(engine, optim):
    """PyTorch's optimizers for copies of an engine's weights, and these, by name: a fused weight is several."""
    copies, matrices, others = {}, [], {True: [], False: []}
    for weight in engine.weights:
        values = weight.parameter.detach().clone()
        parts = weight.placement.fused if optim.split else None
        if not hidden_matrix(weight.placement):
            copies[weight.name] = [torch.nn.Parameter(values)]
            others[values.ndim > 1] += copies[weight.name]
            continue
        copies[weight.name] = [torch.nn.Parameter(part.contiguous()) for part in cut(values, parts)]
        matrices += copies[weight.name]
    decays = [dict(params=others[True], weight_decay=optim.weight_decay), dict(params=others[False], weight_decay=0.0)]
    muon = torch.optim.Muon(
        matrices,
        weight_decay=optim.weight_decay,
        momentum=optim.momentum,
        nesterov=optim.nesterov,
        ns_steps=optim.newton_schulz_steps,
        adjust_lr_fn=optim.adjust,
    )
    return copies, [muon, torch.optim.AdamW(decays, betas=optim.betas, eps=optim.eps, fused=True)]


def cut(values, parts):
    """The matrices that a weight fuses."""
    if parts is None:
        return [values]
    return [part.flatten(0, 1) for part in values.unflatten(0, (parts.groups, -1)).split(parts.rows, 1)]


def divided(values, name, engine, optim):
    """A weight, or its gradient, as the reference has it."""
    [placement] = [weight.placement for weight in engine.weights if weight.name == name]
    return cut(values, placement.fused if optim.split and hidden_matrix(placement) else None)


@pytest.mark.parametrize(
    "model, own",
    [
        (GPT2, dict(split=False)),
        (LLAMA, dict()),
        (LLAMA, dict(adjust="original", momentum=0.9, nesterov=False, newton_schulz_steps=3)),
    ],
    ids=["whole", "split", "original"],
)
def test_fifty_steps_are_those_of_pytorchs_muon_and_adamw_to_the_last_bit(model, own):
    optim = dict(name="muon", lr=3e-3, min_lr=1e-4, clip=0.0, **own)
    config = settings(model, optim=optim)
    engine, batches = engine_of(config), batches_of(config)
    copies, optimizers = reference(engine, config.optim)
    step = engine.optimizer.step

    def both():
        for weight in engine.weights:
            parts = divided(weight.parameter.grad, weight.name, engine, config.optim)
            for copy, gradient in zip(copies[weight.name], parts, strict=True):
                copy.grad = gradient.clone()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = engine.optimizer.param_groups[0]["lr"]
            optimizer.step()
        step()

    engine.optimizer.step = both
    for number in range(50):
        engine.train_step(batches.step(8 * number), 3e-3 / (1 + number), number)
    for weight in engine.weights:
        found = divided(weight.parameter.detach(), weight.name, engine, config.optim)
        for values, copy in zip(found, copies[weight.name], strict=True):
            assert torch.equal(values, copy), weight.name
    names = {name for name in state(engine) if name.startswith("optim.")}
    assert {"optim.momentum_buffer.block0.mlp.up.weight", "optim.exp_avg.tokens.weight"} < names
    assert "optim.exp_avg.block0.mlp.up.weight" not in names


def test_a_skipped_step_changes_nothing_and_gradients_are_divided_by_scale_and_clipped():
    config = settings(LLAMA, optim=dict(name="muon", lr=3e-3, min_lr=1e-4))
    engines = [engine_of(config) for _ in range(3)]
    batches = batches_of(config)
    plain, scaled, skipping = (engine.optimizer for engine in engines)
    for engine in engines:
        engine.train_step(batches.step(0), 3e-3, 0)
    before = state(engines[2])
    for optimizer, factor, bad in ((plain, 1.0, 0.0), (scaled, 8.0, 0.0), (skipping, torch.nan, 1.0)):
        drawn = torch.Generator().manual_seed(1)
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = torch.randn(p.shape, generator=drawn) * factor
        update(optimizer, torch.tensor(2.0 * factor), 1.0, factor, torch.tensor(bad))
    found = [state(engine) for engine in engines]
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name
        assert torch.equal(before[name], found[2][name]), name
        assert not torch.equal(tensor, before[name]), name
    assert [engine.scalars()["optimizer_steps"] for engine in engines] == [2, 2, 1]


def test_the_parts_of_the_fused_weights_are_queries_keys_and_values_and_gate_and_up():
    config = settings(LLAMA)
    model = config.model
    rows = torch.arange((model.attention.heads + 2 * model.attention.groups) * model.head_width)
    heads = rows.view(model.attention.groups, -1, model.head_width)  # as attention has them
    table = of_block(model, model.blocks[0])
    fused = table["attention.qkv.weight"].placement.fused
    q, k, v = rows.view(fused.groups, -1).split(fused.rows, 1)
    assert torch.equal(q.reshape(model.attention.groups, -1, model.head_width), heads[:, :-2])
    assert torch.equal(k, heads[:, -2]) and torch.equal(v, heads[:, -1])
    assert table["mlp.up.weight"].placement.fused == Fused(1, (48, 48))
    assert table["mlp.down.weight"].placement.fused is None


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_an_orthogonalised_matrix_has_singular_values_near_1(kind):
    for shape in ((24, 40), (40, 24)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(kind)
        values = torch.linalg.svdvals(newton_schulz(matrix, 5).float())
        assert values.min() > 0.6 and values.max() < 1.3


def test_state_of_another_optimizer_is_refused_by_name_before_training():
    configs = [settings(GPT2, optim=dict(name=name, lr=3e-3, min_lr=1e-4)) for name in ("adamw", "muon")]
    made = [engine_of(config) for config in configs]
    for engine, config in zip(made, configs, strict=True):
        engine.train_step(batches_of(config).step(0), 3e-3, 0)
    for engine, other, lacks in ((*made, "exp_avg"), (*made[::-1], "momentum_buffer")):
        with pytest.raises(
            ConfigError, match=rf"no optim\.{lacks}\.block0\..*, which optim\.name=\w+ needs.*another optimizer"
        ):
            engine.load(Kept(state(other)), other.scalars())


@pytest.mark.parametrize(
    "size, words", [(2, ["engine.zero_stage=1"]), (2, ["engine.name=fsdp2"])], ids=["zero1", "fsdp2"]
)
def test_a_run_resumes_to_the_last_bit_and_another_layout_loads_the_same_state(size, words):
    words = [
        "engine.precision=fp32",
        "batch.micro_size=2",
        "model.layers=2",
        *STYLES["llama"],
        "optim.name=muon",
        *words,
    ]
    straight, half = trained(size, *words, steps=6), trained(size, *words, steps=3)
    rest = trained(size, *words, steps=6, first=3, saved=half)
    assert rest["losses"] == straight["losses"][3:]
    moved = trained(4, *words[:-1], "engine.name=fsdp2", "parallel.tensor=2", steps=3, first=3, saved=half)
    for name, tensor in straight["tensors"].items():
        assert torch.equal(rest["tensors"][name], tensor), name
        assert torch.equal(moved["tensors"][name], half["tensors"][name]), name


def test_engines_without_muon_refuse_it_by_name_and_its_settings_need_it():
    for engine in ("deepspeed", "fairscale"):
        with pytest.raises(ConfigError, match=f"engine '{engine}' does not support optim.name=muon"):
            settings(GPT2, engine=dict(name=engine), optim=dict(name="muon"))
    with pytest.raises(
        ConfigError, match=r"optim\.momentum=0\.9 has no effect with optim\.name=adamw; it applies to muon"
    ):
        settings(GPT2, optim=dict(momentum=0.9))
