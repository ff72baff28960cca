"""Checkpoints in the layouts that Megatron-LM and Megatron-DeepSpeed write, made here of known weights."""

import enum
import fnmatch
import io
import random
import subprocess
import sys
import types
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.checkpoint import directory
from hpclm.checkpoint.tensors import CheckpointTensors
from hpclm.config import ModelConfig, load
from hpclm.config.section import leaves
from hpclm.interop.megatron import options
from tests.interop import made
from tests.runs import PATIENCE, ROOT
from tests.shared import shared

SHAPE = {"vocab_size": 96, "vocab_multiple": 8, "layers": 4, "hidden": 48, "attention.heads": 8, "context": 16}
LLAMA = {
    **SHAPE,
    "positions": "rope",
    "rope.base": 5000.0,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "tied": False,
    "ffn": 64,
    "attention.kv_heads": 4,
}
ARGS = dict(
    num_layers=4, hidden_size=48, num_attention_heads=8, max_position_embeddings=16, padded_vocab_size=96, iteration=7,
    hidden_dropout=0.1, attention_dropout=0.1, params_dtype=torch.float32, layernorm_epsilon=1e-5, ffn_hidden_size=192,
    bias_gelu_fusion=True, kv_channels=6,
)  # fmt: skip
LLAMA_ARGS = ARGS | dict(
    position_embedding_type="rope", rotary_base=5000, normalization="RMSNorm", swiglu=True, add_bias_linear=False,
    untie_embeddings_and_output_weights=True, ffn_hidden_size=64, group_query_attention=True, num_query_groups=4,
    norm_epsilon=1e-5,
)  # fmt: skip
OLD = {
    "norm1": "input_layernorm", "attention.qkv": "self_attention.query_key_value", "attention.out": "self_attention.dense",
    "norm2": "post_attention_layernorm", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
}  # fmt: skip
CORE = {
    "norm1": "input_layernorm", "attention.qkv": "self_attention.linear_qkv", "attention.out": "self_attention.linear_proj",
    "norm2": "pre_mlp_layernorm", "mlp.up": "mlp.linear_fc1", "mlp.down": "mlp.linear_fc2",
}  # fmt: skip
FUSED_NORMS = {"norm1.": "self_attention.linear_qkv.layer_norm_", "norm2.": "mlp.linear_fc1.layer_norm_"}


def convert(*words):
    return cli.function("convert")([str(word) for word in words])


def cut(name, whole, rank, size, gated):
    """A tensor rank's part of a weight."""
    if name in ("tokens.weight", "output.weight") or ".qkv." in name:
        return whole.chunk(size)[rank].clone()
    if ".mlp.up." in name:
        return torch.cat([block.chunk(size)[rank] for block in whole.chunk(1 + gated)])
    if name.endswith(("attention.out.weight", "mlp.down.weight")):
        return whole.chunk(size, 1)[rank].clone()
    return whole.clone()


def layer(weights, index, names, rank, size, gated, fused_norms=False):
    """A layer's tensors under Megatron's names."""
    found = {}
    for name, whole in weights.items():
        if name.startswith(f"block{index}."):
            inner, kind = name.removeprefix(f"block{index}.").rsplit(".", 1)
            theirs = f"{names[inner]}.{kind}"
            if fused_norms and f"{inner}." in FUSED_NORMS:
                theirs = FUSED_NORMS[f"{inner}."] + kind
            found[theirs] = cut(name, whole, rank, size, gated)
    return found


def final(weights):
    return {name.removeprefix("norm."): whole for name, whole in weights.items() if name.startswith("norm.")}


def save(path, tree):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tree, path)


def noise():
    """What else is in such files."""
    return {
        "rng_state": [{"np_rng_state": np.random.get_state(), "random_rng_state": random.getstate()}],
        "iteration": 7,
        "names": {"x"},
    }


def megatron_lm(folder, weights, args, tp=1, pp=1, vp=1, style="core", version=3.0, change=lambda x: x):
    """mp_rank_XX[_YYY]/model_optim_rng.pt, with ``vp`` parts of the network on each stage."""
    gated, tied = args.get("swiglu", False), "output.weight" not in weights
    count = args["num_layers"] // (pp * vp)
    (folder / "latest_checkpointed_iteration.txt").parent.mkdir(exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    for rank in range(tp):
        for stage in range(pp):
            state = {"args": Namespace(**args), "checkpoint_version": version, **noise()}
            for part in range(vp):
                first, last = stage == part == 0, stage == pp - 1 and part == vp - 1
                begin = (part * pp + stage) * count
                build = core if style.startswith("core") else legacy
                inner = [
                    layer(weights, begin + n, OLD if build is legacy else CORE, rank, tp, gated, style == "core te")
                    for n in range(count)
                ]
                inner = [
                    {name: change(x) if "query_key_value" in name else x for name, x in one.items()} for one in inner
                ]
                tokens = cut("tokens.weight", weights["tokens.weight"], rank, tp, False)
                output = tokens if tied else cut("output.weight", weights["output.weight"], rank, tp, False)
                state["model" if vp == 1 else f"model{part}"] = build(inner, weights, tokens, output, first, last, tied)
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
            save(folder / f"iter_0000007/{name}/model_optim_rng.pt", state)


def core(inner, weights, tokens, output, first, last, tied):
    found = {}
    if first:
        found["embedding.word_embeddings.weight"] = tokens
        if "entry.table" in weights:
            found["embedding.position_embeddings.weight"] = weights["entry.table"]
    found |= {f"decoder.layers.{n}.{name}": x for n, one in enumerate(inner) for name, x in one.items()}
    found |= {f"decoder.layers.{n}.mlp.linear_fc2._extra_state": io.BytesIO(b"x") for n in range(len(inner))}
    if last:
        found |= {f"decoder.final_layernorm.{kind}": x for kind, x in final(weights).items()}
        if not (tied and first):
            found["output_layer.weight"] = output
    return found


def legacy(inner, weights, tokens, output, first, last, tied):
    encoder = {f"layers.{n}.{name}": x for n, one in enumerate(inner) for name, x in one.items()}
    found = {"language_model": {"encoder": encoder}}
    if first:
        found["language_model"]["embedding"] = {"word_embeddings": {"weight": tokens}}
        if "entry.table" in weights:
            found["language_model"]["embedding"]["position_embeddings"] = {"weight": weights["entry.table"]}
    if last:
        encoder |= {f"final_layernorm.{kind}": x for kind, x in final(weights).items()}
        if not tied:
            found["language_model"]["output_layer"] = {"weight": output}
        elif not first:
            found["word_embeddings_for_head"] = {"weight": output}
    return found


def megatron_deepspeed(folder, weights, args, tp=1, gaps=True):
    """layer_XX-model_YY-model_states.pt; ``gaps``: BigScience's pipeline has functions between the layers, which count."""
    gated = bool(args.get("swiglu") or args.get("glu_activation"))
    at = folder / "global_step7"
    for rank in range(tp):
        entry = {"word_embeddings.weight": cut("tokens.weight", weights["tokens.weight"], rank, tp, False)}
        if "entry.table" in weights:
            entry["position_embeddings.weight"] = weights["entry.table"]
        entry |= {
            n.replace("entry.norm", "word_embeddings.norm"): x for n, x in weights.items() if n.startswith("entry.norm")
        }
        layers = {1: entry}
        for index in range(args["num_layers"]):
            layers[2 + gaps + index] = layer(weights, index, OLD, rank, tp, gated)
        last = 2 + 2 * gaps + args["num_layers"]
        layers[last] = final(weights)
        if "output.weight" in weights:
            layers[last + 1] = {"lm_head.weight": cut("output.weight", weights["output.weight"], rank, tp, False)}
        for number, tensors in layers.items():
            save(at / f"layer_{number:02d}-model_{rank:02d}-model_states.pt", tensors)
        save(
            at / f"mp_rank_{rank:02d}_model_states.pt",
            {"args": Namespace(**args), "checkpoint_version": 3.0, **noise()},
        )
    (folder / "latest").write_text("global_step7")


def same_weights(run, drawn):
    folder, manifest = directory.newest(run / "checkpoints")
    with CheckpointTensors(folder, manifest) as saved:
        assert set(saved.shapes()) == {f"model.{name}" for name in drawn}
        for name, whole in drawn.items():
            assert torch.equal(saved.whole(f"model.{name}"), whole), name


def network(run, **more):
    """The settings of a run's network that differ from the defaults."""
    found, default = dict(leaves(load(run / "config.yaml").model)), dict(leaves(ModelConfig()))
    return {name: value for name, value in found.items() if value != default[name]}


DROPOUT = {"dropout": 0.1, "attention.dropout": 0.1}
GPT = {**SHAPE, "ffn": 192, **DROPOUT}
GPT.pop("vocab_multiple")
WANTED = {"gpt": GPT, "llama": {k: v for k, v in LLAMA.items() if k != "vocab_multiple"} | DROPOUT}
WANTED["gpt"].pop("attention.kv_heads", None)
CASES = {"gpt": (SHAPE, ARGS), "llama": (LLAMA, LLAMA_ARGS)}


@pytest.mark.parametrize("style", ["core", "core te", "legacy"])
@pytest.mark.parametrize("kind, tp, pp, vp", [("gpt", 1, 1, 1), ("gpt", 2, 2, 1), ("llama", 4, 2, 2), ("gpt", 2, 2, 2)])
def test_megatron_lms_ranks_are_put_together(kind, tp, pp, vp, style, tmp_path):
    shape, args = CASES[kind]
    drawn = made.Drawn(ModelConfig.of(shape)).weights
    megatron_lm(tmp_path / "megatron", drawn, args, tp, pp, vp, style)
    convert(tmp_path / "megatron", tmp_path / "run", "model.vocab_multiple=8")
    same_weights(tmp_path / "run", drawn)
    assert network(tmp_path / "run") == WANTED[kind] | dict(vocab_multiple=8)


@pytest.mark.parametrize(
    "version, change",
    [
        (0, lambda x: x.unflatten(0, (-1, 3, 6)).transpose(0, 1).flatten(0, 2)),  # [3, heads, D] in each rank
        (1.0, lambda x: x.unflatten(0, (-1, 3, 6)).transpose(1, 2).flatten(0, 2)),  # [heads, D, 3]
        (2.0, lambda x: x),
        (None, lambda x: x.unflatten(0, (-1, 3, 6)).transpose(0, 1).flatten(0, 2)),  # says nothing: the first
    ],
)
def test_older_orders_of_the_fused_projection_become_todays(version, change, tmp_path):
    drawn = made.Drawn(ModelConfig.of(SHAPE)).weights
    megatron_lm(tmp_path / "megatron", drawn, ARGS, 2, 1, 1, "legacy", version, change)
    if version is None:
        for path in (tmp_path / "megatron").rglob("*.pt"):
            state = torch.load(path, weights_only=False)
            del state["checkpoint_version"]
            torch.save(state, path)
    convert(tmp_path / "megatron", tmp_path / "run", "model.vocab_multiple=8")
    same_weights(tmp_path / "run", drawn)


BLOOM = dict(**SHAPE, positions="alibi", embed_norm=True)
DEEPSPEED = {
    "gpt": (SHAPE, ARGS, True),
    "bloom": (BLOOM, ARGS | dict(embed_layernorm=True), True),
    "llama": (LLAMA, LLAMA_ARGS | dict(num_key_value_heads=4, position_embedding_type="learned_absolute",
              use_rotary_position_embeddings=True, normalization="rmsnorm"), False),
}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("kind", DEEPSPEED)
def test_megatron_deepspeeds_layers_are_put_together(kind, tp, tmp_path, enums):
    shape, args, gaps = DEEPSPEED[kind]
    if kind == "bloom":
        args = args | dict(position_embedding_type=enums.alibi)
    drawn = made.Drawn(ModelConfig.of(shape)).weights
    megatron_deepspeed(tmp_path / "megatron", drawn, args, tp, gaps)
    enums.forget()
    convert(tmp_path / "megatron", tmp_path / "run", "model.vocab_multiple=8")
    same_weights(tmp_path / "run", drawn)
    found = network(tmp_path / "run")
    assert found == {k: v for k, v in shape.items() if k != "activation" or v != "gelu_tanh"} | DROPOUT | dict(
        ffn=args["ffn_hidden_size"]
    )


@pytest.fixture
def enums(monkeypatch):
    """Megatron's enumeration of positions, in a module that is not there when files are read."""
    module = types.ModuleType("megatron.enums")
    kind = enum.Enum("PositionEmbeddingType", {"rotary": 1, "absolute": 2, "alibi": 3}, module="megatron.enums")
    module.PositionEmbeddingType = kind
    monkeypatch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.enums", module)

    def forget():
        for name in ("megatron", "megatron.enums"):
            monkeypatch.delitem(sys.modules, name)

    return types.SimpleNamespace(alibi=kind.alibi, forget=forget)


def test_megatron_deepspeeds_ranks_without_a_pipeline_are_put_together(tmp_path, enums):
    drawn = made.Drawn(ModelConfig.of(SHAPE)).weights
    for rank in range(2):
        inner = [layer(drawn, n, OLD, rank, 2, False) for n in range(4)]
        tokens = cut("tokens.weight", drawn["tokens.weight"], rank, 2, False)
        module = legacy(inner, drawn, tokens, tokens, True, True, True)
        state = {"module": module, "args": Namespace(**ARGS), "checkpoint_version": 3.0, "kept": enums.alibi, **noise()}
        save(tmp_path / f"megatron/mp_rank_{rank:02d}_model_states.pt", state)
    enums.forget()
    convert(tmp_path / "megatron", tmp_path / "run", "model.vocab_multiple=8")
    same_weights(tmp_path / "run", drawn)


def test_bigsciences_glu_has_its_gate_second(tmp_path):
    shape = dict(**SHAPE, activation="geglu", ffn=96)
    drawn = made.Drawn(ModelConfig.of(shape)).weights
    theirs = {n: torch.cat([*reversed(x.chunk(2))]) if ".mlp.up." in n else x for n, x in drawn.items()}
    for tp in (1, 2):
        args = ARGS | dict(glu_activation="geglu", ffn_hidden_size=96)
        megatron_deepspeed(tmp_path / f"megatron{tp}", theirs, args, tp)
        convert(tmp_path / f"megatron{tp}", tmp_path / f"run{tp}", "model.vocab_multiple=8")
        same_weights(tmp_path / f"run{tp}", drawn)


def test_the_vocabularys_padding_goes_and_ours_comes(tmp_path, caplog):
    drawn = made.Drawn(ModelConfig.of(SHAPE)).weights
    megatron_lm(tmp_path / "megatron", drawn, ARGS, 2)
    convert(tmp_path / "megatron", tmp_path / "padded")
    assert "model.vocab_size=96 is the checkpoint's" in caplog.text
    convert(tmp_path / "megatron", tmp_path / "run", "model.vocab_size=91", "model.vocab_multiple=64")
    folder, manifest = directory.newest(tmp_path / "run/checkpoints")
    with CheckpointTensors(folder, manifest) as saved:
        table = saved.whole("model.tokens.weight")
    assert table.shape == (128, 48) and torch.equal(table[:91], drawn["tokens.weight"][:91]) and not table[91:].any()
    logits = [made.logits(tmp_path / run, made.TOKENS % 91) for run in ("run", "padded")]
    assert torch.equal(logits[0], logits[1][..., :91])


def test_megatron_cores_own_weights_give_its_own_logits(tmp_path):
    golden = np.load(shared("reference/model/gpt2_style.npz"))
    state = {n.removeprefix("param/"): torch.from_numpy(golden[n]) for n in golden.files if n.startswith("param/")}
    args = dict(num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=16, padded_vocab_size=128)
    args |= dict(bias_gelu_fusion=False, swiglu=False, add_bias_linear=True, normalization="LayerNorm")
    path = tmp_path / "megatron/mp_rank_00/model_optim_rng.pt"
    save(path, {"model": state, "args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 7})
    convert(tmp_path / "megatron", tmp_path / "run")
    ours = made.logits(tmp_path / "run", torch.from_numpy(golden["tokens"])[:, :-1])
    made.close(ours, torch.from_numpy(golden["logits"]))


REFUSED = {
    "experts": (dict(num_experts=8), "moe_router_topk is missing, so it is unknown how tokens choose experts"),
    "post norm": (dict(apply_residual_connection_post_layernorm=True), "apply_residual_connection_post_layernorm=True"),
    "part of a head": (dict(rotary_percent=0.5), "rotary_percent=0.5"),
    "head width": (dict(kv_channels=16), "kv_channels=16, but hidden_size / num_attention_heads = 6"),
    "unit gain": (dict(apply_layernorm_1p=True), "apply_layernorm_1p=True"),
    "positions": (dict(position_embedding_type="mrope"), "position_embedding_type=mrope"),
    "layers": (dict(num_layers=None), "num_layers is missing"),
    "more layers": (dict(num_layers=5), "has no block4."),
    "endless": (dict(num_layers=10**4), "tensors, too few for the 10000 layers"),
    "a tensor too many": (dict(num_layers=3), "that this network does not use: block3."),
    "too few rows": (dict(padded_vocab_size=200), "has 96 rows, but model.vocab_size is 200"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_networks_are_refused_and_nothing_is_left(case, tmp_path):
    change, answer = REFUSED[case]
    drawn = made.Drawn(ModelConfig.of(SHAPE)).weights
    megatron_lm(tmp_path / "megatron", drawn, ARGS)
    path = tmp_path / "megatron/iter_0000007/mp_rank_00/model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    vars(state["args"]).update(change)
    torch.save(state, path)
    with pytest.raises(ConfigError) as error:
        convert(tmp_path / "megatron", tmp_path / "run")
    assert answer in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["megatron"]


def test_a_rank_that_only_one_stage_lacks_is_named(tmp_path):
    megatron_lm(tmp_path / "a", made.Drawn(ModelConfig.of(SHAPE)).weights, ARGS, 2, 2)
    (tmp_path / "a/iter_0000007/mp_rank_01_001/model_optim_rng.pt").unlink()
    with pytest.raises(ConfigError, match="no file of tensor-parallel rank 1 next to mp_rank_00_001/model_optim"):
        convert(tmp_path / "a", tmp_path / "run")


def test_missing_ranks_foreign_classes_and_other_formats_are_refused(tmp_path):
    drawn = made.Drawn(ModelConfig.of(SHAPE)).weights
    megatron_lm(tmp_path / "a", drawn, ARGS, 2)
    first = tmp_path / "a/iter_0000007/mp_rank_00/model_optim_rng.pt"
    held = first.read_bytes()
    first.unlink()
    with pytest.raises(ConfigError, match="has no file of tensor-parallel rank 0"):
        convert(tmp_path / "a", tmp_path / "run")
    save(first, {"args": Namespace(**ARGS), "optimizer": Code(), "model": {}})
    with pytest.raises(ConfigError, match=r"it names os\.system|it names posix\.system"):
        convert(tmp_path / "a", tmp_path / "run")
    first.write_bytes(held[: len(held) // 2])
    with pytest.raises(ConfigError, match=r"is not a torch\.save file|is refused"):
        convert(tmp_path / "a", tmp_path / "run")
    (tmp_path / "b/iter_0000007").mkdir(parents=True)
    (tmp_path / "b/iter_0000007/__0_0.distcp").touch()
    (tmp_path / "b/latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(ConfigError, match=r"has no \.metadata: it was not saved completely"):
        convert(tmp_path / "b", tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Code:
    """Its pickle runs a command."""

    def __reduce__(self):
        import os

        return os.system, ("true",)


def test_settings_that_the_files_do_not_have_are_given_as_words(tmp_path, caplog):
    drawn = made.Drawn(ModelConfig.of(SHAPE)).weights
    megatron_deepspeed(tmp_path / "megatron", drawn, ARGS, 2)
    for path in (tmp_path / "megatron/global_step7").glob("mp_rank_*"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"does not contain the network's settings; give model\.layers"):
        convert(tmp_path / "megatron", tmp_path / "run")
    words = [f"model.{name}={value}" for name, value in SHAPE.items()]
    save(tmp_path / "megatron/global_step7/mp_rank_00_model_states.pt", {"args": Code()})
    convert(tmp_path / "megatron", tmp_path / "run", *words)
    assert "are not used: " in caplog.text and "posix.system, which is not data" in caplog.text
    same_weights(tmp_path / "run", drawn)
    with pytest.raises(ConfigError, match=r"optim\.lr=1: an import accepts only model.… settings"):
        convert(tmp_path / "megatron", tmp_path / "more", "optim.lr=1")
    with pytest.raises(ConfigError, match=r"^model\.norm_eps='x' must be a number \(command line\)$"):
        convert(tmp_path / "megatron", tmp_path / "more", *words, "model.norm_eps=x")


NAMES = [
    name
    for line in (Path(__file__).with_name("megatron_options.txt")).read_text().splitlines()
    if not line.startswith("#")
    for name in line.split()
]


TEXTS = {
    group: options.GROUPS[group].split() for group in ("without_effect", "experts_without_effect", "of_other_networks")
}
NEITHER = {"bias_gelu_fusion", "fim_data"}  # of a family without effect, but they have one


def test_every_option_of_megatrons_is_known_and_listed_once():
    listed = [text for texts in TEXTS.values() for text in texts] + [*(options.READ | options.CHECKED)]
    assert len(NAMES) > 1000 and sorted(listed) == sorted(set(listed))
    assert [name for name in NAMES if not options.is_known(name)] == []
    for texts in TEXTS.values():
        assert [text for text in texts if not fnmatch.filter(NAMES, text)] == []
        assert [(a, b) for a in texts for b in texts if a != b and fnmatch.fnmatchcase(a, b)] == []
    assert {*options.READ, *options.CHECKED} <= {*NAMES}


def test_nothing_that_changes_a_network_is_taken_for_an_option_without_effect():
    for name in (options.READ | options.CHECKED) - NEITHER:
        assert not any(
            fnmatch.fnmatchcase(name, text) for text in TEXTS["without_effect"] + TEXTS["experts_without_effect"]
        ), name


CORE_DEFAULTS = """
import dataclasses
from argparse import Namespace
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig
from hpclm.interop.megatron import options
fields = [field for each in (MLATransformerConfig, OptimizerConfig) for field in dataclasses.fields(each)]
values = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING and not callable(field.default)}
values.pop("multi_latent_attention")
values.pop("rope_type")  # with it, it would be yarn
print(len(values))
for experts in (0, 8):
    print(*options.of_network(Namespace(**values, num_experts=experts)), sep="", end="")
"""


def test_megatron_cores_defaults_are_not_refused():
    if find_spec("megatron") is None:  # importing it here fails where distutils was imported before it
        pytest.skip("megatron-core is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CORE_DEFAULTS],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    count, refused = done.stdout.split("\n")
    assert int(count) > 200 and not refused


def changed(folder, **change):
    """A checkpoint whose arguments have other values."""
    drawn = made.Drawn(ModelConfig.of(LLAMA)).weights
    megatron_lm(folder, drawn, LLAMA_ARGS | change)
    return folder


SILENT = dict(
    no_rope_freq=4, softmax_type="off-by-one", softmax_scale=0.1, qk_l2_norm=True, glu_linear_offset=1.0, use_mup=True,
    activation_func_clamp_value=7.0, attention_output_gate=True, experimental_attention_variant="dsa", window_size=(4, 0),
    heterogeneous_layers_config_path="layers.json", hybrid_override_pattern="M*M*", spec=["mine", "layers"],
    linear_attention_freq=4, mlp_type="residual", new_in_a_later_version=0.5, logits_scaling=8, mup_depth_multiplier=4,
    zero_centered_gamma=True, bidirectional=True, ds_scale=2.0, temperature=0.5, parallel_residual=True, early_fusion=True,
    exit_layer_nums=[2], load_balance_scale=2, memory_tokens=8, finetune_rank=4, window_overlap=2, cpu_layers=2, vocab_scale=2.0,
)  # fmt: skip
DEFAULTS = dict(
    no_rope_freq=None, softmax_type="vanilla", softmax_scale=None, qk_l2_norm=False, glu_linear_offset=0.0, use_mup=False,
    activation_func_clamp_value=None, attention_output_gate=False, experimental_attention_variant=None, window_size=None,
    heterogeneous_layers_config_path="", hybrid_override_pattern=None, spec=None, linear_attention_freq=None,
    mlp_type="standard", new_in_a_later_version=False, another=None, num_experts=[1], iterations_to_skip=[], moe_router_topk=2, tensor_model_parallel_size=8,
)  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_options_that_add_no_weight_are_refused_by_name(name, tmp_path, capsys):
    source = changed(tmp_path / "megatron", **{name: SILENT[name]})
    assert cli.main(["convert", str(source), str(tmp_path / "run")]) == 64
    assert f"{name}={SILENT[name]}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]


def test_their_defaults_are_imported(tmp_path):
    convert(
        changed(tmp_path / "megatron", **DEFAULTS), tmp_path / "run", "model.vocab_size=96", "model.vocab_multiple=8"
    )
    assert network(tmp_path / "run") == WANTED["llama"] | dict(vocab_multiple=8)


def test_options_can_be_ignored_by_name_but_not_those_that_hpclm_reads(tmp_path):
    source = changed(tmp_path / "megatron", my_own_report=10)
    with pytest.raises(ConfigError, match=r"my_own_report=10: hpclm does not know .* --ignore my_own_report"):
        convert(source, tmp_path / "run", "model.vocab_size=96")
    for name, answer in dict(swiglu="hpclm needs this option", nothing="has no such option").items():
        with pytest.raises(ConfigError, match=f"--ignore {name}: .*{answer}"):
            convert(source, tmp_path / "run", "model.vocab_size=96", "--ignore", name)
    convert(source, tmp_path / "run", "model.vocab_size=96", "--ignore", "my_own_report")
    with pytest.raises(ConfigError, match="--ignore and --weights-only are for imports"):
        convert(tmp_path / "run", tmp_path / "hf", "--ignore", "x")
