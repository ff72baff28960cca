"""Weights go to transformers and come back: the same logits there, the same bits here."""

import json
import sys
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpclm import cli
from hpclm.base.errors import ConfigError, NoCheckpointError
from hpclm.checkpoint import directory
from hpclm.checkpoint.tensors import CheckpointTensors
from hpclm.config import ModelConfig
from hpclm.inference import run_settings
from hpclm.interop.huggingface import families
from tests.interop import made

main = cli.function("convert")


def convert(*words):
    return main([str(word) for word in words])


def peer(folder):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def peer_logits(model):
    with torch.no_grad():
        return model(made.TOKENS).logits


def weights(run):
    folder, manifest = directory.newest(run / "checkpoints")
    with CheckpointTensors(folder, manifest) as saved:
        return {name.removeprefix("model."): saved.whole(name) for name in saved.shapes()}


@pytest.mark.parametrize("kind", made.NETWORKS)
def test_transformers_computes_what_the_run_does_and_the_weights_come_back_bit_for_bit(kind, tmp_path):
    architecture, network = made.NETWORKS[kind]
    drawn = made.run(tmp_path / "run", network, blocks=3)
    convert(tmp_path / "run", tmp_path / "hf")
    there = peer(tmp_path / "hf")
    assert type(there).__name__ == architecture and there.config.vocab_size == 93
    made.close(made.logits(tmp_path / "run"), peer_logits(there))
    convert(tmp_path / "hf", tmp_path / "back", "model.vocab_multiple=16")
    back = weights(tmp_path / "back")
    assert back.keys() == drawn.keys()
    for name, whole in drawn.items():
        rows = 93 if name in ("tokens.weight", "output.weight") else None
        assert torch.equal(back[name][:rows], whole[:rows]), name
    assert len(back["tokens.weight"]) == 96 and not back["tokens.weight"][93:].any()
    made.close(made.logits(tmp_path / "back"), made.logits(tmp_path / "run"))


def louder(model):
    """A model whose every part matters to its logits."""
    with torch.no_grad():
        draw = torch.Generator().manual_seed(5)
        for name, p in model.named_parameters():
            gain = ("norm" in name or "ln_" in name) and name.endswith("weight")
            p.copy_(torch.randn(p.shape, generator=draw) * 0.2 + gain)
    return model


SIZES = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=80, vocab_size=93)
THEIRS = {
    "GPT2": dict(n_layer=2, n_embd=48, n_head=6, n_positions=16, vocab_size=93),
    "Bloom": dict(hidden_size=48, n_layer=2, n_head=6, vocab_size=93),
    "Llama": dict(**SIZES, num_key_value_heads=3, max_position_embeddings=16, tie_word_embeddings=True),
    "Mistral": dict(**SIZES, num_key_value_heads=2, max_position_embeddings=16, sliding_window=None),
    "Qwen3": dict(**SIZES, num_key_value_heads=2, head_dim=8, max_position_embeddings=16),
    "GPTNeoX": dict(
        **SIZES, use_parallel_residual=False, rotary_pct=1.0, rotary_emb_base=500, max_position_embeddings=16
    ),
}


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize("size", ["1GB", "20KB"], ids=["one file", "many files"])
def test_what_transformers_saved_computes_the_same_here(kind, size, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**THEIRS[kind])
    there = louder(transformers.AutoModelForCausalLM.from_config(config)).eval()
    there.save_pretrained(tmp_path / "hf", max_shard_size=size)
    assert (tmp_path / "hf/model.safetensors.index.json").exists() == (size == "20KB")
    convert(tmp_path / "hf", tmp_path / "run")
    made.close(made.logits(tmp_path / "run"), peer_logits(there))


def test_names_of_the_bare_model_and_old_buffers_are_understood(tmp_path):
    made.run(tmp_path / "run", made.NETWORKS["gpt2"][1])
    convert(tmp_path / "run", tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 16, 16), "lm_head.weight": bare["wte.weight"].clone()}, file)
    convert(tmp_path / "hf", tmp_path / "back")
    made.close(made.logits(tmp_path / "back"), made.logits(tmp_path / "run"))


@pytest.mark.parametrize("dtype, kind", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_an_export_in_another_type_is_the_rounded_weights(dtype, kind, tmp_path):
    drawn = made.run(tmp_path / "run", made.NETWORKS["llama"][1])
    convert(tmp_path / "run", tmp_path / "hf", "--dtype", dtype)
    there = peer(tmp_path / "hf")
    assert there.dtype == kind
    assert torch.equal(there.state_dict()["model.norm.weight"], drawn["norm.weight"].to(kind))
    convert(tmp_path / "hf", tmp_path / "back")
    assert torch.equal(weights(tmp_path / "back")["norm.weight"], drawn["norm.weight"].to(kind).float())


def test_files_stay_below_the_cap_and_the_index_finds_every_tensor(tmp_path):
    made.run(tmp_path / "run", made.NETWORKS["llama"][1])
    convert(tmp_path / "run", tmp_path / "hf", "--shard-gb", "40e-6")
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert {file.name for file in files} == set(index["weight_map"].values()) and len(files) > 3
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 42_000 and min(map(sum, pairwise(sizes))) > 40_000  # each is as full as its tensors allow
    assert not list((tmp_path / "hf").glob(".*"))
    held = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert held.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 4 for tensor in held.values())
    made.close(made.logits(tmp_path / "run"), peer_logits(peer(tmp_path / "hf")))


def test_a_whole_file_is_read_like_transformers_does_although_an_index_is_left_beside_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**THEIRS["Llama"])
    for size in ("20KB", "1GB"):  # the second model is saved into the first one's folder
        there = louder(transformers.AutoModelForCausalLM.from_config(config)).eval()
        there.model.norm.weight.data += 0.5 * (size == "1GB")
        there.save_pretrained(tmp_path / "hf", max_shard_size=size)
    assert (tmp_path / "hf/model.safetensors.index.json").exists()
    convert(tmp_path / "hf", tmp_path / "run")
    made.close(made.logits(tmp_path / "run"), peer_logits(there))
    made.close(made.logits(tmp_path / "run"), peer_logits(peer(tmp_path / "hf")))


def test_one_checkpoint_can_be_exported_by_its_folder(tmp_path):
    made.run(tmp_path / "run", made.NETWORKS["gpt2"][1])
    convert(tmp_path / "run/checkpoints/step-00000007", tmp_path / "hf")
    made.close(made.logits(tmp_path / "run"), peer_logits(peer(tmp_path / "hf")))


@pytest.fixture
def trusted(tmp_path, monkeypatch):
    """transformers.AutoModelForCausalLM for folders that bring their own code, which it copies to a cache."""
    transformers = pytest.importorskip("transformers")
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])

    def load(folder):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()

    return load


@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=[pytest.mark.whole] * (each not in ("bigscience", "fairseq"))) for each in made.OWN],
)
def test_a_network_that_transformers_has_not_brings_its_class_along(kind, trusted, tmp_path, caplog):
    drawn = made.run(tmp_path / "run", made.OWN[kind], blocks=2)
    convert(tmp_path / "run", tmp_path / "hf")
    assert "no class of transformers supports this network" in caplog.text and "trust_remote_code=True" in caplog.text
    there = trusted(tmp_path / "hf")
    assert type(there).__name__ == "HpclmForCausalLM" and there.config.vocab_size == 93
    logits = peer_logits(there)
    made.close(made.logits(tmp_path / "run"), logits)
    prompt, more = made.TOKENS[:, :5], dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    written = there.generate(prompt, **more)
    assert torch.equal(written, there.generate(prompt, use_cache=False, **more))
    best = made.logits(tmp_path / "run", written[:, :-1])[:, 4:].argmax(-1)
    assert torch.equal(written[:, 5:], best)
    padded, mask = (torch.cat([torch.zeros(2, 3, dtype=torch.long), x], 1) for x in (prompt, torch.ones_like(prompt)))
    assert torch.equal(there.generate(padded, attention_mask=mask, **more)[:, 3:], written)
    convert(tmp_path / "hf", tmp_path / "back")
    back = weights(tmp_path / "back")
    assert back.keys() == drawn.keys() and torch.equal(
        back["block1.attention.qkv.weight"], drawn["block1.attention.qkv.weight"]
    )
    made.close(made.logits(tmp_path / "back"), logits)


def test_a_network_of_ours_is_fine_tuned_and_saved_by_transformers(trusted, tmp_path):
    made.run(tmp_path / "run", made.OWN["fairseq"])
    convert(tmp_path / "run", tmp_path / "hf")
    there = trusted(tmp_path / "hf")
    loss = there.train()(made.TOKENS, labels=made.TOKENS).loss
    loss.backward()
    logits = peer_logits(there.eval())
    wanted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), made.TOKENS[:, 1:].flatten())
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-5)
    assert all(parameter.grad is not None for parameter in there.parameters())
    there.save_pretrained(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "back")  # its code is not run
    made.close(made.logits(tmp_path / "back"), logits)
    made.close(peer_logits(trusted(tmp_path / "saved")), logits)


@pytest.mark.parametrize(
    "settings, answer",
    {
        "sinusoidal": (dict(positions="sinusoidal"), "model.positions=sinusoidal, but it needs learned"),
        "grouped": (
            {"attention.kv_heads": 2},
            "GPT2LMHeadModel: model.attention.kv_heads=2, but it needs 6",
        ),
        "no bias": (dict(bias=False), "GPT2LMHeadModel: model.bias=false, but it needs true"),
        "qk": ({"attention.qk_norm": True}, "GPT2LMHeadModel: model.attention.qk_norm=true, but it needs false"),
        "scaled": (
            {**made.LLAMA, "embed_scale": True, "attention.qk_norm": True},
            "Qwen3ForCausalLM: model.embed_scale=true",
        ),
        "bloom's width": (
            dict(positions="alibi", embed_norm=True, ffn=80),
            "model.ffn=80, but it needs 192",
        ),
        "qwen's bias": (
            {**made.LLAMA, "attention.qk_norm": True, "bias": True},
            "Qwen3ForCausalLM: model.mlp_bias=true",
        ),
    }.items(),
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_what_keeps_a_network_from_the_nearest_class_is_told(settings, answer):
    case, wanted = answer
    assert any(wanted in line for line in families.nearest_obstacles(ModelConfig.of(made.SHAPE | case)))


def test_a_block_of_ones_own_has_no_form(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"no Hugging Face form:\nGPT2LMHeadModel, HpclmForCausalLM: model\.block=mine:Block, but it needs gpt",
    ):
        families.of_network(ModelConfig.of({**made.SHAPE, "block": "mine:Block"}))


def test_a_refusal_gives_each_reason_once():
    with pytest.raises(ConfigError) as error:
        families.of_network(ModelConfig.of({**made.SHAPE, "logit_cap": 30.0}))
    assert str(error.value).count("model.logit_cap=30.0") == 1


def test_two_dropouts_of_gpt2_of_which_one_is_lost_are_told(tmp_path, caplog):
    made.run(tmp_path / "run", made.NETWORKS["gpt2"][1])
    convert(tmp_path / "run", tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(embd_pdrop=0.3, resid_pdrop=0.2)))
    convert(tmp_path / "hf", tmp_path / "back")
    assert (
        "embd_pdrop=0.3 and resid_pdrop=0.2: hpclm has one model.dropout for both and uses resid_pdrop" in caplog.text
    )
    assert run_settings.inference_settings(tmp_path / "back", []).model.dropout == 0.2


CHANGES = {
    "another kind": ("llama", dict(model_type="t5"), "model_type=t5 is not supported"),
    "scaled": (
        "llama",
        dict(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
        "for 'rope_type'='yarn': {'factor'}",
    ),
    "scaled in another way": (
        "llama",
        dict(rope_scaling={"type": "mrope", "factor": 2.0}, rope_parameters={"rope_type": "default"}),
        "rope_type=mrope",
    ),
    "endless": (
        "llama",
        dict(num_hidden_layers=10**9),
        "config.json: num_hidden_layers=1000000000 must be from 1 to 10000",
    ),
    "too deep": ("llama", dict(num_hidden_layers=10**4), "has 21 tensors, too few for the 10000 layers"),
    "huge": ("llama", dict(hidden_size=6 << 20, head_dim=1 << 20), "gives tokens.weight of shape (128, 48), but"),
    "huge MLP": ("llama", dict(intermediate_size=1 << 24), "gives block0.mlp.up.weight of shape (160, 48), but"),
    "beyond limits": (
        "llama",
        dict(vocab_size=10**12),
        "config.json: vocab_size=1000000000000 must be from 1 to 2,147,483,648",
    ),
    "head width": ("llama", dict(head_dim=16), "gives block0.attention.qkv.weight of shape (144, 48), but"),
    "half biases": ("llama", dict(attention_bias=True), "has no model.layers.0.self_attn.k_proj.bias"),
    "activation": ("llama", dict(hidden_act="relu6"), "hidden_act=relu6, but hpclm supports silu, gelu"),
    "window": ("llama", dict(sliding_window=8), "sliding_window=8: hpclm does not know this key"),
    "some window": (
        "llama",
        dict(model_type="mistral", sliding_window=7.5),
        "sliding_window=7.5: MistralConfig of transformers refuses it",
    ),
    "no window": ("llama", dict(sliding_window="x"), "sliding_window=x"),
    "both ways": ("llama", dict(is_causal=False), "is_causal=false: hpclm does not know this key"),
    "in slices": ("bloom", dict(pretraining_tp=2, slow_but_exact=True), "slow_but_exact=true"),
    "unknown and false": ("gpt2", dict(use_everything=False), "use_everything=false: hpclm does not know this key"),
    "tied, with two matrices": ("llama", dict(tie_word_embeddings=True), "is another matrix; give model.tied=false"),
    "rope is a list": (
        "llama",
        dict(rope_parameters=[1, 2]),
        "rope_parameters=[1, 2]: LlamaConfig of transformers refuses it",
    ),
    "rope is text": ("llama", dict(rope_parameters="x"), "rope_parameters=x: LlamaConfig of transformers refuses it"),
    "rope without end": (
        "llama",
        dict(rope_parameters={"rope_theta": float("inf")}),
        "must be a finite number of more than 0",
    ),
    "kind is a list": ("llama", dict(model_type=["llama"]), "is not supported"),
    "activation is a mapping": ("llama", dict(hidden_act={"a": 1}), "hidden_act="),
    "quantized": ("llama", dict(quantization_config={"bits": 4}), "its weights are quantized"),
    "no layers": (
        "llama",
        dict(num_hidden_layers=None),
        "num_hidden_layers=null: LlamaConfig of transformers refuses it",
    ),
    "not a number": (
        "llama",
        dict(num_hidden_layers="many"),
        "config.json: num_hidden_layers=many: LlamaConfig of transformers refuses it: TypeError",
    ),
    "parallel": ("neox", dict(use_parallel_residual=True), "use_parallel_residual=true"),
    "part of a head": ("neox", dict(rotary_pct=0.4), "rotary_pct=0.4 of a head of 8 is 3"),
    "attention": ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=true"),
    "more layers": ("gpt2", dict(n_layer=3), "has no transformer.h.2."),
    "fewer layers": ("gpt2", dict(n_layer=1), "that this network does not use: transformer.h.1."),
    "wider": (
        "gpt2",
        dict(n_inner=80),
        "transformer.h.0.mlp.c_fc.weight gives block0.mlp.up.weight of shape (192, 48), but the settings",
    ),
    "rows": ("gpt2", dict(vocab_size=90), "transformer.wte.weight has 93 rows, but model.vocab_size is 90"),
    "untied": ("gpt2", dict(tie_word_embeddings=False), "no matrix for the output; give model.tied=true"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_folder_that_is_no_network_of_ours_is_refused_and_leaves_nothing(case, tmp_path):
    kind, change, answer = CHANGES[case]
    made.run(tmp_path / "run", made.NETWORKS[kind][1])
    convert(tmp_path / "run", tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError) as error:
        convert(tmp_path / "hf", tmp_path / "back")
    assert answer in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "run"]


def test_pickled_weights_are_read_when_asked_and_never_run_code(tmp_path):
    made.run(tmp_path / "run", made.NETWORKS["gpt2"][1])
    convert(tmp_path / "run", tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    torch.save(load_file(file), tmp_path / "hf/pytorch_model.bin")
    file.unlink()
    with pytest.raises(ConfigError, match=r"--pickle reads its pytorch_model\.bin"):
        convert(tmp_path / "hf", tmp_path / "back")
    convert(tmp_path / "hf", tmp_path / "back", "--pickle")
    made.close(made.logits(tmp_path / "back"), made.logits(tmp_path / "run"))
    torch.save({"transformer.wte.weight": Evil(tmp_path / "ran")}, tmp_path / "hf/pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"it names .*touch, which is not data"):
        convert(tmp_path / "hf", tmp_path / "more", "--pickle")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "more").exists()


class Evil:
    """Its pickle calls a function."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return touch, (str(self.path),)


def touch(path):
    open(path, "w").close()


def test_damaged_files_are_told_and_an_existing_target_is_left_alone(tmp_path):
    made.run(tmp_path / "run", made.NETWORKS["gpt2"][1])
    with pytest.raises(ConfigError, match="exists; remove it"):
        convert(tmp_path / "run", tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "hf")
    (tmp_path / "hf/model.safetensors").write_bytes(b"garbage")
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        convert(tmp_path / "hf", tmp_path / "back")
    (tmp_path / "hf/model.safetensors").unlink()
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../run/x.safetensors"}}))
    with pytest.raises(ConfigError, match="has no weight_map from names to files in the same folder"):
        convert(tmp_path / "hf", tmp_path / "back")
    with pytest.raises(ConfigError, match="cannot be converted"):
        convert(tmp_path, tmp_path / "back")
    with pytest.raises(ConfigError, match="nowhere is not a run directory: it does not exist"):
        convert(tmp_path / "nowhere", tmp_path / "back")
    [file] = (tmp_path / "run/checkpoints/step-00000007").glob("*.safetensors")
    file.write_bytes(b"garbage")
    for source in (tmp_path / "run", tmp_path / "run/checkpoints/step-00000007"):
        with pytest.raises(NoCheckpointError):
            convert(source, tmp_path / "more")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "run"]


def test_weights_beyond_fp16_are_refused_with_the_way_out(tmp_path):
    made.run(tmp_path / "run", made.NETWORKS["gpt2"][1] | dict(tied=False))
    convert(tmp_path / "run", tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    held = load_file(file)
    held["lm_head.weight"][0, 0] = 1e6
    save_file(held, file)
    convert(tmp_path / "hf", tmp_path / "large")
    with pytest.raises(ConfigError, match=r"lm_head.weight has values up to 1e\+06, .*--dtype bf16"):
        convert(tmp_path / "large", tmp_path / "half", "--dtype", "fp16")
    assert not (tmp_path / "half").exists()


OTHER = {bool: lambda x: [not x], int: lambda x: [2 * x, x // 2], float: lambda x: [x * 3 + 0.1, x * 0.5]}
CANDIDATES = {
    "rope_parameters": [
        dict(rope_type="default", rope_theta=77.0),
        dict(rope_type="linear", rope_theta=10000.0, factor=2.0),
        dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
        dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8),
    ],
    "layer_types": [["full_attention", "sliding_attention"]],
    "sliding_window": [4, 64],
    "n_inner": [100],
    "head_dim": [16],
}  # fmt: skip
for key in ("hidden_act", "activation_function", "activation"):
    CANDIDATES[key] = ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "gelu_fast", "quick_gelu", "tanh"]
SAMPLE = (
    "hidden_act activation_function tie_word_embeddings rope_parameters sliding_window layer_types scale_attn_by_inverse_layer_idx "
    "apply_residual_connection_post_layernorm attention_bias use_parallel_residual"
)


def variants(config):
    """Keys of a config.json, each with values that differ from its own."""
    for key, value in config.to_dict().items():
        for other in CANDIDATES.get(key, OTHER.get(type(value), lambda x: [7, True, 0.5, "other"])(value)):
            if other != value:
                yield key, other


def imported_or_refused(kind, given, key, value, place):
    """Whether a network with another value was imported, and computes what transformers does; None if there is no such network."""
    transformers = pytest.importorskip("transformers")
    try:
        config = getattr(transformers, f"{kind}Config")(**{**given, key: value})
        there = louder(transformers.AutoModelForCausalLM.from_config(config)).eval()
        theirs = peer_logits(there)
        there.save_pretrained(place / "hf")
    except Exception:  # transformers has no such network
        return None
    tree = json.loads((place / "hf/config.json").read_text())
    if tree.get(key) != value:  # transformers saved another value, or another name for it
        (place / "hf/config.json").write_text(json.dumps({**tree, key: value}))
    try:
        convert(place / "hf", place / "run")
    except ConfigError:
        assert not (place / "run").exists()
        return False
    ours = made.logits(place / "run")
    near = 3e-5 * theirs.abs().max().clamp(min=1)  # of larger logits the last bits differ by more
    assert (ours - theirs).abs().max() < near and theirs.std() > 0.05, f"{key}={value}"
    return True


def swept(kind, given, tmp_path, only=None):
    """For each key (of ``only``) and value of a network ``given`` as config.json: was it imported?"""
    transformers = pytest.importorskip("transformers")
    found = {}
    for number, (key, value) in enumerate(variants(getattr(transformers, f"{kind}Config")(**given))):
        if only is None or key in only.split():
            place = tmp_path / str(number)
            place.mkdir()
            found[key, str(value)] = imported_or_refused(kind, given, key, value, place)
    return found


@pytest.mark.parametrize("kind", THEIRS)
def test_a_key_of_config_json_is_either_followed_or_refused(kind, tmp_path):
    found = swept(kind, THEIRS[kind], tmp_path, SAMPLE)
    assert True in found.values() and False in found.values()


@pytest.mark.whole
@pytest.mark.parametrize("kind", THEIRS)
def test_every_key_of_config_json_is_either_followed_or_refused(kind, tmp_path):
    found = swept(kind, THEIRS[kind], tmp_path)
    assert len(found) > 40 and True in found.values() and False in found.values()


REFUSED_KEYS = {
    "unknown": ("Llama", dict(logit_scale=2.0), "logit_scale=2.0: hpclm does not know this key"),
    "own code": ("GPT2", dict(auto_map={"AutoModelForCausalLM": "mine.Mine"}), "auto_map="),
    "two names": ("GPT2", dict(hidden_size=96), "hidden_size=96 and n_embd=48: two names of one setting"),
    "heads": ("Llama", dict(pruned_heads={"0": [1]}), "pruned_heads="),
    "attention": (
        "Qwen3",
        dict(layer_types=["linear_attention"] * 2),
        "layer_types=['linear_attention', 'linear_attention']",
    ),
}


@pytest.mark.parametrize("case", REFUSED_KEYS)
def test_keys_of_config_json_that_hpclm_does_not_know_are_refused_by_name(case, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    kind, change, answer = REFUSED_KEYS[case]
    config = getattr(transformers, f"{kind}Config")(**THEIRS[kind])
    louder(transformers.AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert cli.main(["convert", str(tmp_path / "hf"), str(tmp_path / "run")]) == 64
    assert answer in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words, answer", {"--ignore x": "--ignore is for options of Megatron", "--weights-only": "has no effect"}.items()
)
def test_options_for_megatron_are_refused(words, answer, tmp_path):
    made.run(tmp_path / "run", made.NETWORKS["llama"][1])
    convert(tmp_path / "run", tmp_path / "hf")
    with pytest.raises(ConfigError, match=answer):
        convert(tmp_path / "hf", tmp_path / "back", *words.split())
