"""The training that bench_parallel.py times beside hpclm's engines: the same model and batch, on each library by hand."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench_peers import Step

if TYPE_CHECKING:  # loaded where they are used, so that --help answers at once
    import torch

    from hpclm.config import RunConfig
    from hpclm.model.stack import Stack

SHAPES: dict[str, dict[str, Any]] = {
    "small": {"layers": 4, "hidden": 256, "attention.heads": 4, "vocab_size": 1024},
    "124m": {"layers": 12, "hidden": 768, "attention.heads": 12, "vocab_size": 50257},
    "1.3b": {"layers": 24, "hidden": 2048, "attention.heads": 16, "vocab_size": 50257},
}

BY_HAND = {
    "bare PyTorch": "native",
    "deepspeed ZeRO 1 by hand": "deepspeed, ZeRO 1",
    "deepspeed ZeRO 3 by hand": "deepspeed, ZeRO 3",
    "fsdp2 by hand": "fsdp2, stage 3",
}
"""Libraries by hand, and the engine that each is beside."""


def settings(args: argparse.Namespace, words: list[str]) -> RunConfig:
    """The run that is timed."""
    from hpclm import config

    shape = [f"model.{name}={value}" for name, value in SHAPES[args.shape].items()]
    sizes = [f"model.context={args.context}", f"batch.global_size={args.batch}", f"batch.micro_size={args.micro}"]
    rest = ["data.source=synthetic", "budget.steps=1", "optim.lr=1e-4", "optim.min_lr=1e-5"]
    return config.load(None, [*shape, *sizes, *rest, f"engine.precision={args.precision}", *words])


def micro_batches(args: argparse.Namespace, run: RunConfig, replicas: int, replica: int, device: Any) -> list[Any]:
    """A replica's micro-batches of the step that everybody takes."""
    import torch

    from hpclm.parallel.micro_batch import MicroBatch

    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(run.model.vocab_size, (args.batch, args.context + 1), generator=draw)
    mine = rows.view(-1, replicas, args.micro, args.context + 1)[:, replica].to(device)
    return [MicroBatch(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in mine]


def model_of(run: RunConfig, dtype: Any, device: Any) -> Stack:
    """The model with its initial weights, for those who train it by hand."""
    from hpclm.model import gpt
    from hpclm.model.init import materialize_on
    from hpclm.model.stack import Stack
    from hpclm.parallel.mesh import SINGLE

    specs = gpt.layers(run.model, run.engine, dtype, run.seed)
    stack = Stack(run.model, specs, dtype, wrap=materialize_on(device, SINGLE))
    return stack.train()


def loop(model: Any, batches: list[Any], parameters: list[torch.nn.Parameter], clip: Callable[[], Any]) -> Step:
    """Accumulate, clip and update: what a careful person writes around a PyTorch module."""
    import torch

    decaying = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    groups = [dict(params=decaying, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-4, betas=(0.9, 0.95), fused=True)
    weights = torch.full_like(batches[0].labels, 1.0, dtype=torch.float32) / sum(b.labels.numel() for b in batches)

    def step() -> None:
        total = 0.0
        for batch in batches:
            loss = model(batch.weighted(weights)).value
            loss.backward()
            total = total + loss.detach()
        clip()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(total)

    return step


def by_hand(args: argparse.Namespace, kind: str, device: Any, dtype: Any) -> Step:
    """The same training written on the library itself."""
    import torch

    run = settings(args, [])
    batches = micro_batches(args, run, 1, 0, device)
    if kind == "bare PyTorch":
        model = model_of(run, dtype, device)
        parameters = list(model.parameters())
        return loop(model, batches, parameters, lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0))
    if kind == "fsdp2 by hand":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype)
        model = model_of(run, dtype, device)
        for name, layer in model.layers.items():
            if name.startswith("block"):
                fully_shard(layer, mp_policy=policy)
        sharded: Any = fully_shard(model, mp_policy=policy)
        parameters = list(model.parameters())
        return loop(sharded, batches, parameters, lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0))
    return deepspeed_by_hand(run, batches, int(kind.split()[2]), device, dtype)


def deepspeed_by_hand(run: RunConfig, batches: list[Any], stage: int, device: Any, dtype: Any) -> Step:
    """DeepSpeed as its tutorials use it."""
    import deepspeed
    import torch

    model = model_of(run, dtype, device)
    groups = [
        dict(params=[p for p in model.parameters() if p.ndim >= 2], weight_decay=0.1),
        dict(params=[p for p in model.parameters() if p.ndim < 2], weight_decay=0.0),
    ]
    words = {
        "train_micro_batch_size_per_gpu": len(batches[0].tokens),
        "gradient_accumulation_steps": len(batches),
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=words)
    if stage == 3:
        deepspeed.zero.register_external_parameter(model, model.layers["tokens"].weight)
    weights = torch.full_like(batches[0].labels, 1.0, dtype=torch.float32) / batches[0].labels.numel()

    def step() -> None:
        total = 0.0
        for batch in batches:
            loss = engine(batch.weighted(weights)).value
            engine.backward(loss)
            engine.step()
            total = total + loss.detach()
        float(total)

    return step
