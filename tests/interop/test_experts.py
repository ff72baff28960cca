"""Models with experts go to transformers and come back: the same logits and text there, the same bits here."""

import json
import weakref
from math import log

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig, load
from hpclm.config.checks import value_at
from hpclm.inference import generation, run_model, run_settings
from hpclm.inference.generation_settings import Sampling
from hpclm.interop.huggingface import expert_weights, families
from hpclm.interop.run import OnDemand, network
from hpclm.parallel.mesh import Compute
from tests.interop import made
from tests.interop.test_huggingface import convert, peer, peer_logits, weights

EXPERTS = {**made.LLAMA, "attention.kv_heads": 2, "experts.count": 5, "experts.per_token": 2, "experts.ffn": 32}
QWEN = {**EXPERTS, "attention.qk_norm": True, "experts.router_normalize": False}
GPT_OSS = {
    **EXPERTS,
    "activation": "swiglu_clamped",
    "attention.sinks": True,
    "experts.router_bias": True,
    "mlp_bias": True,
}
LATENT = {
    **made.LLAMA,
    "layers": 3,
    "attention.head_dim": 12,
    "attention.latent.kv_rank": 24,
    "attention.latent.q_rank": 20,
    "attention.latent.rope_dim": 8,
    "attention.latent.value_dim": 10,
}
YARN = {
    "rope_type": "yarn",
    "factor": "4.0",
    "original_max_position_embeddings": "4",
    "mscale": "0.7",
    "mscale_all_dim": "0.4",
}
SPLIT = {
    "experts.count": 8,
    "experts.per_token": 3,
    "experts.ffn": 32,
    "experts.shared_ffn": 64,
    "experts.pattern": ["dense", "experts", "experts"],
}
GROUPS = {"experts.router_groups": 4, "experts.router_top_groups": 2, "experts.router_scale": 2.5}
V3 = {**LATENT, **SPLIT, **GROUPS, "experts.router_score": "sigmoid", "experts.router_choice_bias": True}
V2 = {**LATENT, **SPLIT, "experts.router_normalize": False, "experts.router_scale": 1.5}
NETWORKS = {
    "Mixtral": ("MixtralForCausalLM", {**EXPERTS, "experts.balance_micro_batch": 0.1, "experts.router_z_loss": 0.01}),
    "Mixtral, windows, inner size of the MLP": ("MixtralForCausalLM", {**EXPERTS, "attention.pattern": ["window"], "attention.window": 5, "experts.ffn": None}),
    "Qwen 3, dense layers by a long pattern": (
        "Qwen3MoeForCausalLM",
        {**QWEN, "layers": 3, "experts.pattern": ["experts", "dense", "dense"], "experts.balance_sequence": 0.1},
    ),
    "OLMoE": ("OlmoeForCausalLM", {**EXPERTS, "attention.qk_norm": True, "attention.qk_norm_span": "projection", "experts.balance_step": 0.1, "tied": True}),
    "gpt-oss": (
        "GptOssForCausalLM",
        {**GPT_OSS, "attention.pattern": ["window", "full"], "attention.window": 5, "attention.qkv_bias": True, "attention.out_bias": True, "attention.head_dim": 16},
    ),
    "DeepSeek V3": ("DeepseekV3ForCausalLM", V3),
    "DeepSeek V3, YaRN, biases, queries whole, not normalised": (
        "DeepseekV3ForCausalLM",
        {
            **V3, "attention.latent.q_rank": None, "attention.qkv_bias": True, "attention.out_bias": True, "tied": True,
            "rope.scaling": YARN, "attention.score_scale": 20**-0.5 * (0.1 * 0.4 * log(4) + 1) ** 2, "experts.router_normalize": False,
        },
    ),
    "DeepSeek V3, no experts, values as wide as keys": ("DeepseekV3ForCausalLM", {**LATENT, "attention.latent.value_dim": None}),
    "DeepSeek V2": ("DeepseekV2ForCausalLM", V2),
    "DeepSeek V2, queries whole, biases": ("DeepseekV2ForCausalLM", {**V2, "attention.latent.q_rank": None, "attention.qkv_bias": True, "attention.out_bias": True}),
    "GLM 4.7 Flash": ("Glm4MoeLiteForCausalLM", {**V3, "experts.pattern": ["experts", "dense", "experts"]}),
}  # fmt: skip


def continued(run, prompt, count):
    """Ids that hpclm generate appends to a prompt."""
    config = load(run / "config.yaml")
    model, _ = run_model.load_model(run, config, None, Compute(torch.device("cpu"), torch.float32))
    [new] = generation.continue_all(model, [prompt], count, 93, Sampling(temperature=0), lambda *_: False)
    return new


@pytest.mark.parametrize("kind", NETWORKS)
def test_transformers_computes_what_the_run_does_and_the_weights_come_back_bit_for_bit(kind, tmp_path):
    architecture, settings = NETWORKS[kind]
    drawn = made.run(tmp_path / "run", settings, blocks=3)
    convert(tmp_path / "run", tmp_path / "hf")
    there = peer(tmp_path / "hf")
    assert type(there).__name__ == architecture
    made.close(made.logits(tmp_path / "run"), peer_logits(there))
    for prompt in ([5], [1, 88, 3], [7, 7, 2, 90, 11]):
        text = there.generate(
            torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert text[0, len(prompt) :].tolist() == continued(tmp_path / "run", prompt, 9)
    convert(tmp_path / "hf", tmp_path / "back")
    back = weights(tmp_path / "back")
    assert back.keys() == drawn.keys()
    for name, whole in drawn.items():
        rows = 93 if name in ("tokens.weight", "output.weight") else None
        assert torch.equal(back[name][:rows], whole[:rows]), name


@pytest.mark.parametrize("kind", ["Qwen 3, dense layers by a long pattern", "gpt-oss"])
def test_an_imported_model_is_trained_and_goes_back(kind, tmp_path):
    made.run(tmp_path / "made", NETWORKS[kind][1])
    convert(tmp_path / "made", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "run")
    words = [
        "data.source=synthetic",
        "batch.global_size=4",
        "batch.micro_size=2",
        "budget.steps=3",
        "optim.warmup=0",
    ]
    words += [
        "optim.lr=0.01",
        "engine.precision=fp32",
        "model.experts.balance_step=0.01",
        f"checkpoint.init_from={tmp_path}/run",
    ]
    assert cli.main(["train", f"{tmp_path}/run/config.yaml", f"out={tmp_path}/tuned", *words]) == 0
    convert(tmp_path / "tuned", tmp_path / "tuned_hf")
    logits = peer_logits(peer(tmp_path / "tuned_hf"))
    made.close(made.logits(tmp_path / "tuned"), logits)
    assert (logits - made.logits(tmp_path / "run")).abs().max() > 0.01


@pytest.mark.parametrize(
    "settings, why",
    {
        "sigmoid": ({**EXPERTS, "experts.router_score": "sigmoid"}, "MixtralForCausalLM: model.experts.router_score=sigmoid, but it needs softmax"),
        "shared": ({**EXPERTS, "experts.shared_ffn": 32}, "model.experts.shared_ffn=32, but it needs 0"),
        "groups": ({**QWEN, "experts.count": 4, "experts.router_groups": 2}, "model.experts.router_groups=2, but it needs 1"),
        "scale": ({**QWEN, "experts.router_scale": 2.0}, "Qwen3MoeForCausalLM: model.experts.router_scale=2.0, but it needs 1.0"),
        "dense layers": ({**EXPERTS, "experts.pattern": ["dense", "experts"]}, "Qwen3MoeForCausalLM: model.attention.qk_norm=false, but it needs true"),
        "not normalised": ({**EXPERTS, "experts.router_normalize": False}, "model.experts.router_normalize=false, but it needs true"),
        "no sinks": ({**GPT_OSS, "attention.sinks": False}, "GptOssForCausalLM: model.attention.sinks=false, but it needs true"),
        "some windows": ({**QWEN, "attention.pattern": ["window", "full"], "attention.window": 5}, 'model.attention.pattern=["window", "full"]'),
        "positions": ({**EXPERTS, "positions": "alibi", "rope.base": 1e4}, "model.positions=alibi, but it needs rope"),
        "latent, softmax with a bias": ({**V3, "experts.router_score": "softmax"}, "Glm4MoeLiteForCausalLM: model.experts.router_score=softmax, but it needs sigmoid"),
        "latent, score scale": ({**V3, "attention.score_scale": 0.5}, "model.attention.score_scale=0.5, but it needs 0.2236"),
        "latent, YaRN without its score scale": ({**V3, "rope.scaling": YARN}, "model.attention.score_scale=0.22360679774997896, but it needs 0.2490"),
        "latent, epsilon": ({**V3, "attention.latent.norm_eps": 1e-5}, "model.attention.latent.norm_eps=1e-05, but it needs 1e-06"),
        "latent, windows": ({**V3, "attention.pattern": ["window"], "attention.window": 5}, 'model.attention.pattern=["window"], but it needs ["full"]'),
        "latent, MLP biases": ({**V3, "mlp_bias": True}, "model.mlp_bias=true, but it needs false"),
        "latent, normalised softmax": ({**V2, "experts.router_normalize": True}, "DeepseekV2ForCausalLM: model.experts.router_normalize=true, but it needs false"),
    }.values(),
)  # fmt: skip
def test_a_network_with_experts_that_no_class_has_is_refused_by_name_before_anything_is_written(
    settings, why, tmp_path
):
    made.run(tmp_path / "run", settings)
    with pytest.raises(ConfigError) as error:
        convert(tmp_path / "run", tmp_path / "hf")
    assert why in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("kind", ["Mixtral", "DeepSeek V3, no experts, values as wide as keys"])
def test_llama_cpp_s_format_is_refused_with_the_classes_that_it_has(kind, tmp_path):
    architecture, settings = NETWORKS[kind]
    made.run(tmp_path / "run", settings)
    with pytest.raises(ConfigError, match=f"{architecture} cannot be written as GGUF"):
        convert(tmp_path / "run", tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


SIZES = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, vocab_size=93)
REFUSED = {
    "noise": ("mixtral", dict(router_jitter_noise=0.1), "router_jitter_noise=0.1, but hpclm supports 0.0"),
    "more than there are": ("mixtral", dict(num_experts_per_tok=9), "model.experts.per_token=9 must be from 1 to model.experts.count=8"),
    "one, normalised": ("qwen3_moe", dict(num_experts_per_tok=1, norm_topk_prob=True), "norm_topk_prob in config.json): one score divided by itself"),
    "one of Mixtral": ("mixtral", dict(num_experts_per_tok=1), "experts.per_token=1 needs model.experts.router_normalize=false"),
    "two names": ("mixtral", dict(num_experts=4, num_local_experts=8), "num_experts=4 and num_local_experts=8: two names"),
    "score function": ("mixtral", dict(scoring_func="sigmoid"), "scoring_func=sigmoid: hpclm does not know this key"),
    "clipped": ("olmoe", dict(clip_qkv=8.0), "clip_qkv=8.0, but hpclm supports null"),
    "normalised by null": ("olmoe", dict(norm_topk_prob=None), "norm_topk_prob=null: OlmoeConfig of transformers refuses it"),
    "no step": ("qwen3_moe", dict(decoder_sparse_step=0), "decoder_sparse_step=0 must be a whole number of at least 1"),
    "a layer": ("qwen3_moe", dict(mlp_only_layers=["1"]), "mlp_only_layers=[\"1\"]: Qwen3MoeConfig of transformers refuses it"),
    "all dense": ("qwen3_moe", dict(mlp_only_layers=[0, 1]), "no layer of model.experts.pattern=[dense] is of kind experts"),
    "none": ("qwen3_moe", dict(num_experts=0), "num_experts=0 must be at least 1"),
    "shared": ("qwen3_moe", dict(shared_expert_intermediate_size=64), "shared_expert_intermediate_size=64, but hpclm supports 0"),
    "scaled": ("qwen3_moe", dict(routed_scaling_factor=2.5), "routed_scaling_factor=2.5: hpclm does not know this key"),
    "groups": ("qwen3_moe", dict(n_group=4), "n_group=4: hpclm does not know this key"),
    "slope": ("gpt_oss", dict(swiglu_alpha=1.0), "swiglu_alpha=1.0, but hpclm supports 1.702"),
    "limit": ("gpt_oss", dict(swiglu_limit=8.0), "swiglu_limit=8.0, but hpclm supports 7.0"),
    "chosen twice": ("gpt_oss", dict(experts_per_token=2), "experts_per_token=2 and num_experts_per_tok=4: two names of one setting"),
    "MXFP4": ("gpt_oss", dict(quantization_config=dict(quant_method="mxfp4")), "its weights are quantized"),
    "no window": ("gpt_oss", dict(sliding_window=None), "with sliding_window=None"),
}  # fmt: skip


@pytest.mark.parametrize("kind, change, answer", REFUSED.values(), ids=REFUSED.keys())
def test_options_of_routers_and_experts_that_hpclm_does_not_have_are_refused_by_name(kind, change, answer):
    with pytest.raises(ConfigError) as error:
        network(families.model_settings({"model_type": kind, **SIZES, **change}), [])
    assert answer in str(error.value)


def test_the_command_refuses_such_a_folder_and_writes_nothing(tmp_path, capsys):
    made.run(tmp_path / "run", NETWORKS["gpt-oss"][1])
    convert(tmp_path / "run", tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}))
    assert cli.main(["convert", str(tmp_path / "hf"), str(tmp_path / "back")]) == 64
    assert "its weights are quantized" in capsys.readouterr().err and not (tmp_path / "back").exists()


class Watched:
    """A source of tensors that counts those which are in memory."""

    def __init__(self, shape):
        self.shape, self.alive, self.most = shape, 0, 0

    def read(self, name):
        tensor = torch.full(self.shape, float(name))
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor, self.freed)
        return tensor

    def freed(self):
        self.alive -= 1


def test_experts_are_stacked_with_one_of_them_in_memory():
    source = Watched((2, 3))
    rule = expert_weights.per_expert("up", [str(number) for number in range(16)], 8)
    whole = rule.join(OnDemand(source, rule.theirs))
    assert whole.shape == (8, 4, 3) and whole[3].unique().tolist() == [6, 7] and source.most <= 2
    assert [part.unique().item() for part in rule.split(whole)] == [*range(16)]


def test_a_missing_or_misshapen_expert_is_named(tmp_path):
    made.run(tmp_path / "run", NETWORKS["Mixtral"][1])
    convert(tmp_path / "run", tmp_path / "hf")
    file, name = tmp_path / "hf/model.safetensors", "model.layers.1.block_sparse_moe.experts.4.w3.weight"
    whole = {key: x.clone() for key, x in load_file(file).items()}  # not of the file, which is written again
    save_file({key: x[:1] if key == name else x for key, x in whole.items()}, file)
    with pytest.raises(
        ConfigError, match=r"experts\.4\.w3\.weight has shape \(1, 48\), but .*experts\.0\.w1\.weight has \(32, 48\)"
    ):
        convert(tmp_path / "hf", tmp_path / "back")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    save_file(whole, file)
    with pytest.raises(
        ConfigError,
        match=r"experts\.1\.w1\.weight and 7 more gives block0\.mlp\.experts\.up of shape \(5, 64, 48\), but",
    ):
        convert(tmp_path / "hf", tmp_path / "back")
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    save_file({key: x for key, x in whole.items() if key != name}, file)
    with pytest.raises(ConfigError, match=f"has no {name}"):
        convert(tmp_path / "hf", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_the_balance_loss_of_transformers_is_ignored_with_a_warning(tmp_path, caplog):
    made.run(tmp_path / "run", NETWORKS["OLMoE"][1])
    convert(tmp_path / "run", tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    assert "router_aux_loss_coef" not in json.loads(path.read_text())
    path.write_text(json.dumps({**json.loads(path.read_text()), "router_aux_loss_coef": 0.25}))
    convert(tmp_path / "hf", tmp_path / "back")
    assert "router_aux_loss_coef=0.25 is ignored" in caplog.text
    assert run_settings.inference_settings(tmp_path / "back", []).model.experts.balance_micro_batch == 0


DEEPSEEK_YARN = dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096, type="yarn")  # fmt: skip
DEEPSEEK_V3 = (
    dict(architectures=["DeepseekV3ForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=0)
    | dict(eos_token_id=1, ep_size=1)
    | dict(first_k_dense_replace=3, hidden_act="silu", hidden_size=7168, initializer_range=0.02, intermediate_size=18432)
    | dict(kv_lora_rank=512, max_position_embeddings=163840, model_type="deepseek_v3", moe_intermediate_size=2048)
    | dict(moe_layer_freq=1, n_group=8, n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True)
    | dict(num_attention_heads=128, num_experts_per_tok=8, num_hidden_layers=61, num_key_value_heads=128)
    | dict(num_nextn_predict_layers=1, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-06)
    | dict(quantization_config=dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]))
    | dict(rope_scaling=DEEPSEEK_YARN, rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid")
    | dict(tie_word_embeddings=False, topk_group=4, topk_method="noaux_tc", torch_dtype="bfloat16", use_cache=True)
    | dict(v_head_dim=128, vocab_size=129280, transformers_version="4.33.1", aux_loss_alpha=0.001, seq_aux=True)
)  # fmt: skip
PUBLISHED = {
    "Mixtral 8x7B": (
        dict(architectures=["MixtralForCausalLM"], attention_dropout=0.0, bos_token_id=1, eos_token_id=2, hidden_act="silu")
        | dict(hidden_size=4096, initializer_range=0.02, intermediate_size=14336, max_position_embeddings=32768)
        | dict(model_type="mixtral", num_attention_heads=32, num_experts_per_tok=2, num_hidden_layers=32)
        | dict(num_key_value_heads=8, num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-05)
        | dict(rope_theta=1000000.0, router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False)
        | dict(torch_dtype="bfloat16", transformers_version="4.36.0.dev0", use_cache=True, vocab_size=32000),
        {"experts.count": 8, "experts.per_token": 2, "experts.ffn": 14336, "rope.base": 1e6, "experts.router_normalize": True, "attention.window": None},
    ),
    "Qwen3-Coder": (
        dict(architectures=["Qwen3MoeForCausalLM"], attention_bias=False, attention_dropout=0.0, decoder_sparse_step=1)
        | dict(eos_token_id=151645, head_dim=128, hidden_act="silu", hidden_size=2048, initializer_range=0.02)
        | dict(intermediate_size=5472, max_position_embeddings=262144, max_window_layers=28, mlp_only_layers=[])
        | dict(model_type="qwen3_moe", moe_intermediate_size=768, norm_topk_prob=True, num_attention_heads=32)
        | dict(num_experts=128, num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4)
        | dict(output_router_logits=False, qkv_bias=False, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=10000000)
        | dict(router_aux_loss_coef=0.0, shared_expert_intermediate_size=0, sliding_window=None, use_qk_norm=True)
        | dict(tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True, use_sliding_window=False, vocab_size=151936),
        {"experts.count": 128, "experts.per_token": 8, "experts.ffn": 768, "experts.router_normalize": True, "attention.qk_norm": True, "attention.head_dim": 128},
    ),
    "gpt-oss, unquantized": (
        dict(architectures=["GptOssForCausalLM"], attention_bias=True, attention_dropout=0.0, eos_token_id=200002)
        | dict(experts_per_token=4, head_dim=64, hidden_act="silu", hidden_size=2880, initial_context_length=4096)
        | dict(initializer_range=0.02, intermediate_size=2880, max_position_embeddings=131072, model_type="gpt_oss")
        | dict(layer_types=["sliding_attention", "full_attention"] * 12, num_attention_heads=64, num_experts_per_tok=4)
        | dict(num_hidden_layers=24, num_key_value_heads=8, num_local_experts=32, output_router_logits=False)
        | dict(pad_token_id=199999, rms_norm_eps=1e-05, rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128)
        | dict(rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096)
               | dict(rope_type="yarn", truncate=False))
        | dict(swiglu_limit=7.0, tie_word_embeddings=False, use_cache=True, vocab_size=201088),
        {"experts.count": 32, "experts.per_token": 4, "experts.ffn": 2880, "attention.pattern": ["window", "full"], "attention.window": 128, "experts.router_bias": True},
    ),
    "DeepSeek V3": (DEEPSEEK_V3, {"experts.count": 256, "experts.router_groups": 8, "experts.shared_ffn": 2048, "attention.head_dim": 128, "attention.latent.kv_rank": 512, "attention.latent.q_rank": 1536, "attention.score_scale": 192**-0.5 * (0.1 * log(40) + 1) ** 2}),
    "Kimi K2": (
        DEEPSEEK_V3
        | dict(model_type="kimi_k2", n_group=1, topk_group=1, n_routed_experts=384, num_attention_heads=64, num_key_value_heads=64)
        | dict(first_k_dense_replace=1, num_nextn_predict_layers=0, rms_norm_eps=1e-06, rope_theta=50000.0, vocab_size=163840)
        | dict(rope_scaling={**DEEPSEEK_YARN, "beta_fast": 1.0, "factor": 32.0}, routed_scaling_factor=2.827),
        {"experts.count": 384, "experts.router_groups": 1, "attention.heads": 64, "rope.base": 50000.0, "experts.router_score": "sigmoid"},
    ),
    "DeepSeek V2 Lite": (
        dict(architectures=["DeepseekV2ForCausalLM"], attention_bias=False, attention_dropout=0.0, aux_loss_alpha=0.001)
        | dict(bos_token_id=100000, eos_token_id=100001)
        | dict(first_k_dense_replace=1, hidden_act="silu", hidden_size=2048, initializer_range=0.02, intermediate_size=10944)
        | dict(kv_lora_rank=512, max_position_embeddings=163840, model_type="deepseek_v2", moe_intermediate_size=1408)
        | dict(moe_layer_freq=1, n_group=1, n_routed_experts=64, n_shared_experts=2, norm_topk_prob=False)
        | dict(num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27, num_key_value_heads=16)
        | dict(pretraining_tp=1, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-06)
        | dict(rope_scaling={**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, rope_theta=10000)
        | dict(routed_scaling_factor=1.0, scoring_func="softmax", seq_aux=True, tie_word_embeddings=False, topk_group=1)
        | dict(topk_method="greedy", torch_dtype="bfloat16", use_cache=True, v_head_dim=128, vocab_size=102400),
        {"experts.count": 64, "experts.shared_ffn": 2816, "experts.router_normalize": False, "attention.latent.q_rank": None, "attention.score_scale": 192**-0.5 * (0.1 * 0.707 * log(40) + 1) * (0.1 * 0.707 * log(40) + 1)},
    ),
    "GLM 4.7 Flash": (
        dict(architectures=["Glm4MoeLiteForCausalLM"], attention_bias=False, attention_dropout=0.0, pad_token_id=154820)
        | dict(eos_token_id=[154820, 154827, 154829], hidden_act="silu", hidden_size=2048, intermediate_size=10240)
        | dict(max_position_embeddings=202752, model_type="glm4_moe_lite", moe_intermediate_size=1536, topk_method="noaux_tc")
        | dict(norm_topk_prob=True, num_attention_heads=20, n_group=1, topk_group=1, n_routed_experts=64, n_shared_experts=1)
        | dict(routed_scaling_factor=1.8, num_experts_per_tok=4, first_k_dense_replace=1, num_hidden_layers=47)
        | dict(num_key_value_heads=20, num_nextn_predict_layers=1, partial_rotary_factor=1.0, rms_norm_eps=1e-05)
        | dict(rope_scaling=None, rope_theta=1000000, tie_word_embeddings=False, dtype="bfloat16", q_lora_rank=768)
        | dict(kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, vocab_size=154880),
        {"experts.count": 64, "experts.pattern": ["dense", *["experts"] * 46], "attention.latent.value_dim": 256, "attention.score_scale": None, "rope.base": 1e6},
    ),
}  # fmt: skip
"""config.json as the models' authors publish it, without auto_map."""


@pytest.mark.parametrize("tree, settings", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_a_config_json_as_published_is_read(tree, settings):
    config: ModelConfig = network(families.model_settings(tree), [])
    assert {name: value_at(config, name) for name in settings} == settings
