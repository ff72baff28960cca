"""Divide a model's layers into pipeline stages of nearly equal cost."""

from collections.abc import Callable, Sequence

from hpclm.config import EngineSettings
from hpclm.config.layer import Layer
from hpclm.model.spec import LayerSpec
from hpclm.parallel.partition import balanced


def stages(config: EngineSettings, specs: Sequence[LayerSpec]) -> list[list[LayerSpec]]:
    """The specs of every stage in order, divided as parallel.partition says; each stage has at least one block.

    There are parallel.pipeline x parallel.chunks stages.
    """
    costs = parameters(specs) if config.parallel.partition == "parameters" else blocks(specs)
    count = config.parallel.pipeline * config.parallel.chunks
    return [[specs[i] for i in part] for part in balanced(costs, count, [spec.layer is not None for spec in specs])]


def owners(parts: Sequence[Sequence[LayerSpec]]) -> dict[str, list[int]]:
    """The stages that hold each layer, by name: one, or two for tied embeddings. The first counts its weights."""
    holders: dict[str, list[int]] = {}
    for stage, part in enumerate(parts):
        for name in dict.fromkeys(spec.name for spec in part):
            holders.setdefault(name, []).append(stage)
    return holders


def blocks(specs: Sequence[LayerSpec]) -> list[float]:
    """Costs for partition=blocks: 1 for a block, 0 for any other layer."""
    return [float(spec.layer is not None) for spec in specs]


def parameters(specs: Sequence[LayerSpec]) -> list[float]:
    """Costs for partition=parameters; a tied embedding counts on both of its stages."""
    return by_kind(specs, lambda spec: float(sum(p.numel() for p in spec.build().parameters())))


def by_kind(specs: Sequence[LayerSpec], cost: Callable[[LayerSpec], float]) -> list[float]:
    """The cost of each layer; equal blocks cost the same, so only one of them is evaluated."""
    costs: dict[Layer | int, float] = {}
    for spec in specs:
        kind = spec.layer or spec.number
        if kind not in costs:
            costs[kind] = cost(spec)
    return [costs[spec.layer or spec.number] for spec in specs]
