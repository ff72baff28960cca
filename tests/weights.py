"""Other projects' weights under hpclm's names, to hold the model against them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hpclm.config import EngineConfig, ModelConfig
from hpclm.model import gpt
from hpclm.model.stack import Stack


def build(config: ModelConfig, weights: Mapping[str, Tensor] | None = None, seed: int = 1, **engine) -> Stack:
    """A model on the CPU in fp32; every one of its parameters comes from ``weights`` when they are given."""
    settings = EngineConfig(**engine)
    stack = Stack(
        config,
        gpt.layers(config, settings, torch.float32, seed),
        torch.float32,
        recompute_every=settings.recompute_every,
    )
    if weights is not None:
        mine = {name.removeprefix("layers."): p for name, p in stack.named_parameters()}
        assert mine.keys() == weights.keys(), mine.keys() ^ weights.keys()
        with torch.no_grad():
            for name, p in mine.items():
                p.copy_(weights[name])
    return stack


def from_mcore(arrays: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Megatron-core's GPTModel (local spec): the fused projection has the same order as ours."""
    found = {
        "tokens.weight": arrays["embedding.word_embeddings.weight"],
        "entry.table": arrays["embedding.position_embeddings.weight"],
    }
    names = {
        "norm1": "input_layernorm",
        "attention.qkv": "self_attention.linear_qkv",
        "attention.out": "self_attention.linear_proj",
        "norm2": "pre_mlp_layernorm",
        "mlp.up": "mlp.linear_fc1",
        "mlp.down": "mlp.linear_fc2",
    }
    for kind in ("weight", "bias"):
        found[f"norm.{kind}"] = arrays[f"decoder.final_layernorm.{kind}"]
        for index in range(layers):
            for ours, theirs in names.items():
                found[f"block{index}.{ours}.{kind}"] = arrays[f"decoder.layers.{index}.{theirs}.{kind}"]
    return found


def fuse(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """Separate projections [heads * D, ...] -> for each key/value head its queries, its key, its value."""
    parts = [x.unflatten(0, (groups, -1)) for x in (q, k, v)]
    return torch.cat(parts, 1).flatten(0, 1)


def from_llama(state: Mapping[str, Tensor], layers: int, groups: int, qk_norm: bool = False) -> dict[str, Tensor]:
    """transformers' LlamaForCausalLM, or Qwen3ForCausalLM with ``qk_norm``."""
    found = {"tokens.weight": state["model.embed_tokens.weight"], "norm.weight": state["model.norm.weight"]}
    found["output.weight"] = state["lm_head.weight"]
    for index in range(layers):
        theirs, ours = f"model.layers.{index}.", f"block{index}."
        q, k, v = (state[f"{theirs}self_attn.{x}_proj.weight"] for x in "qkv")
        found[ours + "attention.qkv.weight"] = fuse(q, k, v, groups)
        found[ours + "attention.out.weight"] = state[theirs + "self_attn.o_proj.weight"]
        gate, up = state[theirs + "mlp.gate_proj.weight"], state[theirs + "mlp.up_proj.weight"]
        found[ours + "mlp.up.weight"] = torch.cat([gate, up])
        found[ours + "mlp.down.weight"] = state[theirs + "mlp.down_proj.weight"]
        found[ours + "norm1.weight"] = state[theirs + "input_layernorm.weight"]
        found[ours + "norm2.weight"] = state[theirs + "post_attention_layernorm.weight"]
        if qk_norm:
            found |= {f"{ours}attention.{x}_norm.weight": state[f"{theirs}self_attn.{x}_norm.weight"] for x in "qk"}
    return found


def from_gpt2(state: Mapping[str, Tensor], layers: int, heads: int) -> dict[str, Tensor]:
    """transformers' GPT2LMHeadModel, whose linear layers are stored transposed."""
    found = {"tokens.weight": state["transformer.wte.weight"], "entry.table": state["transformer.wpe.weight"]}
    names = {
        "norm1": "ln_1",
        "attention.out": "attn.c_proj",
        "norm2": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for kind in ("weight", "bias"):
        found[f"norm.{kind}"] = state[f"transformer.ln_f.{kind}"]
        for index in range(layers):
            theirs = f"transformer.h.{index}."
            found[f"block{index}.attention.qkv.{kind}"] = fuse(
                *state[f"{theirs}attn.c_attn.{kind}"].t().chunk(3), heads
            )
            for ours, name in names.items():
                value = state[f"{theirs}{name}.{kind}"]
                found[f"block{index}.{ours}.{kind}"] = value.t() if value.ndim == 2 else value
    return found


def from_bloom(state: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """transformers' BloomForCausalLM: its fused projection is (heads, 3, D), as ours for plain attention."""
    found = {"tokens.weight": state["transformer.word_embeddings.weight"]}
    names = {
        "norm1": "input_layernorm",
        "attention.qkv": "self_attention.query_key_value",
        "attention.out": "self_attention.dense",
        "norm2": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }
    for kind in ("weight", "bias"):
        found[f"norm.{kind}"] = state[f"transformer.ln_f.{kind}"]
        found[f"entry.norm.{kind}"] = state[f"transformer.word_embeddings_layernorm.{kind}"]
        for index in range(layers):
            for ours, theirs in names.items():
                found[f"block{index}.{ours}.{kind}"] = state[f"transformer.h.{index}.{theirs}.{kind}"]
    return found
