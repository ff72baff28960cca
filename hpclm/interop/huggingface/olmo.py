"""transformers' Olmo2ForCausalLM and Olmo3ForCausalLM: norms follow the sublayers, and the norms of q and k span all heads."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from hpclm.config import ModelConfig
from hpclm.interop.huggingface import llama, shape
from hpclm.interop.huggingface.family import Json

MODULES = {"post_norm1": "post_attention_layernorm", "post_norm2": "post_feedforward_layernorm"}
THETA = 500000.0  # OLMo 3's
OLMO2 = replace(
    llama.LLAMA,
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    keys=llama.NARROW,
    rules=partial(llama.rules, more=MODULES),
    needs={
        **llama.LLAMA.needs,
        "norm_order": ("post",),
        "attention.qk_norm": (True,),
        "attention.qk_norm_span": ("projection",),
    },
    constant=lambda config: llama.described_llama(config, llama.ALL_ATTENTION),
    shape=partial(llama.read_settings, biases=llama.ALL_ATTENTION),
    more=llama.bias_reasons(llama.ALL_ATTENTION),
    width=False,
)


def read_settings(tree: Json) -> dict[str, Any]:
    """OLMo 3's settings. Layers with a window have their own rotary positions, which the published models do not scale."""
    full, near = shape.by_kind(tree)
    layers = shape.layers(tree, shape.full_every(4), turned=True)
    far = shape.rope(tree, THETA, parameters=full)
    return far | shape.biases(tree, llama.ALL_ATTENTION) | layers | shape.near(tree, near, far, layers, THETA)


def described_olmo3(config: ModelConfig) -> dict[str, Any]:
    """The keys that read_settings() reads. They state rope_theta for each kind of layer, because transformers 5 applies a single
    rope_theta to only one kind."""
    return (
        shape.described_biases(config, llama.ALL_ATTENTION)
        | {"layer_types": shape.layer_types(config), "sliding_window": config.attention.window}
        | shape.described_by_kind(config)
    )


def wrong(tree: Json) -> Iterator[str]:
    """transformers 5 gives layers with a window another base than config.json states."""
    theta = tree.get("rope_theta")
    if theta not in (None, THETA) and not tree.get("rope_parameters"):
        yield f"rope_theta={theta} without rope_parameters: transformers uses {THETA:g} for layers with a window; write both"


OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    constant=described_olmo3,
    shape=read_settings,
    covers=(*OLMO2.covers, *shape.WINDOW_SETTINGS),
    wrong=wrong,
)
