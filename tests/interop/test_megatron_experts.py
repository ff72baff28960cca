"""Mixtures of experts in the layouts that Megatron-LM writes, made here of known weights: rank files and torch_dist."""

from argparse import Namespace

import pytest
import torch

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig, load
from hpclm.config.section import leaves
from tests.interop import made
from tests.interop.test_megatron import CORE, FUSED_NORMS, LLAMA, LLAMA_ARGS, convert, cut, final, same_weights, save
from tests.interop.test_torch_dist import OUTSIDE, TRAINED, flattened, saved, write

DEEPSEEK = {
    **LLAMA, "experts.count": 8, "experts.per_token": 4, "experts.ffn": 24, "experts.shared_ffn": 40,
    "experts.pattern": ["dense", "experts", "experts", "experts"], "experts.router_score": "sigmoid", "experts.router_scale": 2.5,
    "experts.router_groups": 4, "experts.router_top_groups": 2, "experts.router_choice_bias": True, "experts.balance_bias": 0.001,
}  # fmt: skip
DEEPSEEK_ARGS = LLAMA_ARGS | dict(
    num_experts=8, moe_router_topk=4, moe_ffn_hidden_size=24, moe_shared_expert_intermediate_size=40, moe_layer_freq=[0, 1, 1, 1],
    moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5, moe_router_num_groups=4, moe_router_group_topk=2,
    moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.001, moe_router_load_balancing_type=["seq_aux_loss"],
    moe_aux_loss_coeff=[0.0], moe_grouped_gemm=True, moe_router_dtype="fp32",
)  # fmt: skip
MIXTRAL = {
    **LLAMA, "experts.count": 4, "experts.per_token": 2, "experts.balance_micro_batch": 0.02, "experts.router_z_loss": 0.001,
}  # fmt: skip
MIXTRAL_ARGS = LLAMA_ARGS | dict(
    num_experts=4, moe_router_topk=2, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.02, moe_z_loss_coeff=0.001,
)  # fmt: skip
GPT = {
    **{name: LLAMA[name] for name in ("vocab_size", "vocab_multiple", "layers", "hidden", "attention.heads", "context")},
    "experts.count": 4, "experts.per_token": 1, "experts.router_normalize": False, "experts.pattern": ["experts", "dense"],
    "experts.router_bias": True, "ffn": 64,
}  # fmt: skip
GPT_ARGS = {name: value for name, value in LLAMA_ARGS.items() if name in (
    "num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "padded_vocab_size", "ffn_hidden_size",
    "bias_gelu_fusion")} | dict(
    num_experts=4, moe_router_topk=1, moe_router_pre_softmax=True, moe_router_load_balancing_type="none", moe_layer_freq=2,
)  # fmt: skip
NETWORKS = {"deepseek": (DEEPSEEK, DEEPSEEK_ARGS), "mixtral": (MIXTRAL, MIXTRAL_ARGS), "gpt": (GPT, GPT_ARGS)}
OUTSIDE_EXPERTS = {
    "mlp.router.weight": "mlp.router.weight", "mlp.router.bias": "mlp.router.bias",
    "mlp.router.choice_bias": "mlp.router.expert_bias", "mlp.shared.up.weight": "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared.down.weight": "mlp.shared_experts.linear_fc2.weight",
}  # fmt: skip


def parted(name, whole, rank, size, gated):
    """A tensor rank's part of a weight of a layer; for those of experts, of [E, ...]."""
    if ".experts.up" in name:
        return torch.cat([half.chunk(size, 1)[rank] for half in whole.chunk(1 + gated, 1)], 1)
    if name.endswith(".experts.down"):
        return whole.chunk(size, 2)[rank]
    return cut(name.replace(".shared.", "."), whole, rank, size, gated).clone()


def sequential(name, part):
    """SequentialMLP: a module for each expert."""
    kind = "bias" if name.endswith("bias") else "weight"
    linear = "linear_fc1" if name.startswith("up") else "linear_fc2"
    return {f"local_experts.{number}.{linear}.{kind}": one.clone() for number, one in enumerate(part)}


def numbered(name, part):
    """TEGroupedMLP: a weight for each expert."""
    kind = "bias" if name.endswith("bias") else "weight"
    linear = "linear_fc1" if name.startswith("up") else "linear_fc2"
    return {f"{linear}.{kind}{number}": one.clone() for number, one in enumerate(part)}


def grouped(name, part):
    """GroupedMLP: [C, E x A], viewed as [E, C, A], and [E x F, C]."""
    turned = part.transpose(1, 2).contiguous()
    return {"weight1": turned.view(part.shape[2], -1)} if name == "up" else {"weight2": turned.view(-1, part.shape[1])}


FORMS = {"SequentialMLP": sequential, "TEGroupedMLP": numbered, "GroupedMLP": grouped}


def layer(weights, index, place, sizes, form, gated):
    """The tensors of a layer on a rank: ``place`` of (tensor, expert tensor, expert) ranks among ``sizes``."""
    (tensor, expert_tensor, expert), (tp, etp, ep) = place, sizes
    there = {}
    for name, whole in weights.items():
        inner = name.removeprefix(f"block{index}.")
        if inner == name:
            continue
        module, _, kind = inner.rpartition(".")
        if module == "mlp.experts":
            part = parted(name, whole.chunk(ep)[expert], expert_tensor, etp, gated)
            there |= {f"mlp.experts.{key}": x for key, x in form(kind, part).items()}
        else:
            theirs = OUTSIDE_EXPERTS.get(inner) or f"{CORE[module]}.{kind}"
            there[theirs] = parted(name, whole, tensor, tp, gated)
    return there


def rank_files(folder, weights, args, tp=1, etp=None, ep=1, pp=1, form=sequential):
    """mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt of the ranks that save: those of expert-data-parallel rank 0."""
    etp = etp or tp
    gated = args.get("swiglu", False)
    args = args | dict(
        tensor_model_parallel_size=tp,
        expert_tensor_parallel_size=etp,
        expert_model_parallel_size=ep,
        pipeline_model_parallel_size=pp,
    )
    for rank in range(etp * ep):
        place = rank % tp, rank % etp, rank // etp
        for stage in range(pp):
            count = args["num_layers"] // pp
            model = {}
            for number in range(count):
                tensors = layer(weights, stage * count + number, place, (tp, etp, ep), form, gated)
                model |= {f"decoder.layers.{number}.{name}": x for name, x in tensors.items()}
            if stage == 0:
                model |= {
                    OUTSIDE[n]: cut(n, weights[n], place[0], tp, False)
                    for n in OUTSIDE
                    if n in weights and n[:4] in ("toke", "entr")
                }
            if stage == pp - 1:
                model |= {f"decoder.final_layernorm.{kind}": x for kind, x in final(weights).items()}
                if "output.weight" in weights:
                    model["output_layer.weight"] = cut("output.weight", weights["output.weight"], place[0], tp, False)
            name = f"mp_rank_{place[0]:02d}" + f"_{stage:03d}" * (pp > 1) + f"_{place[2]:03d}" * (ep > 1)
            save(
                folder / name / "model_optim_rng.pt",
                {"args": Namespace(**args), "checkpoint_version": 3.0, "model": model},
            )


LAYOUTS = {
    "one rank": {}, "experts": dict(ep=4), "tensor": dict(tp=2), "tensor, experts": dict(tp=2, ep=2),
    "whole experts": dict(tp=2, etp=1, ep=2), "all": dict(tp=4, etp=2, ep=4, pp=2), "stages": dict(pp=2),
    "stages, experts": dict(pp=2, ep=2),
}  # fmt: skip


@pytest.mark.parametrize(
    "network, form, layout",
    [
        *(("deepseek", form, layout) for form in FORMS for layout in LAYOUTS),
        *(("mixtral", form, "all") for form in FORMS),
        ("gpt", "SequentialMLP", "tensor, experts"),
        ("gpt", "TEGroupedMLP", "stages, experts"),
    ],
)
def test_experts_of_all_ranks_are_put_together(network, form, layout, tmp_path):
    shape, args = NETWORKS[network]
    drawn = made.run(tmp_path / "source", shape)
    rank_files(tmp_path / "megatron", drawn, args, **LAYOUTS[layout], form=FORMS[form])
    imported(tmp_path, drawn, shape)


def imported(folder, drawn, shape):
    """Import the checkpoint, and compare weights, settings and logits with those of the source."""
    convert(folder / "megatron", folder / "run", "model.vocab_multiple=8")
    same_weights(folder / "run", drawn)
    found, wanted = (dict(leaves(config)) for config in (load(folder / "run/config.yaml").model, ModelConfig.of(shape)))
    differs = {name for name in wanted if found[name] != wanted[name]}
    assert differs <= {"dropout", "attention.dropout", "ffn", "experts.ffn"}
    assert torch.equal(made.logits(folder / "run"), made.logits(folder / "source"))


def keys(weights, uniform):
    """Weights by the keys of a torch_dist checkpoint: without ``uniform``, each layer has its own."""
    there = {OUTSIDE[name]: whole for name, whole in weights.items() if name in OUTSIDE}
    for name, whole in weights.items():
        block, _, inner = name.partition(".")
        if not block.startswith("block"):
            continue
        module, _, kind = inner.rpartition(".")
        if module == "mlp.experts":
            linear = "linear_fc1" if kind.startswith("up") else "linear_fc2"
            theirs = f"mlp.experts.experts.{linear}.{'bias' if kind.endswith('bias') else 'weight'}"
        elif f"{module}." in FUSED_NORMS:
            theirs = FUSED_NORMS[f"{module}."] + kind
        else:
            theirs = OUTSIDE_EXPERTS.get(inner) or f"{CORE[module]}.{kind}"
        if uniform:
            there.setdefault(f"decoder.layers.{theirs}", []).append(whole)
        else:
            there[f"decoder.layers.{block.removeprefix('block')}.{theirs}"] = whole
    return {name: torch.stack(whole) if isinstance(whole, list) else whole for name, whole in there.items()}


@pytest.mark.parametrize("network", NETWORKS)
def test_experts_of_a_distributed_checkpoint_are_divided(network, tmp_path):
    shape, args = NETWORKS[network]
    drawn = made.run(tmp_path / "source", shape)
    write(tmp_path / "megatron", keys(drawn, network == "mixtral"), {"args": Namespace(**args), "iteration": 7})
    imported(tmp_path, drawn, shape)


def with_optimizer(folder, network, form=lambda whole: whole, **more):
    """A torch_dist checkpoint with the optimizer's state; its weights."""
    shape, args = NETWORKS[network]
    drawn = made.Drawn(ModelConfig.of(shape)).weights
    tensors = weights = keys(drawn, network == "mixtral")
    for number, moment in enumerate(("exp_avg", "exp_avg_sq"), 2):
        trained = {key: x for key, x in weights.items() if "expert_bias" not in key}
        tensors |= {f"optimizer.state.{moment}.{key}": form(x * number) for key, x in trained.items()}
    optimizer = {"optimizer": {"state": {"common_step": torch.tensor(6.0)}, "param_groups": []}}
    write(folder, tensors, {"args": Namespace(**args | TRAINED | more), "iteration": 7, **optimizer})
    return drawn


@pytest.mark.parametrize("network", ["deepseek", "mixtral"])
def test_the_optimizers_state_of_experts_is_imported(network, tmp_path):
    drawn = with_optimizer(tmp_path / "iter", network)
    convert(tmp_path / "iter", tmp_path / "run", "model.vocab_size=96", "model.vocab_multiple=8")
    manifest, found = saved(tmp_path / "run")
    assert manifest.progress["step"] == 7
    for name, whole in drawn.items():
        assert torch.equal(found[f"model.{name}"], whole), name
        if name.endswith("choice_bias"):
            assert f"optim.exp_avg.{name}" not in found
            continue
        assert torch.equal(found[f"optim.exp_avg.{name}"], whole * 2), name
        assert torch.equal(found[f"optim.exp_avg_sq.{name}"], whole * 3), name


def test_flattened_optimizer_state_of_experts_is_left_out_and_the_weights_are_imported(tmp_path, caplog):
    drawn = with_optimizer(tmp_path / "iter", "mixtral", flattened)
    convert(tmp_path / "iter", tmp_path / "run", "model.vocab_multiple=8")
    assert "only the weights are imported" in caplog.text and "--dist-ckpt-optim-fully-reshardable" in caplog.text
    same_weights(tmp_path / "run", drawn)


REFUSED = {
    "DeepSpeed's": (dict(num_experts=[8]), "num_experts=[8]: experts of Megatron-DeepSpeed are not supported"),
    "capacity": (dict(moe_expert_capacity_factor=1.5), "moe_expert_capacity_factor=1.5 is not supported"),
    "jitter": (dict(moe_input_jitter_eps=0.01), "moe_input_jitter_eps=0.01 is not supported"),
    "gate": (dict(moe_shared_expert_gate=True), "moe_shared_expert_gate=True is not supported"),
    "narrow experts": (dict(moe_latent_size=16), "moe_latent_size=16 is not supported"),
    "alternating rows": (dict(moe_mlp_glu_interleave_size=32), "moe_mlp_glu_interleave_size=32 is not supported"),
    "new": (dict(moe_router_new=0.1), "moe_router_new=0.1: hpclm does not know this option"),
    "scores": (dict(moe_router_score_function="sqrtsoftplus"), "moe_router_score_function=sqrtsoftplus, but hpclm"),
    "sinkhorn": (dict(moe_router_load_balancing_type="sinkhorn"), "moe_router_load_balancing_type=sinkhorn is not"),
    "groups of logits": (dict(moe_router_score_function="softmax"), "without moe_router_pre_softmax: groups are chosen by logits"),
    "groups by four": (dict(moe_router_group_topk=1), "groups are chosen by the sum of 4 scores, but hpclm supports 2"),
    "layers": (dict(moe_layer_freq=[0, 1]), "moe_layer_freq=[0, 1] is not a list of 0 and 1 for each of the 4 layers"),
    "no layers": (dict(moe_layer_freq=0), "moe_layer_freq=0 is not supported"),
    "more experts": (dict(num_experts=16), "has no block1.mlp.experts.down.10"),
    "fewer experts": (dict(num_experts=4, moe_router_num_groups=2), "that this network does not use: block1.mlp.experts.down.4"),
    "no experts": (dict(num_experts=None), "that this network does not use: block1"),
    "inner size": (dict(moe_ffn_hidden_size=12), "gives block1.mlp.experts.up of shape (8, 48, 48), but the settings"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_mixtures_are_refused_by_name(case, tmp_path, capsys):
    change, answer = REFUSED[case]
    rank_files(tmp_path / "megatron", made.Drawn(ModelConfig.of(DEEPSEEK)).weights, DEEPSEEK_ARGS | change)
    assert cli.main(["convert", str(tmp_path / "megatron"), str(tmp_path / "run"), "model.vocab_size=96"]) == 64
    assert answer in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]


@pytest.mark.parametrize("missing", ["mp_rank_01_000", "mp_rank_01_001", "mp_rank_00_001"])
def test_a_missing_rank_of_experts_is_refused(missing, tmp_path):
    rank_files(tmp_path / "megatron", made.Drawn(ModelConfig.of(MIXTRAL)).weights, MIXTRAL_ARGS, tp=2, ep=2)
    (tmp_path / "megatron" / missing / "model_optim_rng.pt").unlink()
    with pytest.raises(ConfigError, match=r"block0\.mlp\.experts\.(up|down)\.\d.* (has shape|gives)"):
        convert(tmp_path / "megatron", tmp_path / "run", "model.vocab_size=96")


def test_a_matrix_that_does_not_hold_the_experts_is_refused(tmp_path):
    args = MIXTRAL_ARGS | dict(num_experts=5)
    rank_files(tmp_path / "megatron", made.Drawn(ModelConfig.of(MIXTRAL)).weights, args, form=grouped)
    with pytest.raises(
        ConfigError, match=r"mlp\.experts\.weight1 has shape \(48, 512\), but 5 experts are on each rank"
    ):
        convert(tmp_path / "megatron", tmp_path / "run", "model.vocab_size=96")


UNTRAINED = {
    "type": (
        "mixtral",
        dict(moe_router_load_balancing_type="global_aux_loss"),
        "=global_aux_loss with moe_aux_loss_coeff=0.02 is",
    ),
    "bias": (
        "deepseek",
        dict(moe_aux_loss_coeff=[0.01]),
        "moe_router_enable_expert_bias=True with moe_aux_loss_coeff=0.01 is",
    ),
    "groups": (
        "deepseek",
        dict(moe_aux_loss_coeff=[0.01]),
        "moe_router_group_topk=2 with moe_aux_loss_coeff=0.01 is not",
    ),
    "masked ends": ("mixtral", dict(eod_mask_loss=True), "eod_mask_loss=True with experts is not supported"),
}


@pytest.mark.parametrize("case", UNTRAINED)
def test_a_mixture_with_another_balance_gives_only_weights(case, tmp_path, capsys):
    network, change, answer = UNTRAINED[case]
    with_optimizer(tmp_path / "iter", network, **change)
    words = ["convert", str(tmp_path / "iter"), str(tmp_path / "run"), "model.vocab_size=96"]
    assert cli.main(words) == 64
    assert answer in capsys.readouterr().err
    assert cli.main([*words, "--weights-only"]) == 0
    assert saved(tmp_path / "run")[0].progress["step"] == 0
