"""Every import is proven by a small model of transformers: where hpclm computes something else, the import is refused."""

from dataclasses import replace

import pytest

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.interop.huggingface import families, folder, twin
from tests.interop import made
from tests.interop.test_experts import PUBLISHED
from tests.interop.test_families import YARN

convert = cli.function("convert")


def proved(tree, change=lambda family: family):
    family, keys = families.of_config(tree)
    config = ModelConfig.of(family.settings(keys))
    twin.prove(change(family), keys, config, folder.Prefixed)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_published_model_is_proven_by_a_small_one(kind):
    proved(PUBLISHED[kind][0])


def test_rotary_parameters_of_a_kind_of_layers_may_be_empty():
    proved({"model_type": "gemma3_text", "rope_parameters": {"full_attention": {}}})


@pytest.mark.parametrize(
    "tree",
    [
        dict(model_type="olmo3", partial_rotary_factor=0.5, rope_parameters={"full_attention": YARN}),
        dict(model_type="gpt_oss", num_hidden_layers=1, layer_types=["full_attention"], sliding_window=None),
        dict(model_type="qwen3_moe", head_dim=None),
    ],
)
def test_what_transformers_cannot_run_is_refused_by_name(tree):
    with pytest.raises(ConfigError, match=r"transformers cannot run a small \w+ForCausalLM with these settings: "):
        proved(tree)


def swapped(family):
    """The class with the rules of gate and up projection swapped."""

    def rules(config):
        for rule in family.rules(config):
            if rule.ours.endswith(".mlp.up.weight"):
                rule = replace(rule, theirs=rule.theirs[::-1])
            yield rule

    return replace(family, rules=rules)


def read_as(**other):
    """A change of a class: it reads these settings from every config.json."""
    changes = {name.replace("__", "."): value for name, value in other.items()}
    return lambda family: replace(family, read=lambda tree: family.read(tree) | changes)


LLAMA = dict(model_type="llama", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, vocab_size=32000)
GEMMA = dict(model_type="gemma2")
FAULTS = {
    "gate and up swapped": (LLAMA, swapped),
    "rotary base": (LLAMA, read_as(rope__base=1.1e4)),
    "score scale": (LLAMA, read_as(attention__score_scale=0.09)),
    "epsilon": (LLAMA, read_as(norm_eps=2e-6)),
    "cap": (GEMMA, read_as(logit_cap=31.0)),
    "window": (dict(model_type="mistral"), read_as(attention__window=9)),
    "clamp": ({"model_type": "gpt_oss"}, read_as(activation="swiglu")),
    "router scale": (PUBLISHED["DeepSeek V3"][0], read_as(experts__router_scale=2.4)),
    "groups": (PUBLISHED["DeepSeek V3"][0], read_as(experts__router_top_groups=5)),
    "dynamic, above the original length": (
        {**LLAMA, "rope_parameters": dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)},
        read_as(rope__scaling=dict(rope_type="dynamic", factor="4.2", original_max_position_embeddings="8")),
    ),
}


@pytest.mark.parametrize("tree, change", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_of_hpclm_is_found(tree, change):
    proved(tree)
    with pytest.raises(ConfigError, match=r"has other logits in transformers .* than in hpclm: they differ by \d"):
        proved(tree, change)


def test_an_import_that_is_not_proven_leaves_nothing(tmp_path, monkeypatch):
    made.run(tmp_path / "run", made.NETWORKS["llama"][1])
    convert([str(tmp_path / "run"), str(tmp_path / "hf")])
    monkeypatch.setitem(families.FAMILIES, "llama", swapped(families.FAMILIES["llama"]))
    with pytest.raises(
        ConfigError, match=r"hf/config\.json: a small LlamaForCausalLM with these settings has other logits"
    ):
        convert([str(tmp_path / "hf"), str(tmp_path / "back")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]
