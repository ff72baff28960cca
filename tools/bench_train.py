"""Training speed of hpclm beside transformers' GPT2LMHeadModel and the machine's own limit, interleaved in one run.

Same shape, data, precision and optimizer for both; one optimizer step of each, in turn, so that a machine whose speed
drifts drifts for all. The limit is the step's matrix products back to back and nothing else: the linear layers and the
output projection, forward and both gradients (attention's own products are left out, so the limit is a little high).

    python tools/bench_train.py                                    # CPU: 6 layers x 384, one thread
    python tools/bench_train.py --shape 124m --context 1024        # on a GPU, bf16
    python tools/bench_train.py --shape 1.3b --context 2048 --batch 4
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # loaded where they are used, so that --help answers at once
    import torch

    from hpclm.config import ModelConfig

SHAPES: dict[str, dict[str, Any]] = {
    "small": dict(layers=6, hidden=384, heads=6, vocab_size=65, vocab_multiple=1),
    "124m": dict(layers=12, hidden=768, heads=12, vocab_size=50257),
    "1.3b": dict(layers=24, hidden=2048, heads=16, vocab_size=50257),
}
Step = Callable[[], None]


def ours(model: ModelConfig, rows: torch.Tensor, dtype: torch.dtype, compiled: bool = False) -> Step:
    """hpclm's step, as its loop calls it."""
    from hpclm.config import BatchConfig, BudgetConfig, DataConfig, EngineConfig, OptimConfig, RunConfig
    from hpclm.data.batches import Batch
    from hpclm.engine.native import NativeEngine
    from hpclm.parallel.mesh import Mesh

    config = RunConfig(
        model=model,
        data=DataConfig(source="synthetic"),
        batch=BatchConfig(global_size=len(rows), micro_size=len(rows)),
        budget=BudgetConfig(steps=1),
        optim=OptimConfig(lr=1e-4, min_lr=1e-5),
        engine=EngineConfig(compile=compiled),
    )
    engine = NativeEngine(config, Mesh(), rows.device, dtype)
    batch = Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), None, None, None)

    def step() -> None:
        engine.train_step([batch], 1e-4, 0)

    return step


def theirs(model: ModelConfig, rows: torch.Tensor, dtype: torch.dtype, compiled: bool = False) -> Step:
    """GPT2LMHeadModel with SDPA, autocast, fused AdamW and clipping."""
    import torch
    import torch.nn.functional as F
    from transformers import GPT2Config, GPT2LMHeadModel

    classes: tuple[Any, Any] = (GPT2Config, GPT2LMHeadModel)
    shape = classes[0](
        n_layer=model.layers,
        n_embd=model.hidden,
        n_head=model.heads,
        n_positions=model.context,
        vocab_size=model.padded_vocab,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    plain = classes[1](shape).to(rows.device).train()
    network: Any = torch.compile(plain) if compiled else plain
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def step() -> None:
        with torch.autocast(rows.device.type, dtype, enabled=dtype != torch.float32):
            logits = network(input_ids=tokens).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def limit(model: ModelConfig, rows: torch.Tensor, dtype: torch.dtype) -> Step:
    """The step's matrix products alone."""
    import torch

    n, c, f = rows[:, 1:].numel(), model.hidden, model.ffn_width
    draw: dict[str, Any] = dict(device=rows.device, dtype=dtype)
    products = []
    for n_in, n_out, times in (
        (c, 3 * c, model.layers),
        (c, c, model.layers),
        (c, f, model.layers),
        (f, c, model.layers),
        (c, model.padded_vocab, 1),
    ):
        x, w, g = torch.randn(n, n_in, **draw), torch.randn(n_out, n_in, **draw), torch.randn(n, n_out, **draw)
        y, dx, dw = torch.empty_like(g), torch.empty_like(x), torch.empty_like(w)
        products.append((times, ((x, w.t(), y), (g, w, dx), (g.t(), x, dw))))

    def step() -> None:
        for times, group in products:
            for _ in range(times):
                for a, b, out in group:
                    torch.mm(a, b, out=out)

    return step


SUBJECTS: dict[str, Callable[[ModelConfig, torch.Tensor, torch.dtype], Step]] = {
    "hpclm": ours,
    "hpclm, compiled": partial(ours, compiled=True),
    "GPT2LMHeadModel": theirs,
    "GPT2LMHeadModel, compiled": partial(theirs, compiled=True),
    "matrix products alone": limit,
}


def measure(args: argparse.Namespace) -> None:
    """Time every subject and print the table."""
    import torch
    from tqdm import tqdm

    from hpclm.cluster import hardware
    from hpclm.config import EngineConfig, ModelConfig
    from hpclm.model import count

    device = hardware.device(EngineConfig(device=args.device), 0)
    if device.type == "cpu":
        torch.set_num_threads(args.threads)
    products = hardware.set_matmul(EngineConfig(matmul=args.matmul), device)
    dtype = hardware.compute_type(EngineConfig(precision=args.precision), device)
    model = ModelConfig(**SHAPES[args.shape], context=args.context)
    rows = torch.randint(
        0, model.vocab_size, (args.batch, args.context + 1), generator=torch.Generator().manual_seed(0)
    ).to(device)
    wait = hardware.synchronizer(device)

    if args.memory_of:
        step = SUBJECTS[args.memory_of](model, rows, dtype)
        for _ in range(3):
            step()
        wait()
        print(json.dumps(hardware.peak_memory(device)))
        return

    names = [name for name in SUBJECTS if not args.only or any(word in name for word in args.only)]
    memory = (
        {name: peak_of(name) for name in tqdm(names, desc="peak memory, a process each", disable=None)}
        if args.memory
        else {}
    )
    steps = {name: SUBJECTS[name](model, rows, dtype) for name in names}
    for name in tqdm(names, desc="warm-up and compilation", disable=None):
        for _ in range(args.warmup):
            steps[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in tqdm(range(args.rounds), desc="rounds", disable=None):
        for name in names:
            wait()
            began = time.perf_counter()
            steps[name]()
            wait()
            times[name].append(time.perf_counter() - began)

    tokens = args.batch * args.context
    peak = hardware.peak_flops(device, dtype)
    print(
        f"\n{hardware.describe(device)}, torch {torch.__version__}, {str(dtype).removeprefix('torch.')}; fp32 products {products}"
    )
    print(
        f"{args.shape}: {count.parameters(model):,} parameters, {args.batch} x {args.context} tokens, {args.rounds} rounds\n"
    )
    print(
        "| | tokens/s | of the limit | beside hpclm | peak memory |" + (" MFU (causal) | MFU (12LCT) |" if peak else "")
    )
    print("|---|---|---|---|---|" + ("---|---|" if peak else ""))
    for name in names:
        rate = tokens / statistics.median(times[name])
        of_limit = ratio(times, "matrix products alone", name)
        beside = ratio(times, "hpclm", name)
        cells = [name, f"{rate:,.0f}", of_limit, beside, f"{memory[name] / 2**20:,.0f} MiB" if name in memory else "-"]
        if peak:
            cells += [f"{rate * count.flops_per_token(model, causal) / peak:.1%}" for causal in (True, False)]
        print("| " + " | ".join(cells) + " |")


def ratio(times: dict[str, list[float]], of: str, name: str) -> str:
    """Median over rounds of one subject's time against another's in the same round, with its range."""
    if of not in times:
        return "-"
    pairs = [a / b for a, b in zip(times[of], times[name], strict=True)]
    return f"{statistics.median(pairs):.2f} ({min(pairs):.2f}-{max(pairs):.2f})"


def peak_of(name: str) -> int:
    """Peak memory of one subject, in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--context", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, default=12, help="sequences in a step")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument(
        "--matmul", choices=("auto", "exact", "fast"), default="auto", help="as engine.matmul, for every subject"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads on a CPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2, help="steps of each subject that are not counted")
    parser.add_argument("--only", nargs="*", help="only subjects whose name contains one of these words")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="do not measure peak memory")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
