"""Mixtures of experts of Megatron-LM: their settings, and the names of their weights.

Three modules hold a rank's experts: SequentialMLP numbers the experts, TEGroupedMLP numbers their weights, and the older GroupedMLP has
one matrix for all. All weights become mlp.experts.N.linear_fc1 and linear_fc2, where N counts the experts of all ranks.

E experts of a rank, C hidden size, F inner size of an expert, A rows of its first weight: 2F with a gate, otherwise F.
"""

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from hpclm.base.errors import ConfigError
from hpclm.interop.megatron import options
from hpclm.interop.megatron.options import argument

LAYER = r"(?P<layer>.+\.mlp\.experts\.)"
WEIGHT = r"(?P<weight>linear_fc[12]\.(?:weight|bias))"
NUMBERED = re.compile(rf"{LAYER}(?:local_experts\.(?P<module>\d+)\.)?{WEIGHT}(?P<expert>\d*)")
GROUPED = re.compile(rf"{LAYER}weight(?P<number>[12])")
STACKED = re.compile(rf"{LAYER}experts\.{WEIGHT}")
"""A torch_dist checkpoint's weights of all experts, [experts, ...]."""
CHOICE_BIAS = ".mlp.router.expert_bias"
ROUTER_BIAS = ".mlp.router.bias"
BALANCE = {"aux_loss": "balance_micro_batch", "seq_aux_loss": "balance_sequence"}
BALANCE_TYPES = {*BALANCE, "global_aux_loss"}
"""Losses that do not change how tokens choose experts."""


def of_rank(tensors: Mapping[str, Tensor], args: Namespace | None, rank: int) -> dict[str, Tensor]:
    """The tensors in a file of expert-parallel rank ``rank``; those of experts under the experts' numbers."""
    count = 0
    if args is not None:
        count = options.experts(args) // (argument(args, "expert_model_parallel_size") or 1)
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        one = NUMBERED.fullmatch(name)
        all_of_rank = GROUPED.fullmatch(name)
        if count and one and (one["module"] or one["expert"]):
            number = rank * count + int(one["module"] or one["expert"])
            named[f"{one['layer']}{number}.{one['weight']}"] = tensor
        elif count and all_of_rank:
            weight = f"linear_fc{all_of_rank['number']}.weight"
            for number, part in enumerate(_ungrouped(name, tensor, count), rank * count):
                named[f"{all_of_rank['layer']}{number}.{weight}"] = part
        else:
            named[name] = tensor
    return named


def _ungrouped(name: str, tensor: Tensor, count: int) -> Tensor:
    """weight1, [C, E x A] that holds [E, C, A], -> [E, A, C]; weight2, [E x F, C] -> [E, C, F]."""
    first = name.endswith("1")
    if tensor.ndim != 2 or tensor.shape[first] % count:
        raise ConfigError(f"{name} has shape {tuple(tensor.shape)}, but {count} experts are on each rank")
    shape = (count, len(tensor), -1) if first else (count, -1, tensor.shape[1])
    return tensor.reshape(shape).transpose(1, 2)


def unstacked(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    """A tensor of a torch_dist checkpoint, divided by expert if it belongs to experts."""
    match = STACKED.fullmatch(name)
    if not match:
        return {name: tensor}
    return {f"{match['layer']}{number}.{match['weight']}": part for number, part in enumerate(tensor)}


def settings(args: Namespace) -> dict[str, Any]:
    """Model settings for the experts. ConfigError if hpclm does not support them."""
    count = options.experts(args)
    if not count:
        return {}
    wrong = [*_unsupported(args)]
    if wrong:
        raise ConfigError(wrong)
    score = argument(args, "moe_router_score_function", default="softmax")
    normalized = args.moe_router_topk > 1
    if score == "softmax":  # taken of the chosen logits, it is the chosen experts' share
        normalized = not argument(args, "moe_router_pre_softmax", default=False)
    groups = argument(args, "moe_router_group_topk", default=0)
    biased = argument(args, "moe_router_enable_expert_bias", default=False)
    values = {
        "count": count,
        "per_token": args.moe_router_topk,
        "ffn": argument(args, "moe_ffn_hidden_size"),
        "shared_ffn": argument(args, "moe_shared_expert_intermediate_size"),
        "pattern": _pattern(args),
        "router_score": score,
        "router_normalize": normalized,
        "router_scale": argument(args, "moe_router_topk_scaling_factor") or None,
        "router_groups": argument(args, "moe_router_num_groups") if groups else None,
        "router_top_groups": groups or None,
        "router_choice_bias": biased,
        "balance_bias": argument(args, "moe_router_bias_update_rate") if biased else None,
        "router_z_loss": argument(args, "moe_z_loss_coeff"),
        **{BALANCE[kind]: coefficient for kind, coefficient in _balance_losses(args).items() if kind in BALANCE},
    }
    return {f"experts.{name}": value for name, value in values.items() if value is not None}


def _unsupported(args: Namespace) -> Iterator[str]:
    for name in ("moe_router_topk", "moe_router_load_balancing_type"):
        if not argument(args, name):
            yield f"{name} is missing, so it is unknown how tokens choose experts"
            return
    for kind in _balance_losses(args):
        if kind not in BALANCE_TYPES:
            yield f"moe_router_load_balancing_type={kind} is not supported"
    chosen = argument(args, "moe_router_topk")
    groups = argument(args, "moe_router_group_topk", default=0)
    softmax = argument(args, "moe_router_score_function", default="softmax") == "softmax"
    if groups and argument(args, "moe_router_num_groups") != 1 and chosen // groups != 2:
        yield (
            f"moe_router_topk={chosen} with moe_router_group_topk={groups}: groups are chosen by the sum of {chosen // groups} scores, "
            "but hpclm supports 2"
        )
    if groups and softmax and not argument(args, "moe_router_pre_softmax", default=False):
        yield f"moe_router_group_topk={groups} without moe_router_pre_softmax: groups are chosen by logits, which is not supported"
    frequency = argument(args, "moe_layer_freq", default=1)
    if isinstance(frequency, list):
        if len(frequency) != args.num_layers or not {*frequency} <= {0, 1}:
            yield f"moe_layer_freq={frequency} is not a list of 0 and 1 for each of the {args.num_layers} layers"
    elif type(frequency) is not int or frequency < 1:
        yield f"moe_layer_freq={frequency} is not supported"


def _pattern(args: Namespace) -> list[str]:
    frequency = argument(args, "moe_layer_freq", default=1)
    if isinstance(frequency, int):
        return ["experts", *["dense"] * (frequency - 1)]
    return ["experts" if sparse else "dense" for sparse in frequency]


def _balance_losses(args: Namespace) -> dict[str, float]:
    """The losses that balance experts, and their coefficients; Megatron-LM gives one of each, or lists."""
    kinds = argument(args, "moe_router_load_balancing_type", default="none")
    coefficients = argument(args, "moe_aux_loss_coeff", default=0.0)
    if not isinstance(kinds, list):
        kinds = [kinds]
    if not isinstance(coefficients, list):
        coefficients = [coefficients] * len(kinds)
    return {str(kind): value for kind, value in zip(kinds, coefficients, strict=False) if kind != "none"}


def of_training(args: Namespace) -> Iterator[str]:
    """Reasons why the balance of experts cannot continue."""
    if not options.experts(args):
        return
    losses = {kind: coefficient for kind, coefficient in _balance_losses(args).items() if coefficient}
    for kind, coefficient in losses.items():
        if kind not in BALANCE:
            yield f"moe_router_load_balancing_type={kind} with moe_aux_loss_coeff={coefficient} is not supported"
    for name in ("moe_router_enable_expert_bias", "moe_router_group_topk"):
        if losses and argument(args, name):
            yield f"{name}={argument(args, name)} with moe_aux_loss_coeff={max(losses.values())} is not supported"
    if argument(args, "eod_mask_loss"):
        yield "eod_mask_loss=True with experts is not supported: Megatron-LM balances masked tokens too"
