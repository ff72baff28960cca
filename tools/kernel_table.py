"""What a step of the presets compiles to, as a table; on a GPU, or on a stand-in that compiles and runs nothing (tests/standin/README.md).

    HPCLM_STANDIN=/lab python tools/kernel_table.py              all cases
    HPCLM_STANDIN=/lab python tools/kernel_table.py 124m         those with these words in their name

A case is a preset with few layers, which stand for all, and an engine, in a process of its own: of several GPUs the first. It takes 50 steps, in which the
learning rate, the number of micro-batches and the loss scale change, with evaluations in between that end in a partial batch.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STEPS = 50
WARM = 4
"""Steps, an evaluation among them, after which nothing may be compiled."""
LAYERS = 2
CONFIGS = {
    "124m": ["configs/gpt2-124m.yaml", "batch.micro_size=16"],
    "1.3b": ["configs/gpt-1b3.yaml", "batch.micro_size=4"],
    "llama-1b": ["configs/llama-1b.yaml", "batch.micro_size=4"],
}
DEEPSPEED = ["engine.name=deepspeed"]
ENGINES = {
    "native": [],
    "fsdp2, 2 GPUs": ["engine.name=fsdp2", "job.gpus=2"],
    "deepspeed 1": [*DEEPSPEED, "engine.zero_stage=1"],
    "deepspeed 3": [*DEEPSPEED, "engine.zero_stage=3"],
    "fairscale": ["engine.name=fairscale", "engine.compile=false"],
}
OPTIONS = {
    "dropout": ["model.dropout=0.1"],
    "recompute full": ["engine.recompute=full"],
    "recompute selective": ["engine.recompute=selective"],
    "offload": ["engine.offload_activations=true"],
    "fp16": ["engine.precision=fp16", "scaler.window=10"],
    "documents": ["data.reset_attention_mask=true", "data.reset_position_ids=true"],
    "uncompiled": ["engine.compile=false"],
}
WINDOWS = [
    *("model.attention.pattern=[window,full]", "model.attention.window=1024", "model.norm_order=post"),
    *("model.attention.qk_norm=true", "model.attention.qk_norm_span=projection"),
]
"""As in OLMo 3."""
CASES = {f"{config}, {engine}": [*CONFIGS[config], *words] for config in CONFIGS for engine, words in ENGINES.items()}
CASES |= {f"124m, native, {option}": [*CONFIGS["124m"], *words] for option, words in OPTIONS.items()}
CASES |= {
    "124m, deepspeed 2, offload": [*CONFIGS["124m"], *DEEPSPEED, "engine.zero_stage=2", "engine.offload=optimizer"],
    "345m, native": ["configs/gpt2-345m.yaml", "data.split=969,30,1"],
    "llama-1b, native, muon": [*CONFIGS["llama-1b"], "optim.name=muon"],
    "llama-1b, native, windows": [*CONFIGS["llama-1b"], *WINDOWS],
    "llama-7b, fsdp2, 8 GPUs": ["configs/llama-7b.yaml", "batch.micro_size=2", "job.gpus=8"],
    "13b, deepspeed 1, 8 GPUs": ["configs/gpt-13b-3d.yaml", "batch.micro_size=4", "job.gpus=8", "parallel.pipeline=1"],
}


@dataclass(frozen=True)
class Kernel:
    """What ptxas made of a Triton kernel: the most over the variants that were compiled."""

    registers: int
    spilled: int
    """Bytes of local memory of a thread."""
    shared: int
    """Bytes of a block's shared memory."""


def measure(words: list[str], layers: int, steps: int) -> dict[str, Any]:
    """Take the steps of one case in this process."""
    import torch

    from hpclm import config
    from hpclm import engine as engines
    from hpclm.model.attention import backend as attention_backend
    from hpclm.node.gpus import KINDS
    from hpclm.parallel.mesh import Compute, Mesh
    from hpclm.parallel.micro_batch import MicroBatch
    from hpclm.planning import forecast

    counters = torch._dynamo.utils.counters
    path, *rest = words
    run = config.load(ROOT / path, ["data.source=synthetic", f"model.layers={layers}", *rest])
    device, size, context = torch.device("cuda", 0), int(run.batch.micro_size), run.model.context
    dtype = torch.float16 if run.engine.precision == "fp16" else torch.bfloat16
    attention_backend.use(run.model, device)
    world = run.job.nodes * run.job.gpus
    if world > 1:  # the others are not there, and sums are wrong
        torch.distributed.init_process_group("fake", rank=0, world_size=world)
    engine = engines.build(run.for_engine(world), Compute(device, dtype, Mesh.build(0, world, run.parallel)))

    def batch(rows: int) -> MicroBatch:
        ids = torch.zeros(rows, context + 1, dtype=torch.int64).to(device)
        documents = positions = None
        if run.data.reset_attention_mask:  # two in each sample
            number, half = torch.arange(context).expand(rows, -1), context // 2
            documents, positions = ((number // half).to(device), (number % half).to(device))
        return MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), None, positions, documents)

    full, part = batch(size), batch(max(1, size - 1))
    traffic = Traffic()

    def step(number: int) -> None:
        engine.train_step([full] * (2 if number < STEPS // 2 else 3), 1e-4 * (1 + number) / steps, number)

    step(0)
    moved, ideal = traffic.of_blocks()
    for number in range(1, WARM):
        step(number)
    engine.evaluate([full, part])
    engine.evaluate([full, part])
    compiled_graphs = counters["stats"].get("unique_graphs", 0)
    torch.cuda.reset_peak_memory_stats()
    step(WARM)
    peak = torch.cuda.max_memory_allocated()
    log = trace(lambda: step(WARM + 1))
    for number in range(WARM + 2, steps):
        step(number)
        if number % 20 == 0:
            engine.evaluate([full, part])
    figures = {
        "graphs": compiled_graphs,
        "breaks": sum(counters["graph_break"].values()),
        "recompiled": counters["stats"].get("unique_graphs", 0) - compiled_graphs,
        "moved": moved,
        "ideal": ideal,
        "peak": peak,
        "planner": forecast.predict(run, KINDS["H200"]).memory[0].tensors,
        "compiled": run.engine.compile is not False,
    }
    return figures | ({} if log is None else {"launches": launches(log), "waits": waits(log)})


class Traffic:
    """Bytes that a block's compiled kernels read and write, as Inductor counts them while it compiles, and the least they could be."""

    def __init__(self) -> None:
        """From now on."""
        import torch._inductor.config
        import torch._inductor.metrics
        from torch._inductor.custom_graph_pass import CustomGraphPass

        graphs = self.graphs = list[tuple[int, int, int]]()
        """What was counted before each graph; bytes of its attention, which Inductor does not count, 0 outside of blocks; its ideal."""
        metrics = self.metrics = torch._inductor.metrics

        class Begin(CustomGraphPass):
            def __call__(self, graph: Any) -> None:
                graphs.append((metrics.num_bytes_accessed, attention_bytes(graph), ideal_bytes(graph)))

            def uuid(self) -> str:
                return "it changes nothing"

        torch._inductor.config.post_grad_custom_post_pass = Begin()

    def of_blocks(self) -> tuple[int, int]:
        """Bytes of the kernels of all graphs of blocks that have been compiled, and the ideal."""
        moved = ideal = 0
        end = self.metrics.num_bytes_accessed
        for begin, attention, minimum in reversed(self.graphs):
            if attention:
                moved, ideal = moved + end - begin + attention, ideal + minimum
            end = begin
        return moved, ideal


def size(node: Any) -> int:
    """Bytes of what a node of a graph gives, if it is a tensor."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if hasattr(value, "numel") else 0


def attention_bytes(graph: Any) -> int:
    """Bytes that its attention kernels read and write, each tensor once."""
    kernels = [node for node in graph.nodes if "attention" in str(node.target)]
    return sum(size(other) for node in kernels for other in [*node.all_input_nodes, *node.users])


def ideal_bytes(graph: Any) -> int:
    """Bytes of what a graph needs, makes and changes, each read or written once: of a forward pass a block's inputs, weights, outputs
    and what it saves; of a backward pass what was saved, and the gradients."""
    [output] = (node for node in graph.nodes if node.op == "output")
    written = {node for node in output.all_input_nodes if node.op != "placeholder" and "empty" not in str(node.target)}
    read = {node for node in graph.nodes if node.op == "placeholder" and set(node.users) - {output}}
    changed = {node.args[0] for node in graph.nodes if "copy_" in str(node.target)}
    return sum(size(node) for group in (written, read, changed) for node in group)


def trace(step: Callable[[], object]) -> list[str] | None:
    """The stand-in's log of one step; None on a GPU."""
    here, name = ctypes.CDLL(None), os.environ.get("FAKEGPU_LOG", "")
    if "%d" not in name or not hasattr(here, "fakegpu_note"):
        step()
        return None
    path = Path(name.replace("%d", str(os.getpid())))
    here.fakegpu_flush()
    before = path.stat().st_size
    step()
    here.fakegpu_flush()
    with open(path, errors="replace") as file:
        file.seek(before)
        return file.read().splitlines()


def launches(log: list[str]) -> dict[str, int]:
    """How many kernels of each kind a step launches."""
    kinds = {"triton": "Triton", "gemm": "cuBLAS", "cudnn": "cuDNN", "kernel": "PyTorch"}
    return dict(Counter(kinds[word] for line in log if (word := line.split(" ")[0]) in kinds))


def waits(log: list[str]) -> dict[str, int]:
    """What the host waits for in a step: synchronisations, and copies of memory that is not pinned."""
    return dict(Counter(line.split(" (")[0][:40] for line in log if "WAIT" in line or "PAGEABLE" in line))


def compiled_kernels(cache: Path) -> dict[str, Kernel]:
    """Every Triton kernel below a cache folder, by name."""
    triton = find_spec("triton")
    if triton is None or triton.origin is None:
        return {}
    tool = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"
    kernels: dict[str, Kernel] = {}
    for file in cache.rglob("*.cubin"):
        said = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True)
        usage = re.search(r"REG:(\d+).*?LOCAL:(\d+)", said.stdout + said.stderr)
        if usage is None:
            continue
        meta = json.loads(file.with_suffix(".json").read_text())
        one, old = Kernel(int(usage[1]), int(usage[2]), int(meta["shared"])), kernels.get(file.stem, Kernel(0, 0, 0))
        kernels[file.stem] = Kernel(*(max(a, b) for a, b in zip(vars(one).values(), vars(old).values(), strict=True)))
    return kernels


def run_case(python: str, words: list[str], layers: int = LAYERS, steps: int = STEPS) -> dict[str, Any]:
    """Measure one case in processes of ``python``, with a cache of their own; RuntimeError with what one said if it fails. ``block``:
    what one layer more launches in a step."""
    with tempfile.TemporaryDirectory(prefix="hpclm-kernels-") as folder:
        figures = measured(python, words, layers, steps, folder)
        if "launches" in figures:
            more = measured(python, words, layers + 1, WARM + 3, folder)["launches"]
            figures["block"] = {kind: more[kind] - figures["launches"].get(kind, 0) for kind in more}
        return figures


def measured(python: str, words: list[str], layers: int, steps: int, folder: str) -> dict[str, Any]:
    """What ``measure`` finds in a process of ``python``, and its kernels."""
    env = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache", "FAKEGPU_LOG": f"{folder}/log.%d"}
    env |= {"TRITON_CACHE_DIR": f"{folder}/cache/triton", "TORCH_LOGS": "inductor_metrics"}  # which Inductor counts for
    given = ["--measure", f"{folder}/figures.json", "--layers", str(layers), "--steps", str(steps), *words]
    done = subprocess.run(
        [python, __file__, *given], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=1800
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    figures: dict[str, Any] = json.loads(Path(folder, "figures.json").read_text())
    return figures


def row(name: str, figures: dict[str, Any]) -> str:
    """A line of the table."""
    micro = 2  # micro-batches of the step that is counted
    has_launches = "launches" in figures  # not on a GPU
    counts = {kind: n / micro for kind, n in figures["block"].items()} if has_launches else {}
    kernels = figures["kernels"].values()
    cells = [
        name,
        ", ".join(f"{n:g} {kind}" for kind, n in sorted(counts.items()) if n) or "-",
        f"{len(kernels)}",
        f"{max((k['registers'] for k in kernels), default=0)}",
        f"{sum(k['spilled'] > 0 for k in kernels)}, {max((k['spilled'] for k in kernels), default=0)} B",
        f"{max((k['shared'] for k in kernels), default=0) / 1024:.0f}",
        f"{figures['moved'] / figures['ideal']:.2f}" if figures["ideal"] else "-",
        f"{figures['breaks']}",
        f"{figures['recompiled']}",
        f"{sum(figures['waits'].values())}" if has_launches else "-",
        f"{figures['peak'] / 2**20:,.0f}",
        f"{figures['planner'] / figures['peak']:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


HEADER = (
    "| preset, engine | kernels of a block and micro-batch | Triton kernels | most registers | "
    "kernels that spill, most | shared memory, KiB | bytes / ideal fusion | graph breaks | compiled again | host waits a step | peak MiB | "
    "planner / peak |"
)


def main() -> int:
    """Print the table, or measure one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="cases whose name contains one of these; default all")
    parser.add_argument("--measure", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=LAYERS, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each case (default 50)")
    args = parser.parse_args()
    if args.measure:
        figures = measure(args.words, args.layers, args.steps)
        figures["kernels"] = {name: vars(k) for name, k in compiled_kernels(args.measure.parent / "cache").items()}
        args.measure.write_text(json.dumps(figures))
        return 0
    lab = os.environ.get("HPCLM_STANDIN")
    python = str(Path(lab) / "python") if lab else sys.executable
    code = 0
    print(HEADER, "|---" * (HEADER.count("|") - 1) + "|", sep="\n", flush=True)
    for name, words in CASES.items():
        if not args.words or name in args.words or any(word in name for word in args.words if word not in CASES):
            try:
                print(row(name, run_case(python, words, args.layers, args.steps)), flush=True)
            except RuntimeError as error:
                code = 1
                print(f"| {name} | failed |", flush=True)
                print(error, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
