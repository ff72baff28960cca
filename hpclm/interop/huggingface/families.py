"""The classes of transformers that hpclm converts, by model_type."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.config.rope import KINDS
from hpclm.interop.huggingface import (
    biased_mixtures,
    bloom_neox,
    custom,
    deepseek,
    fp8_blocks,
    gemma,
    glm_phi,
    gpt2,
    llama,
    mixtures,
    nanochat,
    olmo,
    relatives,
    shape,
    unsupported,
)
from hpclm.interop.huggingface.family import Family, Json
from hpclm.interop.rules import without

OLDER = (gpt2.FAMILY, bloom_neox.BLOOM, bloom_neox.NEOX)
NEWER = (olmo.OLMO2, olmo.OLMO3, gemma.GEMMA2, gemma.GEMMA3, glm_phi.GLM4, nanochat.NANOCHAT)
EXPERTS = (*mixtures.ALL_FAMILIES, *biased_mixtures.ALL_FAMILIES, *deepseek.ALL_FAMILIES)
WRITTEN = (*OLDER, glm_phi.PHI3, *llama.ALL_FAMILIES, *NEWER, *relatives.ALL_FAMILIES, *EXPERTS)
"""Classes for an export, in the order they are tried in."""
FAMILIES: dict[str, Family] = {family.model_type: family for family in (*WRITTEN, deepseek.KIMI, custom.FAMILY)}


def of_network(config: ModelConfig) -> Family:
    """The class for a network: transformers' or hpclm's; ConfigError for a user-defined block."""
    candidates = (*WRITTEN, custom.FAMILY)
    for family in candidates:
        if not family.obstacles(config):
            return family
    raise ConfigError(["this network has no Hugging Face form:", *nearest_obstacles(config, candidates)])


def nearest_obstacles(config: ModelConfig, candidates: Sequence[Family] = WRITTEN) -> list[str]:
    """Reasons why the nearest ``candidates`` do not cover a network, as "CLASS, CLASS: reasons"."""
    obstacles = {family.architecture: family.obstacles(config) for family in candidates}
    fewest = min(map(len, obstacles.values()))
    classes: dict[str, list[str]] = {}
    for architecture, wrong in obstacles.items():
        if len(wrong) == fewest:
            classes.setdefault("; ".join(wrong), []).append(architecture)
    return [f"{', '.join(names)}: {reasons}" for reasons, names in classes.items()]


def without_ignored(tree: Json, ignored: Collection[str]) -> Json:
    """A config.json without the ``ignored`` keys; ConfigError for keys that do not exist or that hpclm reads."""
    family = FAMILIES.get(str(tree.get("model_type")), custom.FAMILY)
    needed = {*family.keys.values()} | {"model_type", "vocab_size", *family.read.split()}
    inner = [name for name in ignored if "." in name and name not in tree]
    tree = without(tree, [name for name in ignored if name not in inner], needed, "key")
    for name in inner:
        *outer, key = name.split(".")
        tree = _without_parameter(tree, name, outer, key)
    return tree


def _without_parameter(tree: Json, name: str, outer: Sequence[str], key: str) -> Json:
    """``tree`` without the parameter ``key`` of scaled positions, which is below the keys ``outer``."""
    if not outer:
        parameters = " ".join(word for kind in KINDS.values() for word in kind).split()
        return without(tree, [key], {*parameters, *shape.OUTSIDE}, f"parameter ({name})")
    below = tree.get(outer[0])
    if not isinstance(below, Mapping) or not outer[0].startswith(("rope_", *shape.KEPT)):
        raise ConfigError(f"--ignore {name}: the source has no such key")
    return {**tree, outer[0]: _without_parameter(below, name, outer[1:], key)}


def of_config(tree: Json) -> Family:
    """The class described by a config.json; ConfigError if hpclm does not support the network."""
    kind = tree.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        problem = f"model_type={kind} is not supported"
        lacking = unsupported.lacking(tree)
        if lacking:
            problem += f": it has {lacking}, which hpclm lacks"
        raise ConfigError(f"{problem}; hpclm reads {', '.join(FAMILIES)}")
    family = FAMILIES[kind].form(FAMILIES[kind], tree)
    wrong = family.problems(tree)
    if tree.get("quantization_config") is not None and fp8_blocks.size(tree) is None:
        wrong.append(
            "its weights are quantized, but hpclm reads only fp32, bf16, fp16, and fp8 with a scale for each block"
        )
    if wrong:
        raise ConfigError(wrong)
    return family


def model_settings(tree: Json) -> dict[str, Any]:
    """The model settings for a config.json; ConfigError if hpclm does not support the network."""
    family = of_config(tree)
    one = {name: values[0] for name, values in family.needs.items() if len(values) == 1}
    values = one | family.settings(tree)
    wrong = [
        f"model.{name}={values[name]}, which {family.architecture} in transformers does not have"
        for name, allowed in family.needs.items()
        if name in values and values[name] not in allowed
    ]
    if wrong:
        raise ConfigError(wrong)
    return values
