"""Checks of the settings of experts (mixture of experts), which are settings of the model.

``model`` is a ModelConfig, ``parallel`` a ParallelConfig, whose files import this one.
"""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

MLP_KINDS = ("experts", "dense")
MAX_EXPERTS = 1 << 15  # hpclm.parallel.dispatch sorts their numbers in 16 bits
"""A limit that keeps a wrong number from allocating weights for hours."""
SETTINGS = (
    *("experts_per_token", "expert_ffn", "shared_ffn", "mlp_pattern"),
    *("router_score", "router_normalize", "router_scale", "router_groups", "router_top_groups", "router_bias"),
    *("router_choice_bias", "balance_bias", "balance_sequence", "balance_step", "balance_micro_batch", "router_z_loss"),
)
"""Settings of model.* that nothing reads without experts."""
COEFFICIENTS = ("balance_bias", "balance_sequence", "balance_step", "balance_micro_batch", "router_z_loss")


def problems(model: Any) -> Iterator[str]:
    """What is wrong with the settings of experts."""
    if not 0 <= model.experts <= MAX_EXPERTS:
        yield f"model.experts={model.experts} must be from 0 to {MAX_EXPERTS}"
        return
    if not model.experts:
        if words := [f"model.{name}={getattr(model, name)}" for name in changed(model)]:
            yield f"{', '.join(words)} {'have' if len(words) > 1 else 'has'} no effect with model.experts=0"
        return
    if model.block != "gpt":
        yield f"model.experts={model.experts} has no effect with model.block={model.block}, which has its own MLP"
    yield from _wrong_layers(model)
    if not 1 <= model.experts_per_token <= model.experts:
        yield f"model.experts_per_token={model.experts_per_token} must be from 1 to model.experts={model.experts}"
    if model.experts_per_token == 1 < model.experts and model.router_normalize:
        yield (
            "model.experts_per_token=1 needs model.router_normalize=false (norm_topk_prob in config.json): one score divided by itself "
            "is 1, so the router would get no gradient from the loss"
        )
    if model.activation == "xielu":
        yield "model.activation=xielu is not supported with model.experts: its two weights would be shared by all of them"
    if model.expert_ffn is not None and model.expert_ffn < 1:
        yield f"model.expert_ffn={model.expert_ffn} must be at least 1"
    if model.shared_ffn < 0:
        yield f"model.shared_ffn={model.shared_ffn} must be at least 0"
    yield from _wrong_router(model)


def unsplit(model: Any, parallel: Any) -> Iterator[str]:
    """Why experts cannot be divided over processes as ``parallel`` says."""
    ranks = parallel.expert
    if not model.experts:
        if ranks > 1:
            yield f"parallel.expert={ranks} has no effect with model.experts=0"
        if not parallel.split_experts:
            yield "parallel.split_experts=false has no effect with model.experts=0"
        return
    if model.experts % ranks:
        yield f"model.experts={model.experts} must be a multiple of parallel.expert={ranks}"
    if parallel.split_experts and model.expert_width % parallel.tensor:
        yield (
            f"the experts' inner width (model.expert_ffn)={model.expert_width} must be a multiple of parallel.tensor={parallel.tensor}; "
            "or set parallel.split_experts=false"
        )


def changed(model: Any) -> list[str]:
    """The settings of experts that differ from their defaults."""
    default = {entry.name: entry.default for entry in fields(model)} | {"mlp_pattern": ["experts"]}
    return [name for name in SETTINGS if getattr(model, name) != default[name]]


def _wrong_layers(model: Any) -> Iterator[str]:
    pattern = model.mlp_pattern
    if not pattern or {*pattern} - {*MLP_KINDS}:
        yield f"model.mlp_pattern={pattern} must be a list of {' and '.join(MLP_KINDS)}"
    elif model.dense_layers == model.layers:
        yield f"model.experts={model.experts} has no effect: no layer of model.mlp_pattern={pattern} is of kind experts"


def _wrong_router(model: Any) -> Iterator[str]:
    """Problems of the router and of what balances its choices."""
    groups, top, experts = model.router_groups, model.router_top_groups, model.experts
    if groups < 1 or experts % groups:
        yield f"model.router_groups={groups} must be a divisor of model.experts={experts}"
    elif not 1 <= top <= groups:
        yield f"model.router_top_groups={top} must be from 1 to model.router_groups={groups}"
    elif groups > 1 and experts // groups < 2:
        yield f"model.router_groups={groups} leaves one expert in a group; groups are chosen by the sum of their two best scores"
    elif experts >= model.experts_per_token > top * (experts // groups):
        yield (
            f"model.experts_per_token={model.experts_per_token} is more than the {top * (experts // groups)} experts of "
            f"model.router_top_groups={top} groups"
        )
    if not 0 < model.router_scale < math.inf:
        yield f"model.router_scale={model.router_scale} must be more than 0 and finite"
    for name in COEFFICIENTS:
        if not 0 <= getattr(model, name) < math.inf:
            yield f"model.{name}={getattr(model, name)} must be at least 0 and finite"
    if model.balance_bias and not model.router_choice_bias:
        yield f"model.balance_bias={model.balance_bias} moves the choice bias, which model.router_choice_bias=true adds"
