"""transformers' Olmo2ForCausalLM and Olmo3ForCausalLM: norms follow the sublayers, and the norms of q and k span all heads."""

from dataclasses import replace
from functools import partial
from typing import Any

from hpclm.config import ModelConfig
from hpclm.interop.huggingface import llama, shape
from hpclm.interop.huggingface.completion import Keys

MODULES = {"post_norm1": "post_attention_layernorm", "post_norm2": "post_feedforward_layernorm"}
OLMO2 = replace(
    llama.LLAMA,
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    keys=llama.NARROW,
    rules=partial(llama.rules, more=MODULES),
    constants={
        **llama.LLAMA.constants,
        "norm_order": "post",
        "attention.qk_norm": True,
        "attention.qk_norm_span": "projection",
    },
    write=partial(llama.write_llama, biases=llama.ALL_ATTENTION),
    read=partial(llama.read_llama, biases=llama.ALL_ATTENTION),
)


def write_olmo3(config: ModelConfig) -> dict[str, Any]:
    """The keys that OLMo 3 reads. They state rope_theta for each kind of layer, because transformers 5 applies a single rope_theta to only
    one kind."""
    return (
        llama.write_llama(config, llama.ALL_ATTENTION)
        | {"layer_types": shape.layer_types(config), "sliding_window": config.attention.window}
        | shape.described_by_kind(config)
    )


def read_olmo3(tree: Keys) -> dict[str, Any]:
    """OLMo 3's settings. Layers with a window have their own rotary positions, which the published models do not scale."""
    return shape.kinds_of_positions(tree) | shape.biases(tree, llama.ALL_ATTENTION)


OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    write=write_olmo3,
    read=read_olmo3,
    newer=lambda config: any(rope.base != config.rope.base or rope.scaling for rope in config.rotates_in_windows),
)
