"""Numbers of parameters against the networks that are built."""

from math import prod

import pytest
import torch

from hpclm import config
from hpclm.config import EngineConfig, ModelConfig
from hpclm.model import count, gpt
from hpclm.model.stack import Stack
from hpclm.model.weights import of_block

TINY = {
    "vocab_size": 200,
    "layers": 3,
    "hidden": 32,
    "attention.heads": 4,
    "context": 16,
    "experts.count": 8,
    "experts.ffn": 24,
}
GATED = dict(bias=False, activation="swiglu", positions="rope", norm="rmsnorm", tied=False)
SHAPES = {
    "plain": {},
    "gated": GATED,
    "some dense": {"experts.pattern": ["dense", "experts"], "ffn": 40},
    "shared": {**GATED, "experts.shared_ffn": 48, "experts.router_choice_bias": True},
    "biases": {
        **GATED,
        "mlp_bias": True,
        "experts.router_bias": True,
        "attention.sinks": True,
        "activation": "swiglu_clamped",
    },
    "shared with biases": {"experts.shared_ffn": 48, "experts.per_token": 3},
    "as wide as dense": {"experts.ffn": None, "ffn": 40},
    "no experts": {"experts.count": 0, "experts.ffn": None, "activation": "xielu"},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parameters_are_those_of_the_network_without_the_bias_of_the_choice(shape):
    model = ModelConfig.of(TINY | shape)
    specs = gpt.layers(model, EngineConfig(), torch.float32, 1)
    stack = Stack(model, specs, torch.float32, wrap=lambda name, layer: layer)
    weights = {name: placement for name, placement in stack.placements.items() if "choice_bias" not in name}
    assert weights.keys() == dict(stack.weights()).keys()
    assert count.parameters(model) == sum(prod(placement.shape) for placement in weights.values())
    idle = sum(prod(p.shape) // model.experts.count for name, p in weights.items() if ".experts." in name)
    idle *= model.experts.count - model.experts.per_token
    assert count.active_parameters(model) == count.parameters(model) - idle
    of_blocks = {
        f"block{number}.{name}": weight.placement
        for number, layer in enumerate(model.blocks)
        for name, weight in of_block(model, layer).items()
    }
    assert of_blocks == {name: placement for name, placement in weights.items() if name.startswith("block")}


@pytest.mark.parametrize(
    "preset, total, active",
    [("qwen3-30b-a3b", 30.5e9, 3.3e9), ("olmoe-7b", 6.9e9, 1.3e9)],
    ids=lambda value: str(value),
)
def test_presets_have_as_many_parameters_as_their_papers_say(preset, total, active):
    model = config.load(f"configs/{preset}.yaml", []).model
    assert round(count.parameters(model), -8) == total
    assert abs(count.active_parameters(model) - active) < 1e8
    said = f"{count.parameters(model):,} parameters ({count.active_parameters(model):,} active for each token)"
    assert count.described_size(model) == said


def test_frozen_parameters_are_not_trained_and_their_gradients_not_computed():
    words = ["model.tied=false", "model.layers=4"]
    model, frozen = (config.load(None, [*words, f"model.freeze={names}"]).model for names in ("[]", "['block[01].*']"))
    of_blocks = 2 * count.block(model, model.blocks[0])
    assert (
        count.trained_parameters(frozen) == count.parameters(model) - of_blocks == count.parameters(frozen) - of_blocks
    )
    assert count.described_size(frozen).endswith(f" parameters, {count.trained_parameters(frozen):,} of them trained")
    saved = 2 * 2 * count.products(model, model.blocks[0])
    assert count.flops_per_token(model) - count.flops_per_token(frozen) == saved


def test_a_token_costs_the_products_of_its_experts_alone():
    few, many = (
        ModelConfig.of(TINY | GATED | {"experts.count": experts, "experts.per_token": 2}) for experts in (4, 64)
    )
    router = 6 * 3 * 32 * 60
    assert count.flops_per_token(many) - count.flops_per_token(few) == router
    dense = ModelConfig.of(TINY | GATED | {"experts.count": 0, "experts.ffn": None, "ffn": 2 * 24})
    assert count.flops_per_token(few) - count.flops_per_token(dense) == 6 * 3 * 32 * 4
    more = ModelConfig.of(TINY | GATED | {"experts.count": 4, "experts.per_token": 3})
    assert count.flops_per_token(more) - count.flops_per_token(few) == 6 * 3 * 3 * 32 * 24


def test_windows_limit_what_a_token_attends_to():
    """A window of 4 in 16 tokens: 4 - 4 x 4 / 32 on average; without a window 16 - 16 x 16 / 32."""
    model = ModelConfig.of({"layers": 2, "context": 16, "attention.pattern": ["window", "full"], "attention.window": 4})
    assert count.attended(model) == (3.5 + 8.0) / 2 and count.attended(model, causal=False) == (4 + 16) / 2
    assert (
        count.attended(
            ModelConfig.of({"layers": 3, "context": 16, "attention.pattern": ["window"], "attention.window": 99})
        )
        == 8.0
    )


@pytest.mark.parametrize(
    "tokens, vocab, memory, chunk",
    [
        (4096, 50304, 1e9, 4096),
        (8192, 50304, 1e9, 4096),
        (5000, 50304, 1e9, 2500),  # equal chunks
        (4098, 50304, 1e9, 2049),
        (12291, 50304, 1e9, 3073),  # 3 x 17 x 241: no 4, 5, 6 or 7 equal ones, so the last is smaller
        (8192, 50304, 60 << 30, 8192),  # 2^32 bytes hold 10,672 tokens of 8 bytes for each logit
        (10673, 50304, 60 << 30, 5337),
        (8192, 50304, (60 << 30) - 1, 4096),
        (1, 50304, 1e9, 1),
    ],
)
def test_logits_are_computed_in_equal_chunks_that_a_gpu_has_room_for(tokens, vocab, memory, chunk):
    assert count.loss_chunk(tokens, vocab, memory) == chunk
