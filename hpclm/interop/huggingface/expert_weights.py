"""Names of weights in transformers' classes with experts.

E experts, F inner width of an expert, C hidden size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpclm.config import ModelConfig
from hpclm.interop.huggingface import llama
from hpclm.interop.rules import LOGICAL, ConversionRule, per_expert, same, transformed


@dataclass(frozen=True)
class Names:
    """Names of a layer's router and expert weights; the defaults are those of most classes."""

    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts.{}."
    """Formatted with the number of an expert; a name of ``up`` or ``down`` follows."""
    shared: str = "mlp.shared_experts."
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: tuple[str, ...] = ("down_proj",)


NAMES = Names()


def rules(config: ModelConfig, names: Names = NAMES, more: Mapping[str, Any] | None = None) -> Iterator[ConversionRule]:
    """The conversion rule of each weight. ``more``: maps our modules outside the experts to theirs where a class differs from Llama."""
    modules = {
        "mlp.router": names.router,
        "mlp.shared.up": [names.shared + name for name in names.up],
        "mlp.shared.down": [names.shared + name for name in names.down],
    }
    for rule in llama.rules(config, {**modules, **(more or {})}):
        match = LOGICAL.fullmatch(rule.ours)
        assert match is not None
        block, module, kind = match.groups()
        layer = llama.LAYER.format(block)
        if module == "mlp.experts":
            branch, _, suffix = kind.partition("_")
            parts = {"up": names.up, "down": names.down}[branch]
            experts = [layer + names.experts.format(i) for i in range(config.experts.count)]
            theirs = [f"{name}{part}.{suffix or 'weight'}" for name in experts for part in parts]
            yield per_expert(rule.ours, theirs, config.experts.count)
        elif kind == "choice_bias":
            yield same(rule.ours, layer + names.choice_bias)
        else:
            yield rule


def interleaved(rule: ConversionRule) -> ConversionRule:
    """``rule`` for gate and up projection [E, 2F, ...], stored with alternating rows."""
    return transformed(
        rule,
        lambda x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2),
        lambda x: x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2),
    )
