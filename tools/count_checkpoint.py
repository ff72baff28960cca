"""Bytes that each rank writes, reads, hashes and gathers when it saves and resumes: counted, not timed.

Every engine trains a small model for one step on 1, 2, 4, 8 and 16 processes of this machine, saves it, and resumes from it in
the same layout; then it resumes from the checkpoint of one process with the engine native. By counting, the figures of 16
processes on two cores are those of 16 on 16 nodes.

    python tools/count_checkpoint.py
    python tools/count_checkpoint.py --ranks 16 --only fsdp2 native

The figures are of the rank that has the most to do, as multiples of its even share: the bytes of the whole state over the
number of ranks. Gathered: bytes of weights and moments in the results of collectives.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

NATIVE = "native"
ENGINES = {
    NATIVE: [],
    "native, tensor 2": ["parallel.tensor=2"],
    "native, ZeRO 1": ["engine.zero_stage=1"],
    "pipelining, pipeline 2": ["engine.name=pipelining", "parallel.pipeline=2"],
    "fsdp2": ["engine.name=fsdp2"],
    "fsdp2, tensor 2": ["engine.name=fsdp2", "parallel.tensor=2"],
    "fsdp2, shard 2": ["engine.name=fsdp2", "parallel.shard=2"],
    "fairscale": ["engine.name=fairscale"],
    "deepspeed, ZeRO 0": ["engine.name=deepspeed", "engine.zero_stage=0"],
    "deepspeed, ZeRO 1": ["engine.name=deepspeed", "engine.zero_stage=1"],
    "deepspeed, ZeRO 2": ["engine.name=deepspeed", "engine.zero_stage=2"],
    "deepspeed, ZeRO 3": ["engine.name=deepspeed", "engine.zero_stage=3"],
    "deepspeed, pipeline 2": ["engine.name=deepspeed", "parallel.pipeline=2"],
}
PRELOADED = ["torch", "torch.distributed", "hpclm.engine.native", "hpclm.engine.fsdp2", "hpclm.checkpoint"]


@contextmanager
def counting(counts: Counter[str]) -> Iterator[None]:
    """Count the calls that move or hash bytes of checkpoint files, and the collectives on weights."""
    import torch
    import xxhash
    from torch.utils._python_dispatch import TorchDispatchMode

    from hpclm.base import files

    class Collectives(TorchDispatchMode):
        """Adds up the largest argument of each collective on floating-point tensors."""

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operation.namespace == "c10d":
                sizes = [sum(size(t) for t in tensors(value)) for value in args]
                counts["gathered"] += max(sizes, default=0)
            return operation(*args, **(kwargs or {}))

    def tensors(value: Any) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from tensors(item)

    def size(tensor: Any) -> int:
        return tensor.numel() * tensor.element_size() if tensor.is_floating_point() else 0

    def counted(module: Any, name: str, add: Callable[..., None]) -> Any:
        real = getattr(module, name)

        def call(*args: Any) -> Any:
            result = real(*args)
            add(result, *args)
            return result

        return mock.patch.object(module, name, call)

    def moved(what: str) -> Callable[..., None]:
        return lambda result, *_: counts.update({what: result})

    def opened(*_: Any) -> None:
        counts["opened"] += 1

    def hashed(_: Any, content: Any, *__: Any) -> None:
        counts["hashed"] += len(content)

    with ExitStack() as active:
        active.enter_context(counted(os, "write", moved("written")))
        active.enter_context(counted(os, "preadv", moved("read")))
        active.enter_context(counted(files, "opened", opened))
        active.enter_context(counted(xxhash, "xxh3_64_hexdigest", hashed))
        active.enter_context(Collectives())
        yield


def one_rank(args: argparse.Namespace, rank: int, size: int, folder: str, answer: Any) -> None:
    """One process of ``size``: every engine in turn."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.simplefilter("ignore")
    if size > 1:
        store: Any = getattr(dist, "FileStore")(f"{folder}/store-{size}", size)  # noqa: B009
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    for name in chosen(args, size):
        figures = measured(args, ENGINES[name], rank, size, Path(folder))
        answer.send((name, figures))
    answer.close()
    if size > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def chosen(args: argparse.Namespace, size: int) -> list[str]:
    """The engines that can run on ``size`` processes."""
    fit = [name for name, words in ENGINES.items() if size > 1 or not any("parallel" in word for word in words)]
    return [name for name in fit if not args.only or any(name.startswith(word) for word in args.only)]


def measured(args: argparse.Namespace, words: list[str], rank: int, size: int, folder: Path) -> dict[str, Any]:
    """The counts of a save, of resuming in the same layout, and of resuming from the checkpoint of one process."""
    from hpclm.checkpoint import CheckpointStore, Progress, Retention
    from hpclm.distributed.bootstrap import World
    from hpclm.distributed.context import DistributedContext, single

    alone = single()
    context = DistributedContext(World("test", rank, size), alone.ranks * size, alone.watchdog)
    engine = engine_after_a_step(args, words, rank, size)
    destination = Path(context.run_on_main(lambda: tempfile.mkdtemp(dir=folder)))
    common = folder / "one"
    counts: Counter[str] = Counter()
    figures: dict[str, Any] = {}

    def take(what: str) -> None:
        figures[what] = dict(counts)
        counts.clear()

    with counting(counts):
        store = CheckpointStore(destination, Retention(2), {}, context)
        path = store.save(engine, Progress(1))
        take("save")
        store.resume(engine, "require")
        take("resume")
        if not common.exists():  # the first, on one process
            destination.rename(common)
            path = common / path.name
        CheckpointStore(common, Retention(2), {}, context).resume(engine, "require")
        take("reshard")
    manifest = path / "MANIFEST.json"
    entries = json.loads(manifest.read_text())["tensors"].values()
    return {
        **figures,
        "state": sum(4 * elements(entry["shape"]) for entry in entries),
        "manifest": manifest.stat().st_size,
    }


def elements(shape: list[int]) -> int:
    """Values of a tensor of this shape."""
    count = 1
    for size in shape:
        count *= size
    return count


def engine_after_a_step(args: argparse.Namespace, words: list[str], rank: int, size: int) -> Any:
    """An engine with moments."""
    import torch

    from hpclm import config
    from hpclm import engine as engines
    from hpclm.parallel.mesh import Compute, Mesh
    from hpclm.parallel.micro_batch import MicroBatch

    model = [
        f"model.layers={args.layers}",
        f"model.hidden={args.hidden}",
        "model.attention.heads=4",
        "model.vocab_size=1024",
    ]
    rest = [
        "model.context=16",
        "batch.micro_size=1",
        f"batch.global_size={size}",
        "engine.precision=fp32",
        "checkpoint.file_mb=0",
    ]
    run = config.load(None, [*model, *rest, "data.source=synthetic", "budget.steps=1", "engine.device=cpu", *words])
    mesh = Mesh.build(rank, size, run.parallel)
    engine = engines.build(run.for_engine(mesh.world.size), Compute(torch.device("cpu"), torch.float32, mesh))
    draw = torch.Generator().manual_seed(mesh.dp.rank)
    rows = torch.randint(1024, (1, 17), generator=draw)
    batch = MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    engine.train_step([batch] * run.plan(size).accumulation(0), 1e-4, 0)
    return engine


def together(args: argparse.Namespace, size: int, folder: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Of each engine, what ``size`` processes counted."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=one_rank, args=(args, rank, size, folder, pipes[rank][1]), daemon=True)
        for rank in range(size)
    ]
    for process, (_, sending) in zip(ranks, pipes, strict=True):
        process.start()
        sending.close()
    try:
        for _ in chosen(args, size):
            answers = [receiving.recv() for receiving, _ in pipes]
            yield answers[0][0], [figures for _, figures in answers]
    except EOFError:
        raise SystemExit("a process failed; its error is above") from None
    for process in ranks:
        process.join()


COLUMNS = {
    "written": ("save", "written"),
    "gathered to save": ("save", "gathered"),
    "read": ("resume", "read"),
    "hashed": ("resume", "hashed"),
    "gathered to resume": ("resume", "gathered"),
    "read from one rank's": ("reshard", "read"),
}


def line(name: str, size: int, ranks: list[dict[str, Any]]) -> str:
    """A row of the table."""
    state = ranks[0]["state"]
    share = state / size
    cells = [f"{max(rank[when].get(what, 0) for rank in ranks) / share:.2f}" for when, what in COLUMNS.values()]
    min_written = min(rank["save"]["written"] for rank in ranks) / share
    cells[0] += f" ({min_written:.2f})"
    total = sum(rank["resume"]["read"] for rank in ranks) / state
    opened = max(rank["resume"]["opened"] for rank in ranks)
    manifest = ranks[0]["manifest"] / 1e3
    return f"| {name} | {size} | {' | '.join(cells)} | {total:.2f} | {opened} | {manifest:.0f} |"


def main() -> None:
    """Read the arguments, count, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--only", nargs="*", help="engines whose name starts with one of these words")
    args = parser.parse_args()
    from tqdm import tqdm

    sizes = sorted({1, *args.ranks})
    rows: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in tqdm(sizes, desc="numbers of ranks", disable=None):
            for name, ranks in together(args, size, folder):
                rows.setdefault(name, []).append(line(name, size, ranks))
                state = ranks[0]["state"]
    print(f"{args.layers} layers of width {args.hidden}: {state / 1e6:.1f} MB of fp32 weights and moments\n")
    print(f"| engine | ranks | {' | '.join(COLUMNS)} | read by all, times the state | files opened | manifest kB |")
    print("|---" * (len(COLUMNS) + 5) + "|")
    print("\n".join(row for name in ENGINES if name in rows for row in rows[name]))


if __name__ == "__main__":
    main()
