"""Out of memory: what holds the memory of this rank, what the planner expected, and which settings would fit."""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from hpclm.config import RunConfig
from hpclm.config.supports import SUPPORTS
from hpclm.distributed.context import DistributedContext
from hpclm.errors import ConfigError, DeviceMemoryError
from hpclm.node import processes
from hpclm.node.gpus import Kind
from hpclm.planning import forecast, suggest
from hpclm.planning.forecast import GIB, Forecast
from hpclm.training.micro_batch import UNKNOWN, this_gpu

MACHINE = replace(UNKNOWN, bf16=False)
"""Stands for a machine that trains without a GPU, with its own memory."""
ON_CPU = "DefaultCPUAllocator: can't allocate memory"
SHOWN = 4  # suggestions, sizes of blocks
SMALLEST = 1 << 20  # bytes of a block worth mentioning


@contextmanager
def explained(config: RunConfig, context: DistributedContext, device: torch.device) -> Iterator[None]:
    """Turn PyTorch's error in the block into a DeviceMemoryError that says what to change."""
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and ON_CPU not in str(error):
            raise
        lines = [str(error).strip().splitlines()[0]]
        with suppress(Exception):  # whatever fails here must not hide the error itself
            lines += describe(config, context, device)
        raise DeviceMemoryError("\n".join(lines)) from error


def describe(config: RunConfig, context: DistributedContext, device: torch.device) -> Iterator[str]:
    """The lines that follow the error."""
    held, others = held_by_part(device), 0.0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        others = max(0.0, total - free - reserved)
        yield (
            f"{torch.cuda.get_device_name(device)} has {_gib(total)}: PyTorch uses {_gib(allocated)} and has reserved "
            f"{_gib(reserved - allocated)} more; CUDA and other processes use {_gib(others)}"
        )
        held["activations, buffers and the rest"] = max(0, allocated - sum(held.values()))
    yield f"in use on rank {context.rank}: {_listed(held)}"
    if device.type == "cuda" and (largest := blocks(torch.cuda.memory_snapshot())):
        yield f"largest blocks in use: {largest}"
    kind = this_gpu(config, context) or replace(MACHINE, memory=_share(context))
    job = replace(config.job, nodes=context.size // context.local_size, gpus=context.local_size)
    run = replace(config, job=job)
    expected = _forecast(run, kind)
    worst = expected.memory[expected.worst]
    parts = {part.name: getattr(worst, part.name) for part in fields(worst)}
    yield f"the planner expected {_gib(worst.total)}: {_listed(parts)}"
    needed = sum(held.values())
    words = [" ".join(each.words) for each in fitting(run, kind, others, needed / worst.total)]
    if words:
        yield f"settings that should fit: {'; or '.join(words)}"
    else:
        yield "no smaller micro-batch, recomputation or ZeRO stage would fit: use more GPUs; hpclm planner --suggest lists layouts"


def fitting(run: RunConfig, kind: Kind, others: float = 0.0, more: float = 1.0) -> list[suggest.Suggestion]:
    """The smallest changes to ``run`` that fit by the planner's estimate, each with the largest micro-batch.

    ``others``: bytes that other processes use. ``more``: by how much the run needed more than the planner expected.
    """
    room = (kind.memory * GIB - others) / max(1.0, more)
    now, found = _total(_forecast(run, kind)), []
    for sizes in changes(run):
        for other in sizes:
            there = _forecast(other, kind)
            if _total(there) <= room and _total(there) < now:
                found.append(suggest.Suggestion(other, there, suggest.words(run, other)))
                break
    fewest = min((_effort(each) for each in found), default=0)
    return [each for each in found if _effort(each) == fewest][:SHOWN]


def _effort(found: suggest.Suggestion) -> int:
    """How many things it changes: the micro-batch, recomputation, sharding."""
    return len({word.partition("=")[0].replace("engine.name", "engine.zero_stage") for word in found.words})


def changes(run: RunConfig) -> Iterator[list[RunConfig]]:
    """``run`` with other recomputation and sharding, or neither: each with its micro-batch and all smaller ones."""
    size = run.batch.micro_size or 1
    order = ["none", "selective", "full"]
    recomputes = [run.engine.recompute, *order[order.index(run.engine.recompute) + 1 :]]
    for engine, parallel in (({}, {}), *_sharded(run)):
        for recompute in recomputes:
            found = []
            for micro_size in [size >> shift for shift in range(size.bit_length())]:
                with suppress(ConfigError):
                    changed = replace(run.engine, **{"recompute": recompute, **engine})
                    batch = replace(run.batch, micro_size=micro_size)
                    other = replace(run, engine=changed, parallel=replace(run.parallel, **parallel), batch=batch)
                    other.plan(run.job.nodes * run.job.gpus)
                    found.append(other)
            yield found


def _sharded(run: RunConfig) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Sharding over all replicas, higher ZeRO stages of the engine, and fsdp2: changes of engine.* and parallel.*."""
    own, pipeline = SUPPORTS.get(run.engine.name), run.parallel.pipeline > 1
    if run.parallel.shard:
        yield {}, {"shard": None}
    if own:
        stages = own.pipeline_stages if pipeline else own.zero_stages
        yield from (({"zero_stage": stage}, {}) for stage in sorted(stages) if stage > (run.engine.zero_stage or 0))
    if run.engine.name != "fsdp2" and not pipeline:
        yield {"name": "fsdp2", "zero_stage": 3}, {}


def held_by_part(device: torch.device) -> dict[str, float]:
    """Bytes of this process's weights, gradients and optimizer state on ``device``; each storage once."""
    weights, optimizers = [], []
    for found in gc.get_objects():
        kind = type(found)  # isinstance would wake proxies
        if issubclass(kind, nn.Parameter) or (issubclass(kind, Tensor) and getattr(found, "_is_param", False)):
            weights.append(found)
        elif issubclass(kind, torch.optim.Optimizer):
            optimizers.append(found)
    seen: set[int] = set()
    return {
        "weights": _bytes(weights, device, seen),
        "gradients": _bytes((each.grad for each in weights if each.grad is not None), device, seen),
        "optimizer": _bytes((t for each in optimizers for t in _tensors(each.state)), device, seen),
    }


def _tensors(state: Mapping[Any, Any]) -> Iterator[Tensor]:
    for each in state.values():
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, Mapping):
            yield from _tensors(each)


def _bytes(tensors: Iterable[Tensor], device: torch.device, seen: set[int]) -> float:
    total = 0
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        if local.device.type == device.type:
            storage = local.untyped_storage()
            try:
                place = storage.data_ptr()
            except RuntimeError:  # a fake tensor, which PyTorch's tracing leaves behind
                continue
            total += storage.nbytes() if place not in seen else 0
            seen.add(place)
    return float(total)


def blocks(snapshot: Iterable[Mapping[str, Any]]) -> str:
    """The sizes of blocks that use most memory, in a snapshot of PyTorch's allocator: ``12 x 1.50 GiB``; empty if all are small."""
    sizes = Counter(
        block["size"] for segment in snapshot for block in segment["blocks"] if block["state"] == "active_allocated"
    )
    most = sorted(sizes.items(), key=lambda each: -each[0] * each[1])[:SHOWN]
    return ", ".join(f"{count} x {_gib(size)}" for size, count in most if size >= SMALLEST)


def _forecast(run: RunConfig, kind: Kind) -> Forecast:
    """The planner's estimate; without what CUDA itself takes on a machine that trains without a GPU."""
    found = forecast.of(run, kind)
    return (
        found if kind != replace(MACHINE, memory=kind.memory) else replace(found, code=replace(found.code, fixed=0.0))
    )


def _total(found: Forecast) -> float:
    return found.memory[found.worst].total


def _share(context: DistributedContext) -> float:
    """GiB of this machine's memory for each of its ranks."""
    return processes.machine_memory() / context.local_size / GIB


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / (1 << 20):.1f} MiB"
