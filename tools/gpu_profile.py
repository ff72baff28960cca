"""Where a step's time goes: hpclm beside the same model in a page of PyTorch, in one process, and the operations on which they differ.

    python tools/gpu_profile.py --out gpu-proof                          # GPT-2 124M, compiled, on a GPU
    python tools/gpu_profile.py --out gpu-proof --device cpu --small     # a rehearsal

Prints two tables in microseconds, and writes them with the dearest kernels to OUT/measure-first.json, which is renewed as results come.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bench_peers
import bench_train

if TYPE_CHECKING:  # loaded where they are used, so that --help answers at once
    import torch

FILE = "measure-first.json"
CATEGORIES = {
    "communication": r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all",
    "attention": r"attention|flash|fmha|sdpa",
    "GEMM": r"gemm|nvjet|cutlass|cublas|xmma|(^|::)(add)?mm(_|$)|bmm|add_product|splitk",
    "table": r"embedding|index|gather|scatter|sort|radix|cub::|krn_|compute_grad_weight",
    "optimizer": r"multi_tensor|foreach|fused_adam|lpnorm|linalg_vector_norm",
    "copies": r"memcpy|memset|copy|concat|::cat$|zero_|fill",
    "elementwise": r"",
}
"""The kind of an operation or kernel, by its name; the first that fits. The last fits all."""
FUSED = {"attention": r"_tem_.*attention", "GEMM": r"_tem_.*mm", "table": r"embedding|index_put", "elementwise": r""}
"""The same for kernels that torch.compile has written, whose names list all operations in them."""
WAITS = re.compile("Synchronize")
"""Calls in which the host waits for the device."""
SUBJECTS = ("hpclm, compiled", "plain PyTorch, compiled", "hpclm")
"""In this order, as long as there is time."""
STEPS = 10
"""Steps without a wait between them, timed together."""
PROFILED = 3
BYTES = 320
"""Vocabulary of a model of bytes, padded."""
DEAREST = 25
"""Kernels of each subject that are written."""


def category(name: str) -> str:
    """The kind of a kernel or operation."""
    patterns = FUSED if name.startswith("triton_") else CATEGORIES
    return next(kind for kind, pattern in patterns.items() if re.search(pattern, name, re.IGNORECASE))


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Time that at least one of these (begin, end) covers."""
    total, covered = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, covered))
        covered = max(covered, end)
    return total


def profiled(step: Callable[[], object], device: torch.device, wait: Callable[[], object]) -> dict[str, Any]:
    """Microseconds a step on the device, by category and by kernel; on a CPU, in operations without those that they call."""
    import torch

    with torch.profiler.profile() as trace:
        for _ in range(PROFILED):
            step()
        wait()
    kernels = Counter[str]()
    counts = Counter[str]()
    events = [event for event in trace.events() if not event.is_user_annotation]
    on_device = [event for event in events if event.device_type.name == device.type.upper()]
    for event in on_device:
        kernels[event.name] += event.self_cpu_time_total if device.type == "cpu" else event.time_range.elapsed_us()
        counts[event.name] += 1
    spans = [(event.time_range.start, event.time_range.end) for event in on_device]
    totals = dict.fromkeys(CATEGORIES, 0.0)
    for name, spent in kernels.items():
        totals[category(name)] += spent / PROFILED
    on_host = [event for event in events if event.device_type.name == "CPU"]
    return {
        **totals,
        "busy": busy(spans) / PROFILED,
        "kernels": len(on_device) / PROFILED,
        "host events": sum(e.self_cpu_time_total for e in on_host if not WAITS.search(e.name)) / PROFILED,
        "host waits": sum(e.self_cpu_time_total for e in on_host if WAITS.search(e.name)) / PROFILED,
        "dearest": {
            name[:120]: [round(spent / PROFILED, 1), counts[name] / PROFILED, category(name)]
            for name, spent in kernels.most_common(DEAREST)
        },
    }


def timed(step: Callable[[], object], wait: Callable[[], object], rounds: int) -> dict[str, float]:
    """Microseconds of a step, and those until its call has returned: medians over rounds of STEPS steps without a wait."""
    wall, host = [], []
    for _ in range(rounds):
        wait()
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        host.append((time.perf_counter() - began) * 1e6 / STEPS)
        wait()
        wall.append((time.perf_counter() - began) * 1e6 / STEPS)
    return {"step": statistics.median(wall), "until it returns": statistics.median(host)}


def row(name: str, figures: dict[str, Any]) -> str:
    """A line of the table of steps."""
    return f"| {name} | " + " | ".join(f"{figures[title]:,.0f}" for title in titles()) + " |"


def titles() -> list[str]:
    """The columns of the table of steps, but the first."""
    return ["step", "until it returns", *CATEGORIES, "idle", "kernels", "host events", "host waits"]


def steps(case: bench_train.Case, names: Iterable[str], rounds: int, seconds: float, keep: Callable[[], None]) -> Any:
    """Figures of each subject; prints a row as soon as it is known. After ``seconds`` no subject is begun."""
    print("| us a step | " + " | ".join(titles()) + " |\n" + "|---" * (len(titles()) + 1) + "|", flush=True)
    began = time.monotonic()
    for name in names:
        if time.monotonic() - began > seconds:
            print(f"{name} is left out: no time is left", flush=True)
            continue
        try:
            step = bench_train.SUBJECTS[name](case.model, case.rows, case.dtype)
            for _ in range(3):
                step()
            figures = timed(step, case.wait, rounds) | profiled(step, case.device, case.wait)
            # by the time without the profiler, which slows the host and no kernel
            figures["idle"] = max(0.0, figures["step"] - figures["busy"])
        except (RuntimeError, ImportError) as error:  # out of memory, a compiler that is not there: the others count
            print(f"{name} is left out: {str(error).splitlines()[0][:200]}", flush=True)
            continue
        print(row(name, figures), flush=True)
        for kernel, (spent, count, kind) in list(figures["dearest"].items())[:12]:
            print(f"  {spent:9.1f} us, {count:5.0f} times, {kind}: {kernel}")
        yield name, figures
        del step
        keep()


def operations(case: bench_train.Case, repeats: int) -> dict[str, float]:
    """Microseconds of single operations in the shapes of a step, by name."""
    found = {}
    for part in (table_gradient, weight_gradient, attention):
        for name, work in part(case).items():
            work()
            [seconds] = bench_peers.rounds({name: work}, 1, case.wait, show=False, together=repeats)[name]
            found[name] = seconds * 1e6
            print(f"| {name} | {found[name]:,.1f} |", flush=True)
    return found


def table_gradient(case: bench_train.Case) -> dict[str, Callable[[], object]]:
    """The gradient of a word table added to an fp32 one; more than a quarter of the tokens are one id, as spaces are. Also of a table of
    bytes, for which main_gradients.add_rows takes the other way."""
    import torch

    model, count = case.model, case.rows[0, :, 1:].numel()
    repeated = round(4700 / 16384 * count)
    d_y = torch.randn(count, model.hidden, device=case.device).to(case.dtype)

    def sparse(total: torch.Tensor, ids: torch.Tensor) -> None:
        total.index_put_((ids,), d_y.float(), accumulate=True)

    def dense(total: torch.Tensor, ids: torch.Tensor, rows: Callable[[], torch.Tensor]) -> None:
        total.add_(torch.ops.aten.embedding_dense_backward(rows(), ids, len(total), -1, False))

    works: dict[str, Callable[[], object]] = {}
    for vocab in (model.padded_vocab, BYTES):
        drawn = torch.Generator().manual_seed(0)
        ids = torch.randint(1, vocab, (count,), generator=drawn)
        ids[torch.randperm(count, generator=drawn)[:repeated]] = 0
        at = torch.zeros(vocab, model.hidden, device=case.device), ids.to(case.device)
        where = f"gradient of a table of {vocab}, {count} tokens, {repeated} of one id: "
        works[f"{where}index_put_(accumulate)"] = partial(sparse, *at)
        works[f"{where}embedding_dense_backward, add_"] = partial(dense, *at, d_y.float)
        works[f"{where}the same without a cast to fp32"] = partial(dense, *at, lambda: d_y)
    return works


def weight_gradient(case: bench_train.Case) -> dict[str, Callable[[], object]]:
    """The products of weights' gradients: added to fp32 where it lies, as now, and into the compute type."""
    import torch

    from hpclm.parallel.main_gradients import add_product

    model, count = case.model, case.rows[0, :, 1:].numel()
    works: dict[str, Callable[[], object]] = {}
    for n_out, n_in in (
        (3 * model.hidden, model.hidden),
        (model.ffn_width, model.hidden),
        (model.padded_vocab, model.hidden),
    ):
        d_y, x = (torch.randn(count, n, device=case.device).to(case.dtype) for n in (n_out, n_in))
        total = torch.zeros(n_out, n_in, device=case.device)
        out = torch.empty(n_out, n_in, device=case.device, dtype=case.dtype)
        where = f"weight gradient, {n_out} x {n_in}: "
        works[f"{where}added to fp32, as now"] = partial(add_product, total, d_y, x)
        works[f"{where}into {str(case.dtype)[6:]}"] = partial(torch.mm, d_y.t(), x, out=out)
    return works


def attention(case: bench_train.Case) -> dict[str, Callable[[], object]]:
    """Causal attention forward and backward, on parts of one product's result and on tensors of their own."""
    import torch
    import torch.nn.functional as F

    model, (_, batch, context) = case.model, case.rows[:, :, 1:].shape
    heads, width = model.attention.heads, model.head_width

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=case.device).to(case.dtype)

    of_hpclm = draw(context, batch, heads, 3, width).permute(1, 2, 0, 3, 4).unbind(3)
    of_page = draw(batch, context, 3, heads, width).permute(2, 0, 3, 1, 4).unbind(0)
    layouts = {"hpclm's strides": of_hpclm, "the page's strides": of_page}
    layouts["contiguous"] = tuple(part.contiguous() for part in of_page)
    works: dict[str, Callable[[], object]] = {}
    for name, parts in layouts.items():
        q, k, v = (part.detach().requires_grad_() for part in parts)

        def work(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(y, (q, k, v), torch.ones_like(y))

        works[f"attention, forward and backward, {name}"] = work
    return works


def main() -> int:
    """Read the arguments, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-proof"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a small model, uncompiled, to rehearse")
    parser.add_argument("--seconds", type=float, default=50, help="after this long no subject is begun (default 50)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    words = ["--device", args.device]
    words += (
        ["--context", "32", "--batch", "2"] if args.small else ["--shape", "124m", "--context", "1024", "--batch", "16"]
    )
    case = bench_train.case(bench_train.arguments(words))
    found: dict[str, Any] = {"operations": {}, "steps": {}}

    def keep() -> None:
        (args.out / FILE).write_text(json.dumps(found, indent=1))

    print("| operation | us |\n|---|---|")
    found["operations"] = operations(case, 2 if args.small else 20)
    keep()
    print()
    names = [name.removesuffix(", compiled") for name in SUBJECTS[:2]] if args.small else SUBJECTS
    for name, figures in steps(case, names, 1 if args.small else 3, args.seconds, keep):
        found["steps"][name] = figures
    keep()
    if not any(figures["kernels"] for figures in found["steps"].values()):
        print("error: no step was profiled, or the profiler recorded no kernels")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
