"""Models with experts go to transformers and come back: the same logits and text there, the same bits here."""

import json
import weakref

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
        "sigmoid": ({**EXPERTS, "experts.router_score": "sigmoid"}, "MixtralForCausalLM: model.experts.router_score=sigmoid, which it does not support"),
        "shared": ({**EXPERTS, "experts.shared_ffn": 32}, "model.experts.shared_ffn=32, which it does not support"),
        "groups": ({**QWEN, "experts.count": 4, "experts.router_groups": 2}, "model.experts.router_groups=2, which it does not support"),
        "scale": ({**QWEN, "experts.router_scale": 2.0}, "Qwen3MoeForCausalLM: model.experts.router_scale=2.0, which it does not support"),
        "dense layers": ({**EXPERTS, "experts.pattern": ["dense", "experts"]}, "but it needs [\"experts\"]"),
        "not normalised": ({**EXPERTS, "experts.router_normalize": False}, "model.experts.router_normalize=false, but it needs true"),
        "no sinks": ({**GPT_OSS, "attention.sinks": False}, "GptOssForCausalLM: model.attention.sinks=false, but it needs true"),
        "some windows": ({**QWEN, "attention.pattern": ["window", "full"], "attention.window": 5}, 'model.attention.pattern=["window", "full"]'),
        "positions": ({**EXPERTS, "positions": "alibi", "rope.base": 1e4}, "model.positions=alibi, but it needs rope"),
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


def test_llama_cpp_s_format_is_refused_with_the_classes_that_it_has(tmp_path):
    made.run(tmp_path / "run", NETWORKS["Mixtral"][1])
    with pytest.raises(ConfigError, match="MixtralForCausalLM cannot be written as GGUF"):
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
    "normalised by null": ("olmoe", dict(norm_topk_prob=None), "norm_topk_prob=null, and OlmoeForCausalLM needs a value"),
    "no step": ("qwen3_moe", dict(decoder_sparse_step=0), "decoder_sparse_step=0 must be a whole number of at least 1"),
    "a layer": ("qwen3_moe", dict(mlp_only_layers=["1"]), "must be a list of numbers of layers"),
    "all dense": ("qwen3_moe", dict(mlp_only_layers=[0, 1]), "no layer of model.experts.pattern=[dense] is of kind experts"),
    "none": ("qwen3_moe", dict(num_experts=0), "have no effect with model.experts.count=0"),
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
}  # fmt: skip
"""config.json as the models' authors publish it."""


@pytest.mark.parametrize("tree, settings", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_a_config_json_as_published_is_read(tree, settings):
    config: ModelConfig = network(families.model_settings(tree), [])
    assert {name: value_at(config, name) for name in settings} == settings
