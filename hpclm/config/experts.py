"""Rules for the settings of experts (mixture of experts), which are settings of the model."""

from collections.abc import Callable
from typing import Any

from hpclm.config.section import Rule

MLP_KINDS = ("experts", "dense")
MAX_EXPERTS = 1 << 15  # hpclm.parallel.dispatch sorts their numbers in 16 bits
"""A limit that keeps a wrong number from allocating weights for hours."""
COEFFICIENTS = ("balance_bias", "balance_sequence", "balance_step", "balance_micro_batch", "router_z_loss")


def _with_experts(broken: Callable[[Any], Any], sentence: str | Callable[[Any], str]) -> Rule:
    """A rule for models that have experts."""
    return Rule(lambda model: model.experts and broken(model), sentence)


def _choices(model: Any) -> int:
    """Experts that a token chooses from; 0 if the groups do not divide the experts."""
    groups, top = model.router_groups, model.router_top_groups
    return 0 if model.experts % groups or top > groups else top * (model.experts // groups)


RULES = (
    _with_experts(
        lambda model: model.block != "gpt", "{model.experts} has no effect with {model.block}, which has its own MLP"
    ),
    _with_experts(
        lambda model: not model.mlp_pattern or {*model.mlp_pattern} - {*MLP_KINDS},
        f"{{model.mlp_pattern}} must be a list of {' and '.join(MLP_KINDS)}",
    ),
    _with_experts(
        lambda model: {*model.mlp_pattern} <= {*MLP_KINDS} and model.mlp_pattern and model.dense_layers == model.layers,
        "{model.experts} has no effect: no layer of {model.mlp_pattern} is of kind experts",
    ),
    _with_experts(
        lambda model: model.experts_per_token > model.experts,
        "{model.experts_per_token} must be from 1 to {model.experts}",
    ),
    _with_experts(
        lambda model: model.experts_per_token == 1 < model.experts and model.router_normalize,
        "model.experts_per_token=1 needs model.router_normalize=false (norm_topk_prob in config.json): one score divided by itself "
        "is 1, so the router would get no gradient from the loss",
    ),
    _with_experts(
        lambda model: model.activation == "xielu",
        "model.activation=xielu is not supported with model.experts: its two weights would be shared by all of them",
    ),
    _with_experts(
        lambda model: model.experts % model.router_groups,
        "{model.router_groups} must be a divisor of {model.experts}",
    ),
    _with_experts(
        lambda model: model.router_top_groups > model.router_groups,
        "{model.router_top_groups} must be from 1 to {model.router_groups}",
    ),
    _with_experts(
        lambda model: (
            model.experts % model.router_groups == 0 and model.experts // model.router_groups < 2 <= model.router_groups
        ),
        "{model.router_groups} leaves one expert in a group; groups are chosen by the sum of their two best scores",
    ),
    _with_experts(
        lambda model: model.experts >= model.experts_per_token > _choices(model) > 0,
        lambda model: (
            f"model.experts_per_token={model.experts_per_token} is more than the {_choices(model)} experts of "
            f"model.router_top_groups={model.router_top_groups} groups"
        ),
    ),
)
