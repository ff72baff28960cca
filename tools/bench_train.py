"""Training speed of hpclm beside plain PyTorch, transformers, Megatron-core and the machine's own limit, interleaved in one run.

Same shape, data, precision and optimizer for all; one optimizer step of each, in turn, so that a machine whose speed
drifts drifts for all. Tokens are as frequent as words of a text, and the kernel of attention is the one that a run takes. Megatron-core runs
on GPUs only, where it is installed. The limit is the step's matrix products and attention, forward and backward, and nothing else.

    python tools/bench_train.py                                              # CPU: 6 layers x 384, one thread
    python tools/bench_train.py --shape experts --context 128                # 16 experts in each of 4 layers
    python tools/bench_train.py --shape 124m --context 1024 --batch 16       # on a GPU, bf16
    python tools/bench_train.py --shape llama-1b --context 2048 --batch 4 --accumulate 4 --only compiled limit --fp8
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bench_megatron
import bench_peers
from bench_peers import Step

if TYPE_CHECKING:  # loaded where they are used, so that --help answers at once
    import torch

    from hpclm.config import ModelConfig

SHAPES: dict[str, dict[str, Any]] = {
    "small": {"layers": 6, "hidden": 384, "attention.heads": 6, "vocab_size": 65, "vocab_multiple": 1},
    "124m": {"layers": 12, "hidden": 768, "attention.heads": 12, "vocab_size": 50257},
    "1.3b": {"layers": 24, "hidden": 2048, "attention.heads": 16, "vocab_size": 50257},
    "experts": dict(
        **{
            "layers": 4,
            "hidden": 256,
            "attention.heads": 4,
            "vocab_size": 512,
            "vocab_multiple": 1,
            "positions": "rope",
            "norm": "rmsnorm",
        },
        **{
            "activation": "swiglu",
            "bias": False,
            "tied": False,
            "experts.count": 16,
            "experts.per_token": 4,
            "experts.ffn": 192,
        },
    ),
    "llama-1b": dict(
        **{
            "layers": 22,
            "hidden": 2048,
            "attention.heads": 32,
            "attention.kv_heads": 4,
            "ffn": 5632,
            "vocab_size": 32000,
            "positions": "rope",
        },
        **dict(norm="rmsnorm", activation="swiglu", bias=False, tied=False),
    ),
}
LIMIT = "limit: products and attention"


def ours(
    model: ModelConfig, rows: torch.Tensor, dtype: torch.dtype, compiled: bool = False, fp8: str | None = None
) -> Step:
    """hpclm's step, as its loop calls it."""
    from hpclm.config import BatchConfig, BudgetConfig, DataConfig, EngineConfig, OptimConfig, RunConfig
    from hpclm.engine.native import NativeEngine
    from hpclm.parallel.mesh import Compute
    from hpclm.parallel.micro_batch import MicroBatch

    config = RunConfig(
        model=model,
        data=DataConfig(source="synthetic"),
        batch=BatchConfig(global_size=rows[:, :, 0].numel(), micro_size=rows.shape[1]),
        budget=BudgetConfig(steps=1),
        optim=OptimConfig(lr=1e-4, min_lr=1e-5),
        engine=EngineConfig(compile=compiled, fp8=fp8),  # type: ignore[arg-type]
    )
    engine = NativeEngine(config.for_engine(), Compute(rows.device, dtype))
    batches = [MicroBatch(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in rows]

    def step() -> None:
        engine.train_step(batches, 1e-4, 0)

    return step


SUBJECTS: dict[str, Callable[[ModelConfig, torch.Tensor, torch.dtype], Step]] = {
    "hpclm": ours,
    "hpclm, compiled": partial(ours, compiled=True),
    "hpclm, compiled, FP8 rowwise": partial(ours, compiled=True, fp8="rowwise"),
    "hpclm, compiled, FP8 tensorwise": partial(ours, compiled=True, fp8="tensorwise"),
    "plain PyTorch": bench_peers.plain,
    "plain PyTorch, compiled": partial(bench_peers.plain, compiled=True),
    "plain PyTorch, a loop over experts": bench_peers.looping,
    "transformers": bench_peers.transformers,
    "transformers, compiled": partial(bench_peers.transformers, compiled=True),
    "Megatron-core": bench_megatron.megatron,
    LIMIT: bench_peers.limit,
}


@dataclass(frozen=True)
class Case:
    """What all subjects train: a model, tokens [A, B, T + 1] of A micro-batches, and how."""

    model: ModelConfig
    rows: torch.Tensor
    device: torch.device
    dtype: torch.dtype
    products: str
    """How fp32 matrices are multiplied."""
    wait: Callable[[], object]
    """Waits for the device."""


def case(args: argparse.Namespace) -> Case:
    """The device and kernels as in a run, and tokens."""
    import torch

    from hpclm.config import EngineConfig, ModelConfig
    from hpclm.model.attention import backend as attention_backend
    from hpclm.node import hardware

    device = hardware.device(EngineConfig(device=args.device), 0)
    if device.type == "cpu":
        torch.set_num_threads(args.threads)
    products = hardware.set_matmul(device)
    dtype = hardware.compute_type(EngineConfig(precision=args.precision), device)
    model = ModelConfig.of({**SHAPES[args.shape], "context": args.context})
    attention_backend.use(model, device)
    rows = tokens_as_of_a_text(model.vocab_size, (args.accumulate, args.batch, args.context + 1)).to(device)
    return Case(model, rows, device, dtype, products, hardware.synchronizer(device))


def measure(args: argparse.Namespace) -> None:
    """Time every subject and print the table."""
    import torch
    from tqdm import tqdm

    from hpclm.model import count
    from hpclm.node import hardware

    trained = case(args)
    model, rows, device, dtype, wait = trained.model, trained.rows, trained.device, trained.dtype, trained.wait
    together = args.together or (10 if device.type == "cuda" else 1)

    if args.memory_of:
        step = SUBJECTS[args.memory_of](model, rows, dtype)
        for _ in range(3):
            step()
        wait()
        print(json.dumps(hardware.peak_memory(device)))
        return

    names = [name for name in SUBJECTS if not args.only or any(word in name for word in args.only)]
    fp8 = args.fp8 and dtype == torch.bfloat16
    names = [name for name in names if fp8 or "FP8" not in name]
    if device.type == "cpu":  # for which it is not made
        names = [name for name in names if name != "Megatron-core"]
    if model.positions == "rope":  # the page of PyTorch is GPT-2
        names = [name for name in names if not name.startswith("plain") or (model.experts.count and "loop" in name)]
    else:
        names = [name for name in names if "loop" not in name]
    if model.experts.count:  # whose products depend on the routing
        left_out = LIMIT, "Megatron-core", "transformers, compiled"  # of which every routing would be compiled anew
        names = [name for name in names if name not in left_out]
    memory = dict[str, int]()
    for name in tqdm(names if args.memory else [], desc="peak memory, a process each", disable=None):
        memory |= peak_of(name)
    steps, began = dict[str, Step](), time.monotonic()
    for name in tqdm(sorted(names, key=lambda name: name != LIMIT), desc="warm-up and compilation", disable=None):
        if args.warmup_seconds and steps and time.monotonic() - began > args.warmup_seconds:
            print(f"{name} is left out: no time is left to warm it up", file=sys.stderr)
            continue
        try:
            step = SUBJECTS[name](model, rows, dtype)
            for _ in range(args.warmup):
                step()
            steps[name] = step
        except (RuntimeError, ImportError) as error:  # out of memory, a compiler that is not there: the others count
            print(f"{name} is left out: {str(error).splitlines()[0][:200]}", file=sys.stderr)
    steps = {name: steps[name] for name in names if name in steps}
    times = bench_peers.rounds(steps, args.rounds, wait, together=together)

    peak = hardware.peak_flops(device, dtype)
    tokens = args.accumulate * args.batch * args.context
    table = [row(name, model, tokens, times, memory, peak) for name in steps]
    facts = [hardware.describe(device), f"torch {torch.__version__}", str(dtype).removeprefix("torch.")]
    print(f"\n{', '.join(facts)}; fp32 products {trained.products}")
    print(
        f"{args.shape}: {count.parameters(model):,} parameters, {args.accumulate} x {args.batch} x {args.context} tokens, {args.rounds} rounds "
        f"of {together} steps\n"
    )
    titles = list(table[0]) if table else []
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    for cells in table:
        print("| " + " | ".join(cells.values()) + " |")
    if args.json:
        args.json.write_text(
            json.dumps({"shape": args.shape, "facts": facts, "rows": table, "seconds": times}, indent=1)
        )


def tokens_as_of_a_text(vocab: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Random tokens as frequent as words: the gradient of an embedding takes longest for those that come often (Zipf and Mandelbrot)."""
    import torch

    frequencies = 1 / (torch.arange(vocab) + 2.7)
    drawn = torch.multinomial(frequencies, math.prod(shape), True, generator=torch.Generator().manual_seed(0))
    return drawn.view(shape)


def row(
    name: str,
    model: ModelConfig,
    tokens: int,
    times: dict[str, list[float]],
    memory: dict[str, int],
    peak: float | None,
) -> dict[str, str]:
    """What was found of one subject, for the table."""
    from hpclm.model import count

    rate = tokens / statistics.median(times[name])
    cells = {
        "": name,
        "tokens/s": f"{rate:,.0f}",
        "of the limit": ratio(times, LIMIT, name),
        "beside hpclm": ratio(times, "hpclm", name),
        "peak memory": f"{memory[name] / 2**20:,.0f} MiB" if name in memory else "-",
    }
    if peak:
        cells["MFU (causal)"] = f"{rate * count.flops_per_token(model, True) / peak:.1%}"
        cells["MFU (12LCT)"] = f"{rate * count.flops_per_token(model, False) / peak:.1%}"
    return cells


def ratio(times: dict[str, list[float]], of: str, name: str) -> str:
    """Median over rounds of one subject's time against another's in the same round, with its range."""
    if of not in times:
        return "-"
    pairs = [a / b for a, b in zip(times[of], times[name], strict=True)]
    return f"{statistics.median(pairs):.2f} ({min(pairs):.2f}-{max(pairs):.2f})"


def peak_of(name: str) -> dict[str, int]:
    """Peak memory of one subject, by its name, in a separate process; empty where it does not run."""
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", name]
    done = subprocess.run(command, capture_output=True, text=True)
    return {} if done.returncode else {name: int(json.loads(done.stdout.splitlines()[-1]))}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line, or ``words`` in their place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--context", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, default=12, help="sequences in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--together", type=int, help="steps that are timed together; default: 10 on a GPU, 1 on a CPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--fp8", action="store_true", help="also hpclm with engine.fp8; MFU is of bf16's peak for all")
    parser.add_argument("--threads", type=int, default=1, help="threads on a CPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2, help="steps of each subject that are not counted")
    parser.add_argument(
        "--warmup-seconds", type=float, help="after this long, leave out subjects that are not warm yet"
    )
    parser.add_argument("--only", nargs="*", help="only subjects whose name contains one of these words")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="do not measure peak memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found there")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args(words)


if __name__ == "__main__":
    measure(arguments())
