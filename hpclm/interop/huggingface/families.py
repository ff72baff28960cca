"""The classes of transformers that hpclm converts, by model_type."""

import logging
from collections.abc import Sequence
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.interop.huggingface import (
    custom,
    deepseek,
    fp8_blocks,
    gemma,
    llama,
    mixtures,
    older,
    relatives,
    unsupported,
)
from hpclm.interop.huggingface.completion import Keys
from hpclm.interop.huggingface.family import Family
from hpclm.interop.huggingface.shape import Json

log = logging.getLogger(__name__)

DENSE = (*older.ALL_FAMILIES, *llama.ALL_FAMILIES, *relatives.ALL_FAMILIES, *gemma.ALL_FAMILIES)
WRITTEN = (*DENSE, *mixtures.ALL_FAMILIES, *deepseek.ALL_FAMILIES, relatives.PHI3)
"""Classes for an export, in the order they are tried in."""
FAMILIES: dict[str, Family] = {family.model_type: family for family in (*WRITTEN, custom.FAMILY)}
FAMILIES["kimi_k2"] = deepseek.V3


def of_network(config: ModelConfig) -> Family:
    """The class for a network: transformers' or hpclm's; ConfigError for a user-defined block."""
    candidates = (*WRITTEN, custom.FAMILY)
    if config.rope.scaling.get("rope_type") == "longrope":  # other programs read it only in Phi 3
        candidates = (relatives.PHI3, *candidates)
    for family in candidates:
        if family.covers(config):
            return family
    way_out = "hpclm.load(RUN) gives it in Python, as a PyTorch module"
    raise ConfigError(["this network has no Hugging Face form:", *nearest_obstacles(config, candidates), way_out])


def nearest_obstacles(config: ModelConfig, candidates: Sequence[Family] = WRITTEN) -> list[str]:
    """The settings in which the nearest ``candidates`` differ from a network, as "CLASS, CLASS: settings"."""
    obstacles: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for family in candidates:
        try:
            obstacles[family.architecture] = family.differences(config)
        except ConfigError as error:
            refused[family.architecture] = error.problems
    obstacles = obstacles or refused
    # without its experts it would be another network
    alike = {name: wrong for name, wrong in obstacles.items() if not any("model.experts.count" in one for one in wrong)}
    obstacles = alike or obstacles
    fewest = min(map(len, obstacles.values()))
    classes: dict[str, list[str]] = {}
    for architecture, wrong in obstacles.items():
        if len(wrong) == fewest:
            classes.setdefault("; ".join(wrong), []).append(architecture)
    return [f"{', '.join(names)}: {reasons}" for reasons, names in classes.items()]


def of_config(tree: Json) -> tuple[Family, Keys]:
    """The class described by a config.json, and the completed keys; ConfigError if hpclm does not support it."""
    kind = tree.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        problem = f"model_type={kind} is not supported"
        lacking = unsupported.lacking(tree)
        if lacking:
            problem += f": it has {lacking}, which hpclm lacks"
        raise ConfigError(f"{problem}; hpclm reads {', '.join(FAMILIES)}")
    if tree.get("quantization_config") is not None and fp8_blocks.size(tree) is None:
        raise ConfigError(
            "its weights are quantized, but hpclm reads only fp32, bf16, fp16, and fp8 with a scale for each block"
        )
    keys = FAMILIES[kind].completed(tree)
    if keys.get("router_aux_loss_coef"):
        log.warning(
            "router_aux_loss_coef=%s is ignored: transformers computes one loss from the means over all layers, but hpclm one for each "
            "layer. To balance experts in training, set model.experts.balance_sequence or another model.experts.balance_…",
            keys["router_aux_loss_coef"],
        )
    return FAMILIES[kind].form(FAMILIES[kind], keys), keys


def model_settings(tree: Json) -> dict[str, Any]:
    """The model settings for a config.json; ConfigError if hpclm does not support the network."""
    family, keys = of_config(tree)
    return family.settings(keys)
