"""Presets of published models: the network is the class of transformers with its config.json, and a small twin trains."""

import json

import pytest
import torch

from hpclm import cli, config
from hpclm.config import ModelConfig
from hpclm.interop.huggingface import families
from hpclm.interop.rules import placements
from tests.runs import ROOT

LLAMA3 = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
LLAMA3 |= dict(num_key_value_heads=8, vocab_size=128256, rope_theta=500000.0, rms_norm_eps=1e-5)
SCALED = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=8192, beta_fast=32, beta_slow=1)
OLMO3 = dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)
OLMO3 |= dict(num_key_value_heads=32, vocab_size=100278, rope_theta=500000, rms_norm_eps=1e-6, sliding_window=4096)
SMOLLM3 = dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16)
SMOLLM3 |= dict(num_key_value_heads=4, vocab_size=128256, rope_theta=5000000.0, rms_norm_eps=1e-6)
QWEN3 = dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, head_dim=128)
QWEN3 |= dict(num_key_value_heads=8, vocab_size=151936, rope_theta=1000000, rms_norm_eps=1e-6)
PUBLISHED = {
    "olmo3-7b": dict(
        OLMO3,
        model_type="olmo3",
        max_position_embeddings=65536,
        rope_scaling=dict(YARN, attention_factor=1.2079441541679836),
    ),
    "smollm3-3b": dict(
        SMOLLM3,
        model_type="smollm3",
        max_position_embeddings=65536,
        no_rope_layer_interval=4,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": dict(QWEN3, model_type="qwen3", max_position_embeddings=32768),
    "llama3-8b": dict(LLAMA3, model_type="llama", max_position_embeddings=8192),
    "marin-8b": dict(
        LLAMA3, model_type="llama", max_position_embeddings=4096, rope_scaling=dict(SCALED, rope_type="llama3")
    ),
}
"""What decides about the network in the config.json of each."""
BEFORE = {  # kv_heads: null is as many as heads
    "olmo3-7b": dict(context=8192, rope_scaling={}, window_rope_scaled=True, kv_heads=None),
    "smollm3-3b": dict(context=4096, rope_base=50000.0),
    "qwen3-8b": dict(context=4096, rope_base=10000.0),
}
"""What their last stages, for long contexts, changed."""
PARAMETERS = {
    "olmo3-7b": 7_298_011_136,
    "smollm3-3b": 3_075_098_624,
    "qwen3-8b": 8_190_735_360,
    "llama3-8b": 8_030_261_248,
    "marin-8b": 8_030_261_248,
}
SIZES = ["model.layers=4", "model.hidden=32", "model.heads=4", "model.ffn=48", "model.vocab_size=64"]
SIZES += ["model.context=16", "batch.micro_size=2", "budget={steps: 12}", "parallel.shard=null"]
MORE = {
    "olmo3-7b": ["model.window=6"],
    "smollm3-3b": ["model.kv_heads=2", "optim.wsd_decay=2"],
    "qwen3-8b": ["model.kv_heads=2", "model.head_dim=8"],
    "llama3-8b": ["model.kv_heads=2", "batch.rampup=[4,4,24]"],
    "marin-8b": ["model.kv_heads=2", "optim.schedule_length=80", "optim.wsd_decay=16"],
}


def preset(name, *words):
    return config.load(ROOT / f"configs/{name}.yaml", list(words))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_network_is_that_of_the_published_model(name):
    transformers = pytest.importorskip("transformers")
    published, model = PUBLISHED[name], preset(name).model
    assert ModelConfig(**(families.settings(published) | BEFORE.get(name, {}))) == model
    with torch.device("meta"):
        there = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**published))
        ours = {name: torch.empty(placement.shape) for name, placement in placements(model).items()}
    theirs = {name: weight.shape for name, weight in there.named_parameters()}
    found = {}
    for rule in families.of_network(model).rules(model):
        found |= {name: part.shape for name, part in zip(rule.theirs, rule.split(ours[rule.ours]), strict=True)}
    assert found == theirs
    assert sum(shape.numel() for shape in theirs.values()) == PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_small_twin_trains(name, tmp_path):
    here = ["data.source=synthetic", "engine.device=cpu", "engine.compile=false", "log.tensorboard=false"]
    words = [*SIZES, *MORE[name], "batch.global_size=8", "optim.warmup=2", *here, f"out={tmp_path}/run"]
    assert cli.main(["train", str(ROOT / f"configs/{name}.yaml"), *words]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row.get("loss") is not None]
    losses = [row["loss"] for row in steps]
    assert len(losses) == 12 and sum(losses[-4:]) < sum(losses[:4])
    assert steps[0]["batch_size"] == (4 if "llama3" in name else 8)
