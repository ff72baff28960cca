"""A key that is missing in config.json, or null, means what it means to its class in transformers."""

import dataclasses
import json
import random
import typing

import pytest

from hpclm.base.errors import ConfigError
from hpclm.interop import run
from hpclm.interop.huggingface import families, relatives
from hpclm.interop.huggingface.defaults import DEFAULTS, NULLABLE

RELATIVES = [family.model_type for family in relatives.ALL_FAMILIES]
KINDS = [kind for kind in families.FAMILIES if kind not in ("hpclm", "kimi_k2", *RELATIVES)]
NOT_READ = {"bloom": {"seq_length"}, "glm4": {"partial_rotary_factor"}, "smollm3": {"head_dim"}}
NOT_READ |= {kind: {"head_dim"} for kind in ("granite", "apertus", "qwen3_moe", "ernie4_5_moe", "dots1", "glm4_moe")}
"""Keys that are no fields of the class: it takes them all the same, or only hpclm does."""
GIVEN = {
    "gpt_neox": dict(use_parallel_residual=False),  # the default is a network that hpclm does not have
    "dots1": dict(n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2),  # which have no default
    "glm4_moe": dict(head_dim=128),  # by default 4096 / 96
    "deepseek_v2": dict(num_experts_per_tok=2),  # which has no default
}
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
NETWORKS = {}
"""Of the model settings that config.json files gave so far: many of them give the same."""


@pytest.fixture(scope="module")
def classes():
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    return transformers.CONFIG_MAPPING


def settings(tree):
    """The network that hpclm makes of a config.json; None if it refuses it."""
    try:
        found = families.model_settings(tree)
        network = NETWORKS.get(repr(found)) or run.network(found, [])
    except ConfigError:
        return None
    NETWORKS[repr(found)] = network
    heads = {"attention.head_dim": network.head_dim}
    if not network.attention.latent.kv_rank:
        heads["attention.kv_heads"] = network.attention.groups
    return network.replaced({**heads, "ffn": network.ffn_width})


def explicit(classes, tree):
    """The same config.json with every default of its class; None if transformers refuses it."""
    try:
        written = json.loads(json.dumps(classes[tree["model_type"]].from_dict(json.loads(json.dumps(tree))).to_dict()))
    except Exception:
        return None
    return {key: value for key, value in written.items() if value is not None or key in tree}


def base(kind):
    """A config.json that says nothing, as far as hpclm reads that."""
    return {"model_type": kind, **GIVEN.get(kind, {})}


def small(kind):
    """A config.json in which nothing has its default."""
    tree = {**DEFAULTS[kind], **base(kind)}
    sizes = dict(
        hidden_size=48, n_embd=48, num_attention_heads=6, n_head=6, head_dim=12, num_hidden_layers=5, n_layer=5
    )
    sizes |= dict(num_key_value_heads=3, intermediate_size=80, n_inner=80, max_position_embeddings=64, n_positions=64)
    sizes |= dict(vocab_size=93, sliding_window=7, use_sliding_window=True, max_window_layers=1, initializer_range=0.1)
    sizes |= dict(no_rope_layer_interval=2, query_pre_attn_scalar=20, original_max_position_embeddings=32)
    tree |= {key: value for key, value in sizes.items() if key in tree}
    tree |= {key: 0.3 for key, value in tree.items() if type(value) is float and "cap" not in key}
    tree |= {key: not value for key, value in DEFAULTS[kind].items() if isinstance(value, bool) and key not in sizes}
    tree |= {"num_key_value_heads": 6} if kind in LATENT else {}
    tree |= {"head_dim": 64} if kind == "deepseek_v2" else {}
    tree |= {"partial_rotary_factor": 1.0} if kind == "glm4" else {}
    tree |= {"attention_dropout": 0.0} if kind in ("gemma2", "gpt_oss") else {}  # hpclm has none with a cap or sinks
    return tree | base(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_default_is_that_of_the_class(kind, classes):
    fields = {field.name: field for field in dataclasses.fields(classes[kind])}
    known = {key: value for key, value in DEFAULTS[kind].items() if key not in NOT_READ.get(kind, ())}
    assert known == {key: fields[key].default for key in known}
    nullable = {key for key in known if known[key] is not None and type(None) in typing.get_args(fields[key].type)}
    assert {*NULLABLE.get(kind, "").split()} - nullable <= ({"num_key_value_heads"} if kind == "mistral" else set())
    assert nullable <= {*NULLABLE.get(kind, "").split()}
    family = families.FAMILIES[kind]
    read = {*family.keys.values(), *family.read.split(), "vocab_size", "initializer_range"}
    assert read & fields.keys() <= DEFAULTS[kind].keys() | family.fixed.keys() | {"rope_parameters"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_json_that_says_nothing_is_the_default_network(kind, classes):
    tree = base(kind)
    assert settings(tree) is not None and settings(tree) == settings(explicit(classes, tree))


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_key_or_null_is_what_transformers_makes_of_it(kind, classes):
    whole, draw = small(kind), random.Random(5)
    assert settings(whole) is not None and settings(whole) == settings(explicit(classes, whole))
    keys = [key for key in whole if key not in base(kind)]
    cases = [{key: value for key, value in whole.items() if key != gone} for gone in keys]
    cases += [{**whole, key: None} for key in keys]
    for _ in range(20):
        gone = set(draw.sample(keys, 3))
        cases.append({key: value for key, value in whole.items() if key not in gone})
    compared = 0
    for tree in cases:
        ours, theirs = settings(tree), explicit(classes, tree)
        if kind == "mistral" and tree.get("num_key_value_heads", 1) is None:  # older files; 5.24 checks the type
            assert ours.attention.kv_heads == ours.attention.heads
        elif theirs is None:
            assert ours is None, f"transformers refuses {tree}"
        elif ours is not None:
            compared += 1
            assert ours == settings(theirs), tree
    assert compared > 20
