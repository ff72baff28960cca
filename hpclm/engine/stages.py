"""Divide a model's layers into pipeline stages of nearly equal cost."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpclm.config import EngineSettings
from hpclm.config.layer import Layer
from hpclm.model.loss import TokenLoss
from hpclm.model.spec import LayerSpec
from hpclm.model.stack import Execution, Stack
from hpclm.node import hardware
from hpclm.parallel.collectives import broadcast
from hpclm.parallel.mesh import Compute
from hpclm.parallel.micro_batch import MicroBatch
from hpclm.parallel.partition import balanced

REPEATS = 3


def stages(config: EngineSettings, specs: Sequence[LayerSpec], compute: Compute) -> list[list[LayerSpec]]:
    """The specs of every stage in order, divided as parallel.partition says; each stage has at least one block.

    There are parallel.pipeline x parallel.chunks stages. A collective with the same result on every process.
    """
    if config.parallel.partition == "time":
        costs = seconds(config, specs, compute)
    elif config.parallel.partition == "parameters":
        costs = parameters(specs)
    else:
        costs = blocks(specs)
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


def seconds(config: EngineSettings, specs: Sequence[LayerSpec], compute: Compute) -> list[float]:
    """Costs for partition=time: seconds of each layer's forward and backward pass of a micro-batch, measured on rank 0."""
    costs = by_kind(specs, lambda spec: measured(config, spec, compute))
    # all ranks must divide in the same way; their own timings would differ
    return broadcast(torch.tensor(costs, dtype=torch.float64, device=compute.device), compute.mesh.world, 0).tolist()


def measured(config: EngineSettings, spec: LayerSpec, compute: Compute) -> float:
    """Seconds of one layer's forward and backward pass; a collective over its tensor- and context-parallel ranks."""
    model = config.model
    size = config.plan.micro_size
    mesh = compute.mesh
    device = compute.device
    dtype = compute.dtype
    stack = Stack(model, [spec], dtype, mesh, execution=Execution(TokenLoss(config.engine.loss_chunk))).to(device)
    length = model.context // mesh.cp.size
    ids = torch.zeros(size, length, dtype=torch.int64, device=device)
    hidden = torch.zeros(length // mesh.tp.size, size, model.hidden, dtype=dtype, device=device)
    ones = torch.ones_like(ids, dtype=torch.float32)
    best = float("inf")
    wait = hardware.synchronizer(device)
    for _ in range(REPEATS):
        x = ids if spec.number == 0 else hidden.clone().requires_grad_()
        wait()
        began = time.perf_counter()
        y: Tensor = stack(MicroBatch(ids, ids, weights=ones), x if x.is_floating_point() else None).value
        y.float().sum().backward()
        wait()
        # the minimum of the repeats: the first one includes allocations and the choice of kernels
        best = min(best, time.perf_counter() - began)
    return best


def by_kind(specs: Sequence[LayerSpec], cost: Callable[[LayerSpec], float]) -> list[float]:
    """The cost of each layer; equal blocks cost the same, so only one of them is evaluated."""
    costs: dict[Layer | int, float] = {}
    for spec in specs:
        kind = spec.layer or spec.number
        if kind not in costs:
            costs[kind] = cost(spec)
    return [costs[spec.layer or spec.number] for spec in specs]
