"""Models of 2024 and later: transformers' own random weights compute the same here, and go back as they came."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.interop.huggingface import deepseek, families
from hpclm.interop.run import network
from tests.interop import made
from tests.interop.test_huggingface import louder, peer, peer_logits, swept

main = cli.function("convert")

SIZES = dict(hidden_size=48, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2, vocab_size=93)
SIZES |= dict(intermediate_size=80, max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=5000.0, factor=4.0, original_max_position_embeddings=16)
LLAMA3 = dict(rope_type="llama3", rope_theta=5000.0, factor=8.0, original_max_position_embeddings=16)
LLAMA3 |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
LINEAR = dict(rope_type="linear", rope_theta=5000.0, factor=8.0)
LONG = dict(
    rope_type="longrope", rope_theta=5000.0, short_factor=[1.0, 1.1, 1.3, 1.5], long_factor=[1.0, 2.0, 3.5, 4.0]
)
LONG3 = {**LONG, "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.0, 3.5], "partial_rotary_factor": 0.75}
PLAIN = dict(rope_type="default", rope_theta=500.0)
PADS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
ERNIE = dict(moe_num_experts=6, moe_k=2, moe_intermediate_size=32)
SIGMOID = dict(n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3, moe_intermediate_size=32)
GROUPS = dict(n_group=4, topk_group=2, routed_scaling_factor=2.5)
LATENT = dict(
    num_key_value_heads=6, kv_lora_rank=24, q_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10
)
DEEPSEEK = dict(**LATENT, **SIGMOID, first_k_dense_replace=1, **GROUPS)
DEEPSEEK2 = {**LATENT, **SIGMOID, "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
QWEN3_MOE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32)
THEIRS = {
    "Llama 3.1": ("Llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "Llama, wide heads": (
        "Llama",
        dict(head_dim=16, attention_bias=True, rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}),
    ),
    "Llama, YaRN whose ramp ends before it begins": (
        "Llama",
        dict(rope_parameters={**YARN, "beta_fast": 1, "beta_slow": 8}),
    ),
    "Qwen 3, YaRN not truncated, its factor from the lengths": (
        "Qwen3",
        dict(
            head_dim=16,
            rope_parameters={**YARN, "factor": None, "truncate": False, "mscale": 0, "attention_factor": None},
        ),
    ),
    "Llama, dynamic": ("Llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=5000.0, factor=2.0))),
    "Mistral": ("Mistral", dict(sliding_window=5, head_dim=16)),
    "Qwen 2": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=2)),
    "Qwen 2.5": ("Qwen2", dict(rope_parameters=YARN)),
    "Qwen 3": ("Qwen3", dict(head_dim=16, attention_bias=True)),
    "OLMo 2": ("Olmo2", PADS),
    "OLMo 3": (
        "Olmo3",
        dict(**PADS, sliding_window=5, rope_parameters=dict(full_attention=YARN, sliding_attention=PLAIN)),
    ),
    "OLMo 3, a window as long as the context": (
        "Olmo3",
        dict(**PADS, sliding_window=64, rope_parameters=dict(full_attention=YARN, sliding_attention=PLAIN)),
    ),
    "OLMo 3, unscaled": ("Olmo3", dict(**PADS, sliding_window=5)),
    "SmolLM 3": ("SmolLM3", dict(**PADS)),
    "SmolLM 3, windows": (
        "SmolLM3",
        dict(**PADS, use_sliding_window=True, sliding_window=5, no_rope_layers=[1, 0, 1, 1]),
    ),
    "Gemma 2": ("Gemma2", dict(head_dim=16, query_pre_attn_scalar=20, sliding_window=5)),
    "Gemma 3": (
        "Gemma3Text",
        dict(
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=5,
            rope_parameters=dict(full_attention=LINEAR, sliding_attention=PLAIN),
        ),
    ),
    "Apertus": ("Apertus", dict(**PADS, rope_parameters=LLAMA3)),
    "Granite": (
        "Granite",
        dict(embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22, attention_multiplier=0.0625),
    ),
    "Seed-OSS": ("SeedOss", dict(head_dim=16, attention_dropout=0.0, residual_dropout=0.0)),
    "GLM 4": ("Glm4", dict(head_dim=16, **PADS)),
    "Arcee": ("Arcee", dict(**PADS, rope_parameters=YARN)),
    "Phi 3": ("Phi3", dict(**PADS, sliding_window=9, original_max_position_embeddings=8, rope_parameters=dict(LONG))),
    "Phi 4 mini": ("Phi3", dict(**PADS, original_max_position_embeddings=64, rope_parameters=dict(LONG3))),
    "EXAONE 4": ("Exaone4", dict(sliding_window=5, rope_parameters=LLAMA3)),
    "EXAONE 4, no windows": ("Exaone4", dict(sliding_window=None, head_dim=16, layer_types=["full_attention"] * 4)),
    "EXAONE 4, a window as long as the context": ("Exaone4", dict(sliding_window=64)),
    "EXAONE 4, no rotary positions": ("Exaone4", dict(sliding_window=5, layer_types=["full_attention"] * 4)),
    "HyperCLOVA X": (
        "HyperCLOVAX",
        dict(
            embedding_multiplier=12.0,
            logits_scaling=0.125,
            residual_multiplier=0.22,
            attention_multiplier=0.0625,
            head_dim=16,
        ),
    ),
    "HyperCLOVA X, defaults": ("HyperCLOVAX", dict(logits_scaling=0.5, attention_bias=True)),
    "Jais 2": ("Jais2", PADS),
    "VaultGemma": ("VaultGemma", dict(head_dim=16, query_pre_attn_scalar=20, sliding_window=5)),
    "Granite SWA": (
        "GraniteSWA",
        dict(
            **PADS,
            embedding_multiplier=12.0,
            logits_scaling=8.0,
            residual_multiplier=0.22,
            attention_multiplier=0.0625,
            sliding_window=5,
        ),
    ),
    "Granite SWA, a base for each kind of layer": (
        "GraniteSWA",
        dict(
            **PADS,
            sliding_window=5,
            attention_multiplier=0.0625,
            layer_rope_theta=[0, 500.0, 500.0, 500.0],
            rope_parameters=YARN,
            head_dim=16,
        ),
    ),
    "Granite SWA, some layers without positions": (
        "GraniteSWA",
        dict(**PADS, sliding_window=5, attention_multiplier=0.0625, layer_rope_theta=[900.0, 0, 500.0, 500.0]),
    ),
    "CWM": ("Cwm", dict(**PADS, sliding_window=5, head_dim=16)),
    "Ministral": (
        "Ministral",
        dict(head_dim=16, sliding_window=5, layer_types=["full_attention", "sliding_attention"] * 2),
    ),
    "InternLM 3": ("InternLM3", dict(**PADS, head_dim=16, attention_bias=True, mlp_bias=True)),
    "nanochat": ("NanoChat", dict(rope_parameters=PLAIN)),
    "Mixtral": ("Mixtral", dict(num_local_experts=5, num_experts_per_tok=3)),
    "Mixtral, windows, wide heads, tied": (
        "Mixtral",
        dict(
            num_local_experts=4,
            sliding_window=5,
            head_dim=16,
            tie_word_embeddings=True,
            hidden_act="gelu",
            rope_parameters=YARN,
        ),
    ),
    "Qwen 3 MoE": ("Qwen3Moe", dict(**QWEN3_MOE, norm_topk_prob=True, head_dim=16)),
    "Qwen 3 MoE, not normalised, some layers dense": (
        "Qwen3Moe",
        dict(**QWEN3_MOE, mlp_only_layers=[0, 2], attention_bias=True, tie_word_embeddings=True),
    ),
    "Qwen 3 MoE, every second layer, windows": (
        "Qwen3Moe",
        dict(**QWEN3_MOE, decoder_sparse_step=2, use_sliding_window=True, sliding_window=5, rope_parameters=LLAMA3),
    ),
    "OLMoE": ("Olmoe", dict(**PADS, num_experts=6, num_experts_per_tok=3)),
    "OLMoE, normalised, tied": (
        "Olmoe",
        dict(**PADS, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, tie_word_embeddings=True),
    ),
    "gpt-oss": (
        "GptOss",
        dict(num_local_experts=5, num_experts_per_tok=3, head_dim=16, sliding_window=5, rope_parameters=YARN),
    ),
    "gpt-oss, other layers, no biases of attention, tied": (
        "GptOss",
        dict(
            num_hidden_layers=2,
            num_local_experts=4,
            head_dim=8,
            sliding_window=7,
            layer_types=["full_attention", "sliding_attention"],
            attention_bias=False,
            tie_word_embeddings=True,
            rope_parameters=PLAIN,
        ),
    ),
    "gpt-oss, no windows": (
        "GptOss",
        dict(num_local_experts=4, head_dim=8, layer_types=["full_attention"] * 4, rope_parameters=PLAIN),
    ),
    "ERNIE 4.5": ("Ernie4_5_Moe", dict(**ERNIE)),
    "ERNIE 4.5, every second of some layers, nothing shared, untied, wide heads": (
        "Ernie4_5_Moe",
        dict(
            **ERNIE,
            num_hidden_layers=7,
            moe_layer_start_index=2,
            moe_layer_end_index=5,
            moe_layer_interval=2,
            moe_num_shared_experts=0,
            head_dim=16,
            tie_word_embeddings=False,
        ),
    ),
    "ERNIE 4.5, YaRN, the last layers dense": (
        "Ernie4_5_Moe",
        dict(**ERNIE, moe_layer_start_index=0, moe_layer_end_index=1, moe_num_shared_experts=1, rope_parameters=YARN),
    ),
    "dots1": ("Dots1", dict(**SIGMOID)),
    "dots1, groups, windows, dense layers, biases": (
        "Dots1",
        dict(
            **{**SIGMOID, **GROUPS, "n_shared_experts": 2},
            norm_topk_prob=True,
            first_k_dense_replace=2,
            sliding_window=5,
            max_window_layers=1,
            attention_bias=True,
            head_dim=16,
        ),
    ),
    "dots1, other layers, tied": (
        "Dots1",
        dict(
            **SIGMOID,
            layer_types=["full_attention", "sliding_attention"] * 2,
            sliding_window=7,
            tie_word_embeddings=True,
            rope_parameters=LLAMA3,
        ),
    ),
    "GLM 4.5": ("Glm4Moe", dict(**SIGMOID, attention_bias=True, head_dim=16)),
    "GLM 4.5, groups, norms of q and k": (
        "Glm4Moe",
        dict(**{**SIGMOID, **GROUPS, "n_shared_experts": 2}, use_qk_norm=True, first_k_dense_replace=3, head_dim=16),
    ),
    "GLM 4.5, not normalised, all of each head rotated, tied": (
        "Glm4Moe",
        dict(
            **SIGMOID,
            norm_topk_prob=False,
            first_k_dense_replace=0,
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=1.0),
        ),
    ),
    "DeepSeek V3": ("DeepseekV3", DEEPSEEK),
    "DeepSeek V3, YaRN, biases, tied": (
        "DeepseekV3",
        dict(
            **{**DEEPSEEK, "n_shared_experts": 2, "norm_topk_prob": False},
            attention_bias=True,
            tie_word_embeddings=True,
            rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
        ),
    ),
    "DeepSeek V3, queries whole, values wide, one scale of YaRN": (
        "DeepseekV3",
        dict(
            **{**DEEPSEEK, "q_lora_rank": None, "v_head_dim": 24, "rms_norm_eps": 1e-4},
            attention_bias=True,
            rope_parameters={**YARN, "mscale_all_dim": 1.0},
        ),
    ),
    "DeepSeek V3, no experts": ("DeepseekV3", {**DEEPSEEK, "first_k_dense_replace": 4}),
    "DeepSeek V2": ("DeepseekV2", dict(**DEEPSEEK2, rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.7})),
    "DeepSeek V2 Lite": ("DeepseekV2", {**DEEPSEEK2, "q_lora_rank": None, "attention_bias": True, "n_group": 1}),
    "DeepSeek V2, all groups": (
        "DeepseekV2",
        dict(**DEEPSEEK2, topk_method="group_limited_greedy", n_group=4, topk_group=4, num_hidden_layers=2),
    ),
    "GLM 4.7 Flash": (
        "Glm4MoeLite",
        dict(**LATENT, **SIGMOID, mlp_layer_types=["sparse", "dense", "dense", "sparse"], attention_bias=True),
    ),
}


OTHER_CLASS = ("CWM", "Ministral")
"""Exported as the first class that covers the network: SmolLM 3."""


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def saved(transformers, kind, folder):
    """A model of transformers with random weights, saved in ``folder``."""
    name, more = THEIRS[kind]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **json.loads(json.dumps(more))})
    there = louder(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)).eval()
    for weight_name, weight in there.named_parameters():
        if "Gemma" in name and "norm" in weight_name:
            weight.data -= 1  # which it adds itself
    for tensor_name, tensor in there.state_dict().items():
        if tensor_name.endswith("e_score_correction_bias"):  # 0 in a new model
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(tensor_name))) * 0.1)
    there.save_pretrained(folder)
    return there


@pytest.mark.parametrize("kind", THEIRS)
def test_logits_are_the_same_here_and_after_the_way_back(kind, tmp_path, transformers, capsys):
    there = saved(transformers, kind, tmp_path / "hf")
    main([str(tmp_path / "hf"), str(tmp_path / "run")])
    made.close(made.logits(tmp_path / "run"), peer_logits(there))
    main([str(tmp_path / "run"), str(tmp_path / "back")])
    back = peer(tmp_path / "back")
    assert type(back) is type(there) or kind in OTHER_CLASS
    made.close(peer_logits(back), peer_logits(there))
    theirs = there.state_dict()
    for name, whole in back.state_dict().items():
        assert (whole - theirs[name]).abs().max() < 1e-6, name


def test_an_export_that_only_transformers_5_reads_as_intended_says_so(tmp_path, caplog, transformers):
    for kind, said in {"OLMo 3, unscaled": False, "OLMo 3": True}.items():
        saved(transformers, kind, tmp_path / kind / "hf")
        main([str(tmp_path / kind / "hf"), str(tmp_path / kind / "run")])
        main([str(tmp_path / kind / "run"), str(tmp_path / kind / "back")])
        assert ("load this export with transformers 5 or newer" in caplog.text) == said
    tree = json.loads((tmp_path / "OLMo 3, unscaled/back/config.json").read_text())
    assert tree["rope_theta"] == 500000.0 and tree["rope_scaling"] is None  # the keys of transformers 4


@pytest.mark.whole
@pytest.mark.parametrize("kind", THEIRS)
def test_every_key_of_config_json_is_either_followed_or_refused(kind, tmp_path):
    name, more = THEIRS[kind]
    answers = swept(name, {**SIZES, **json.loads(json.dumps(more))}, tmp_path)
    assert len(answers) > 40 and True in answers.values() and False in answers.values()


def test_a_part_of_each_head_is_refused_where_transformers_turns_all_of_it(tmp_path, transformers):
    saved(transformers, "Gemma 2", tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": rope}))
    with pytest.raises(ConfigError, match=r"model\.rope\.fraction=0\.5, which Gemma2ForCausalLM"):
        main([str(tmp_path / "hf"), str(tmp_path / "run")])


def test_a_first_token_whose_embedding_is_0_has_the_same_logits(tmp_path, transformers):
    there = saved(transformers, "Apertus", tmp_path / "none")
    there.get_input_embeddings().weight.data[made.TOKENS[0, 0]] = 0.0
    there.save_pretrained(tmp_path / "hf")
    main([str(tmp_path / "hf"), str(tmp_path / "run")])
    made.close(made.logits(tmp_path / "run"), peer_logits(there))


def test_scaled_positions_that_norms_after_the_rotation_undo_are_refused(tmp_path, transformers):
    config = transformers.NanoChatConfig(**SIZES, rope_parameters=YARN)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    with pytest.raises(ConfigError, match="rope_type=yarn, which scales q and k after their norms"):
        main([str(tmp_path / "hf"), str(tmp_path / "run")])


MTP = {
    "GLM 4.5": ["layers.4.eh_proj.weight", "layers.4.mlp.experts.0.up_proj.weight"],
    "DeepSeek V3": ["layers.4.eh_proj.weight", "layers.4.self_attn.kv_b_proj.weight"],
    "ERNIE 4.5": ["mtp_block.0.input_layernorm.weight", "mtp_linear_proj.0.weight"],
}


def add_tensors(folder, names):
    path = folder / "model.safetensors"
    save_file({**load_file(path), **{f"model.{name}": torch.ones(3) for name in names}}, path, {"format": "pt"})


@pytest.mark.parametrize("kind, names", MTP.items(), ids=MTP)
def test_layers_for_multi_token_prediction_are_left_out_and_named(kind, names, tmp_path, transformers, caplog):
    there = saved(transformers, kind, tmp_path / "hf")
    add_tensors(tmp_path / "hf", names)
    main([str(tmp_path / "hf"), str(tmp_path / "run")])
    listed = ", ".join(f"model.{name}" for name in names)
    assert f"multi-token prediction, which hpclm does not train, is left out: {listed}" in caplog.text
    made.close(made.logits(tmp_path / "run"), peer_logits(there))


def test_layers_beyond_those_that_config_json_has_are_refused(tmp_path, transformers):
    for kind, name in {"GLM 4.5": "layers.5.eh_proj.weight", "dots1": "layers.4.eh_proj.weight"}.items():
        saved(transformers, kind, tmp_path / kind)
        add_tensors(tmp_path / kind, [name])
        with pytest.raises(ConfigError, match=f"does not use: model.{name}"):
            main([str(tmp_path / kind), str(tmp_path / "run")])


def test_an_export_in_bf16_keeps_the_bias_of_the_choice_of_experts(tmp_path, transformers):
    there = saved(transformers, "GLM 4.5", tmp_path / "hf")
    main([str(tmp_path / "hf"), str(tmp_path / "run")])
    main([str(tmp_path / "run"), str(tmp_path / "back"), "--dtype", "bf16"])
    tensors = load_file(tmp_path / "back/model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(tensors[name], there.state_dict()[name]) and tensors["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind, name", [("DeepSeek V3", "DeepseekV3"), ("GLM 4.7 Flash", "Glm4MoeLite")])
def test_latent_attention_that_rotates_halves_goes_back_as_one_that_rotates_pairs(kind, name, tmp_path, transformers):
    there = saved(transformers, kind, tmp_path / "pairs")
    there.config.rope_interleave = False
    there.save_pretrained(tmp_path / "halves")
    main([str(tmp_path / "pairs"), str(tmp_path / "pairs_run")])
    main([str(tmp_path / "halves"), str(tmp_path / "run")])
    logits = peer_logits(there)
    made.close(made.logits(tmp_path / "run"), logits)
    assert (made.logits(tmp_path / "pairs_run") - logits).abs().max() > 0.1
    main([str(tmp_path / "run"), str(tmp_path / "back")])
    back = peer(tmp_path / "back")
    assert type(back).__name__ == f"{name}ForCausalLM" and back.config.rope_interleave
    made.close(peer_logits(back), logits)


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path, transformers):
    there = saved(transformers, "DeepSeek V3, YaRN, biases, tied", tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "kimi_k2"}))
    main([str(tmp_path / "hf"), str(tmp_path / "run")])
    made.close(made.logits(tmp_path / "run"), peer_logits(there))


@pytest.mark.parametrize("family", [family for family in families.WRITTEN if family not in deepseek.ALL_FAMILIES])
def test_no_other_class_covers_latent_attention(family):
    config = ModelConfig.of({**made.LLAMA, "attention.head_dim": 8, "attention.latent.kv_rank": 24})
    assert not family.covers(config)


IGNORED = {**YARN, "attn_factor": 0.9}
REFUSED = {
    "attn_factor": (
        "llama",
        dict(rope_scaling=IGNORED),
        "transformers ignores attn_factor with rope_type=yarn; remove",
    ),
    "Phi 3, linear": (
        "phi3",
        dict(rope_scaling=LINEAR),
        "Phi3Config of transformers refuses it: .*got linear",
    ),
    "Phi 3, dynamic": (
        "phi3",
        dict(rope_scaling={**LINEAR, "rope_type": "dynamic"}),
        "Phi3Config of transformers refuses it: .*got dynamic",
    ),
    "Phi 3, llama3": (
        "phi3",
        dict(rope_scaling=LLAMA3),
        "Phi3Config of transformers refuses it: .*got llama3",
    ),
    "Qwen 2, nested": (
        "qwen2",
        dict(rope_parameters=dict(full_attention=YARN)),
        "the same rotary positions in all layers",
    ),
    "OLMo 3, truncate": (
        "olmo3",
        dict(sliding_window=5, rope_parameters=dict(full_attention=YARN, sliding_attention=PLAIN, truncate=False)),
        "rope_parameters: truncate is not supported in a class with several kinds of layers",
    ),
    "Gemma 3, truncate": (
        "gemma3_text",
        dict(rope_parameters=dict(full_attention={**YARN, "truncate": False}, sliding_attention=PLAIN)),
        "rope_parameters: truncate is not supported",
    ),
    "Mistral, other layers": (
        "mistral",
        dict(layer_types=["full_attention"] * 4, sliding_window=5),
        "layer_types=.*hpclm does not know this key",
    ),
    "null": ("llama", dict(rms_norm_eps=None), "rms_norm_eps=null: LlamaConfig of transformers refuses it"),
    "not a number": ("granite", dict(logits_scaling="x"), "logits_scaling=x: GraniteConfig of transformers refuses it"),
    "heads": ("llama", dict(hidden_size=50), r"hidden size \(50\) is not a multiple of the number of attention heads"),
    "ERNIE, biases": ("ernie4_5_moe", dict(use_bias=True), "use_bias=true, but hpclm supports false"),
    "ERNIE, sigmoids": (
        "ernie4_5_moe",
        dict(moe_gate_act="sigmoid"),
        "moe_gate_act=sigmoid, but hpclm supports softmax",
    ),
    "ERNIE, interval": ("ernie4_5_moe", dict(moe_layer_interval=0), "moe_layer_interval=0 must be whole numbers"),
    "GLM 4, an unknown part of each head": (
        "glm4",
        dict(rope_parameters={**PLAIN, "partial_rotary_factor": None}),
        "partial_rotary_factor=null must be a finite number",
    ),
    "GLM, softmax": (
        "glm4_moe",
        dict(head_dim=16, scoring_func="softmax"),
        "scoring_func=softmax, but hpclm supports sigmoid",
    ),
    "GLM, greedy": (
        "glm4_moe",
        dict(head_dim=16, topk_method="greedy"),
        "topk_method=greedy, but hpclm supports noaux_tc",
    ),
    "GLM, nothing shared": (
        "glm4_moe",
        dict(head_dim=16, n_shared_experts=0),
        "n_shared_experts=0 must be a whole number",
    ),
    "dots1, dense layers": (
        "dots1",
        dict(n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=-1),
        "first_k_dense_replace=-1 must",
    ),
    "dots1, no groups": (
        "dots1",
        dict(n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, topk_group=0),
        "router_top_groups=0 must be at least 1",
    ),
    "GLM, no groups": ("glm4_moe", dict(head_dim=16, n_group=0), "router_groups=0 must be at least 1"),
    "DeepSeek V3, fewer heads of keys": (
        "deepseek_v3",
        {**DEEPSEEK, "num_key_value_heads": 2},
        "num_key_value_heads=2, but latent attention needs num_attention_heads=6",
    ),
    "DeepSeek V3, another width": (
        "deepseek_v3",
        dict(**DEEPSEEK, head_dim=20),
        "head_dim=20, but hpclm supports 8",
    ),
    "DeepSeek V3, usual attention": (
        "deepseek_v3",
        {**DEEPSEEK, "kv_lora_rank": 0},
        "kv_lora_rank=0 must be at least 1",
    ),
    "DeepSeek V3, softmax": (
        "deepseek_v3",
        dict(**DEEPSEEK, scoring_func="softmax"),
        "scoring_func=softmax, but hpclm supports sigmoid",
    ),
    "DeepSeek V3, every second layer": ("deepseek_v3", dict(**DEEPSEEK, moe_layer_freq=2), "moe_layer_freq=2, but"),
    "DeepSeek V3, a scale without YaRN": (
        "deepseek_v3",
        dict(**DEEPSEEK, rope_scaling={**LINEAR, "mscale_all_dim": 1.0}),
        "rope_parameters: mscale_all_dim with rope_type=linear, but hpclm supports it only with yarn",
    ),
    "DeepSeek V3, a part of each head": (
        "deepseek_v3",
        dict(**DEEPSEEK, rope_parameters={**PLAIN, "partial_rotary_factor": 0.5}),
        r"model\.rope\.fraction=0\.5, which DeepseekV3ForCausalLM",
    ),
    "DeepSeek V3, no groups": ("deepseek_v3", {**DEEPSEEK, "topk_group": 0}, "router_top_groups=0 must be at least 1"),
    "DeepSeek V2, groups by their best score": (
        "deepseek_v2",
        dict(**DEEPSEEK2, topk_method="group_limited_greedy", n_group=4, topk_group=2),
        "topk_method=group_limited_greedy with n_group=4: it chooses topk_group=2 groups by the best score of each",
    ),
    "DeepSeek V2, groups of an unknown number": (
        "deepseek_v2",
        dict(**DEEPSEEK2, topk_method="group_limited_greedy"),
        "topk_method=group_limited_greedy with n_group=None",
    ),
    "DeepSeek V2, V3's choice": ("deepseek_v2", dict(**DEEPSEEK2, topk_method="noaux_tc"), "topk_method=noaux_tc, but"),
    "DeepSeek V2, normalised": ("deepseek_v2", dict(**DEEPSEEK2, norm_topk_prob=True), "norm_topk_prob=true, but"),
    "DeepSeek V2, biases of MLPs": (
        "deepseek_v2",
        dict(**DEEPSEEK2, mlp_bias=True),
        "mlp_bias=true, but hpclm supports",
    ),
    "GLM 4.7 Flash, kinds of layers": (
        "glm4_moe_lite",
        dict(**LATENT, **SIGMOID, mlp_layer_types=["dense"]),
        "must be a list of dense and sparse, one for each layer",
    ),
    "GLM 4.7 Flash, dense layers that its class does not read": (
        "glm4_moe_lite",
        dict(**LATENT, **SIGMOID, first_k_dense_replace=2),
        "first_k_dense_replace=2, but this class reads mlp_layer_types=",
    ),
}


LACKS = {
    "another form of latent attention": "longcat_flash axk1",
    "attention to tokens that an indexer chooses": "deepseek_v32 glm_moe_dsa",
    "state-space, linear-attention or convolution layers": "kimi_linear jamba bamba granitemoehybrid qwen3_next lfm2_moe falcon_h1 mamba2",
    "gates on the results of attention": "afmoe",
    "a gate on the shared experts": "qwen2_moe",
    "sparse mixer": "phimoe",
    "factors on the inputs of experts": "llama4_text",
    "attention made of experts": "jetmoe",
    "clipped queries": "dbrx",
    "norms of queries and keys after their rotation": "hunyuan_v1_moe",
    "another form of experts": "granitemoe granitemoeshared flex_olmo minimax_m2 exaone_moe",
}


@pytest.mark.parametrize("what, kinds", LACKS.items())
def test_a_class_whose_arithmetic_hpclm_lacks_is_refused_with_what_is_missing(
    what, kinds, tmp_path, transformers, capsys
):
    for kind in kinds.split():
        transformers.CONFIG_MAPPING[kind]().save_pretrained(tmp_path / kind)
        assert cli.main(["convert", str(tmp_path / kind), str(tmp_path / "run")]) == 64
        said = capsys.readouterr().err
        assert (
            f"model_type={kind} is not supported: it has " in said and what in said and not (tmp_path / "run").exists()
        )


@pytest.mark.parametrize("kind, change, answer", REFUSED.values(), ids=REFUSED.keys())
def test_what_transformers_refuses_or_ignores_is_refused_by_name(kind, change, answer):
    with pytest.raises(ConfigError, match=answer):
        network(families.model_settings({"model_type": kind, **SIZES, **change}), [])


@pytest.mark.parametrize("name", ["gelu_fast", "gelu_accurate", "gelu_python_tanh", "gelu_python", "relu2"])
def test_every_name_of_an_activation_that_hpclm_has_is_read(name, transformers, tmp_path):
    config = transformers.GPT2Config(
        n_layer=2, n_embd=48, n_head=6, n_positions=16, vocab_size=93, activation_function=name
    )
    there = louder(transformers.AutoModelForCausalLM.from_config(config)).eval()
    there.save_pretrained(tmp_path / "hf")
    main([str(tmp_path / "hf"), str(tmp_path / "run")])
    made.close(made.logits(tmp_path / "run"), peer_logits(there))


def test_an_untied_folder_without_a_head_says_how_it_can_be_imported(transformers, tmp_path):
    saved(transformers, "Llama 3.1", tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": False}))
    with pytest.raises(ConfigError, match=r"no matrix for the output; give model\.tied=true"):
        main([str(tmp_path / "hf"), str(tmp_path / "run")])
    main([str(tmp_path / "hf"), str(tmp_path / "run"), "model.tied=true"])


def test_a_hidden_size_that_heads_do_not_divide_goes_to_a_class_that_takes_it(tmp_path, transformers):
    config = transformers.MistralConfig(**{**SIZES, "hidden_size": 40}, head_dim=8, sliding_window=None)
    there = louder(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)).eval()
    there.save_pretrained(tmp_path / "hf")
    main([str(tmp_path / "hf"), str(tmp_path / "run")])
    main([str(tmp_path / "run"), str(tmp_path / "back")])
    made.close(peer_logits(peer(tmp_path / "back")), peer_logits(there))


def test_one_description_says_which_layers_have_windows():
    config = ModelConfig.of(
        {"layers": 6, "positions": "rope", "attention.pattern": ["window", "window", "full"], "attention.window": 7}
    )
    assert [config.attention.kind(i) for i in range(6)] == ["window", "window", "full"] * 2
    with pytest.raises(ConfigError, match=r"needs model\.attention\.window"):
        ModelConfig.of({"positions": "rope", "attention.pattern": ["window"]})


@pytest.mark.parametrize(
    "network, why",
    {
        "sinks": (
            {"attention.sinks": True, "attention.qk_norm": True},
            "model.attention.sinks=true, but it needs false",
        ),
        "mixed": ({"norm_order": "post", "attention.qk_norm": True, "attention.score_cap": 30.0}, "score_cap"),
    }.values(),
)
def test_a_network_that_no_class_has_is_refused_with_the_reason(network, why):
    with pytest.raises(ConfigError, match=why):
        families.of_network(ModelConfig.of({**made.LLAMA, **network}))
