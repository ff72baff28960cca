"""Which kinds of model of transformers there are here, by their model_type."""

from typing import Any

from hpclm.config import ModelConfig
from hpclm.errors import ConfigError
from hpclm.interop.huggingface import bloom, gpt2, llama, neox
from hpclm.interop.huggingface.family import Family, Json

FAMILIES: dict[str, Family] = {
    "gpt2": gpt2.FAMILY,
    "bloom": bloom.FAMILY,
    "llama": llama.LLAMA,
    "qwen3": llama.QWEN3,
    "gpt_neox": neox.FAMILY,
    "mistral": llama.MISTRAL,
}
WRITTEN = ("gpt2", "bloom", "llama", "qwen3", "gpt_neox")
"""Those that networks are written as; a Mistral is a Llama."""


def of_network(config: ModelConfig) -> Family:
    """The kind that a network is; ConfigError says what keeps it from being the nearest."""
    found = {kind: FAMILIES[kind].obstacles(config) for kind in WRITTEN}
    fewest = min(map(len, found.values()))
    nearest = [FAMILIES[kind] for kind, obstacles in found.items() if len(obstacles) == fewest]
    if fewest:
        wrong = [f"{family.architecture}: {'; '.join(family.obstacles(config))}" for family in nearest]
        raise ConfigError(["this network has no Hugging Face form; what keeps it from the nearest:", *wrong])
    return nearest[0]


def of_config(tree: Json) -> Family:
    """The kind that a config.json describes; ConfigError where hpclm has no such network."""
    kind = tree.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"model_type={kind} is not known here; hpclm reads {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    wrong = family.problems(tree)
    if tree.get("quantization_config") is not None:
        wrong.append("its weights are quantized, and hpclm reads fp32, bf16 and fp16")
    if wrong:
        raise ConfigError(wrong)
    return family


def settings(tree: Json) -> dict[str, Any]:
    """The model settings that a config.json stands for; ConfigError where hpclm has no such network."""
    family = of_config(tree)
    if tree.get("vocab_size") is None:
        raise ConfigError("it does not say vocab_size")
    one = {name: values[0] for name, values in family.needs.items() if len(values) == 1}
    known = dict(vocab_size=tree["vocab_size"], init_std=tree.get("initializer_range", 0.02))
    return one | known | family.settings(tree)
