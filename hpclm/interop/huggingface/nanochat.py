"""transformers' NanoChatForCausalLM: norms without weights, one of them right after the embedding, and capped logits."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.interop.huggingface import llama
from hpclm.interop.huggingface.completion import Keys
from hpclm.interop.rules import ConversionRule, absent, of_modules, placements, reordered

MODULES = {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}


def rules(config: ModelConfig) -> Iterable[ConversionRule]:
    """The conversion rule of each weight. NanoChat rotates queries and keys in the opposite direction; swapping the halves of a head undoes
    that."""
    half = config.head_width // 2
    swapped = torch.arange(config.head_width).roll(half)
    shapes = placements(config)
    for rule in of_modules(config, llama.modules(config, MODULES), llama.LAYER):
        if "norm" in rule.ours:
            yield absent(rule.ours, shapes[rule.ours].shape, 1.0)
        elif ".attention.qkv." in rule.ours:
            yield reordered(rule, swapped)
        else:
            yield rule


def scaled(rope_scaling: Mapping[str, str]) -> Iterator[str]:
    """Scalings of rotary positions that also multiply q and k; NanoChat's norms come after the rotation and undo that."""
    kind = rope_scaling.get("rope_type")
    if kind in ("yarn", "longrope"):
        yield f"rotary positions scaled by rope_type={kind}, which scales q and k after their norms in hpclm but before them in NanoChat"


def read(tree: Keys) -> dict[str, Any]:
    """Settings that depend on several keys."""
    settings = llama.read_llama(tree, llama.ALL_ATTENTION)
    wrong = list(scaled(settings["rope.scaling"]))
    if wrong:
        raise ConfigError(wrong)
    return settings


NANOCHAT = replace(
    llama.LLAMA,
    architecture="NanoChatForCausalLM",
    model_type="nanochat",
    keys={**llama.NARROW, "logit_cap": "final_logit_softcapping"},
    rules=rules,
    constants={**llama.LLAMA.constants, "embed_norm": True, "attention.qk_norm": True},
    write=partial(llama.write_llama, biases=llama.ALL_ATTENTION),
    read=read,
    activations=llama.SQUARED,
)
