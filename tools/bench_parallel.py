"""What engines and layouts cost: hpclm's engines beside the same libraries by hand, and 2 processes beside 1.

All train the same model (hpclm's layers and loss) on the same global batch, a step of each in turn, so that a machine whose
speed drifts drifts for all. ``engines`` runs in one process, with a process group where a library needs one;
``layouts`` in two, of which one rests while the other trains alone; ``agreement`` in many, each with its own micro-batch,
with what ranks agree on once a step and without.

    python tools/bench_parallel.py engines                                  # CPU: 4 layers x 256, one thread
    python tools/bench_parallel.py layouts
    python tools/bench_parallel.py agreement --micro 1                      # 16 processes
    python tools/bench_parallel.py engines --shape 124m --context 1024      # on a GPU, bf16
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bench_peers
from bench_peers import Step
from library_loops import BY_HAND, SHAPES, by_hand, micro_batches, settings

ENGINES = {
    "native": ["engine.name=native"],
    "native, ZeRO 1": ["engine.name=native", "engine.zero_stage=1"],
    "deepspeed, ZeRO 1": ["engine.name=deepspeed", "engine.zero_stage=1"],
    "deepspeed, ZeRO 3": ["engine.name=deepspeed", "engine.zero_stage=3"],
    "fairscale, stage 3": ["engine.name=fairscale", "engine.zero_stage=3"],
    "fsdp2, stage 3": ["engine.name=fsdp2", "engine.zero_stage=3"],
}
LAYOUTS = {
    "one process": None,
    "data 2": [],
    "tensor 2": ["parallel.tensor=2"],
    "pipeline 2": ["engine.name=pipelining", "parallel.pipeline=2"],
}


def engine_step(args: argparse.Namespace, words: list[str], size: int, rank: int, device: Any, dtype: Any) -> Step:
    """A step of an engine, as the loop calls it."""
    from hpclm import engine as engines
    from hpclm.parallel.mesh import Compute, Mesh

    run = settings(args, words)
    mesh = Mesh.build(rank, size, run.parallel)
    engine = engines.build(run.for_engine(mesh.world.size), Compute(device, dtype, mesh))
    batches = micro_batches(args, run, mesh.dp.size, mesh.dp.rank, device)

    def step() -> None:
        engine.train_step(batches, 1e-4, 0)

    return step


def timed(steps: dict[str, Step], args: argparse.Namespace, wait: Step, show: bool = True) -> dict[str, list[float]]:
    """Seconds of every subject's step, round by round."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # its own would be left behind by os._exit
    for name in tqdm(steps, desc="warm-up", disable=None if show else True):
        for _ in range(args.warmup):
            steps[name]()
    return bench_peers.rounds(steps, args.rounds, wait, show)


def prepare(args: argparse.Namespace, rank: int, size: int, file: str) -> tuple[Any, Any, str]:
    """Device, compute type and a description, with the process group up."""
    import torch
    import torch.distributed as dist

    from hpclm.config import EngineConfig
    from hpclm.node import hardware

    device = hardware.device(EngineConfig(device=args.device), rank)
    if device.type == "cpu":
        torch.set_num_threads(args.threads)
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.setdefault("ENABLE_NCCL_BASE_COLLECTIVES", "0")
    hardware.set_matmul(device)
    dtype = hardware.compute_type(EngineConfig(precision=args.precision), device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    stores: Any = dist
    store = stores.FileStore(file, size) if size > 1 else stores.HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return device, dtype, f"{hardware.describe(device)}, torch {torch.__version__}, {str(dtype).removeprefix('torch.')}"


def engines(args: argparse.Namespace) -> None:
    """Every engine beside native, and beside its library by hand, in one process."""
    from hpclm.node import hardware

    device, dtype, words = prepare(args, 0, 1, "")
    subjects: dict[str, Callable[[], Step]] = {
        name: partial(engine_step, args, overrides, 1, 0, device, dtype) for name, overrides in ENGINES.items()
    }
    subjects |= {name: partial(by_hand, args, name, device, dtype) for name in BY_HAND}
    chosen = [name for name in subjects if not args.only or any(word in name for word in args.only)]
    steps = {name: subjects[name]() for name in chosen}
    times = timed(steps, args, hardware.synchronizer(device))
    head(args, words)
    print("| | tokens/s | time beside native | time beside the library by hand |\n|---|---|---|---|")
    hands = {engine: hand for hand, engine in BY_HAND.items()}
    for name in chosen:
        hand = ratio(times, name, hands[name]) if name in hands else "-"
        print(f"| {name} | {rate(args, times[name])} | {ratio(times, name, 'native')} | {hand} |")


def layouts(args: argparse.Namespace) -> None:
    """Two processes in each layout, beside one of them alone on the same global batch."""
    words, times = together(args, 2, one_of_two)
    head(args, words)
    print("| | tokens/s | times one process |\n|---|---|---|")
    for name in times:
        print(f"| {name} | {rate(args, times[name])} | {ratio(times, 'one process', name)} |")


def agreement(args: argparse.Namespace) -> None:
    """Many processes: a step with what ranks agree on once a step, beside the same step without."""
    words, times = together(args, args.ranks, one_of_many)
    head(args, f"{words}, {args.ranks} processes")
    print("| | seconds a step | times a step without |\n|---|---|---|")
    for name in times:
        print(f"| {name} | {statistics.median(times[name]):.4f} | {ratio(times, name, SINGLE)} |")


def together(args: argparse.Namespace, size: int, work: Callable[..., None]) -> tuple[str, dict[str, list[float]]]:
    """What rank 0 of ``size`` processes, which all do ``work``, says."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        receiving, sending = context.Pipe(duplex=False)
        store = str(Path(folder, "store"))
        ranks = [context.Process(target=work, args=(args, rank, size, store, sending)) for rank in range(size)]
        for process in ranks:
            process.start()
        sending.close()
        try:
            words, times = receiving.recv()
        except EOFError:
            raise SystemExit("a process failed; its error is above") from None
        finally:
            for process in ranks:
                process.join()
    return words, times


def one_of_two(args: argparse.Namespace, rank: int, size: int, store: str, answer: Any) -> None:
    """One of the processes of ``layouts``."""
    device, dtype, words = prepare(args, rank, size, store)
    steps: dict[str, Step] = {}
    for name, overrides in LAYOUTS.items():
        if overrides is not None:
            steps[name] = engine_step(args, overrides, size, rank, device, dtype)
        else:
            steps[name] = engine_step(args, [], 1, 0, device, dtype) if rank == 0 else (lambda: None)
    say(args, rank, steps, device, words, answer)


SINGLE = "no agreement"


def one_of_many(args: argparse.Namespace, rank: int, size: int, store: str, answer: Any) -> None:
    """One of the processes of ``agreement``; each subject makes ``--steps`` steps in a round, so that one waits for another."""
    import torch
    import torch.distributed as dist

    from hpclm import engine as engines
    from hpclm.parallel.async_all_reduce import AsyncAllReduce, Reduction
    from hpclm.parallel.mesh import Compute, Mesh

    device, dtype, words = prepare(args, rank, size, store)
    run = settings(args, [f"batch.global_size={args.micro * size}"])
    mesh = Mesh.build(rank, size, run.parallel)
    engine, vector = (
        engines.build(run.for_engine(mesh.world.size), Compute(device, dtype, mesh)),
        AsyncAllReduce(mesh.world, device),
    )
    shape = argparse.Namespace(**vars(args) | {"batch": args.micro * size})
    batches = micro_batches(shape, run, size, rank, device)
    controls = {f"control{number}": float(number) for number in range(12)}

    def without() -> None:
        for _ in range(args.steps):
            engine.train_step(batches, 1e-4, 0)

    def late() -> None:
        before: Reduction | None = None
        for _ in range(args.steps):
            result = engine.train_step(batches, 1e-4, 0)
            queued = vector.start({**controls, **result.metrics})
            if before is not None:
                before.read()
            before = queued

    def at_once() -> None:
        for _ in range(args.steps):
            result = engine.train_step(batches, 1e-4, 0)
            float(result.loss)
            for count in (1, len(controls)):
                dist.all_reduce(torch.zeros(count, dtype=torch.float64), dist.ReduceOp.MAX)

    say(args, rank, {SINGLE: without, "one vector, read a step late": late, "two reductions between CPUs": at_once},
        device, words, answer, args.steps)  # fmt: skip


def say(
    args: argparse.Namespace,
    rank: int,
    steps: dict[str, Step],
    device: Any,
    words: str,
    answer: Any,
    steps_per_call: int = 1,
) -> None:
    """Time the subjects on all ranks, which begin each step together, and have rank 0 answer; the end of this process.

    ``steps_per_call``: steps that a call makes.
    """
    import torch.distributed as dist

    from hpclm.node import hardware

    synchronize = hardware.synchronizer(device)

    def wait() -> None:
        synchronize()
        dist.barrier()

    times = timed(steps, args, wait, show=rank == 0)
    if rank == 0:
        answer.send(
            (words, {name: [seconds / steps_per_call for seconds in durations] for name, durations in times.items()})
        )
    answer.close()
    sys.stdout.flush()
    os._exit(0)


def head(args: argparse.Namespace, words: str) -> None:
    """What was measured."""
    print(
        f"\n{words}\n{args.shape}: {json.dumps(SHAPES[args.shape])}, {args.batch} samples of {args.context} tokens in"
    )
    print(f"micro-batches of {args.micro}; {args.rounds} rounds\n")


def rate(args: argparse.Namespace, times: list[float]) -> str:
    """Tokens a second."""
    return f"{args.batch * args.context / statistics.median(times):,.0f}"


def ratio(times: dict[str, list[float]], of: str, name: str) -> str:
    """Median over rounds of one subject's time against another's in the same round, with its range."""
    if of not in times or name not in times:
        return "-"
    pairs = [a / b for a, b in zip(times[of], times[name], strict=True)]
    return f"{statistics.median(pairs):.3f} ({min(pairs):.2f}-{max(pairs):.2f})"


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("engines", "layouts", "agreement"))
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--context", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step")
    parser.add_argument("--micro", type=int, default=4, help="sequences in a micro-batch")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process on a CPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2, help="steps of each subject that are not counted")
    parser.add_argument("--only", nargs="*", help="engines: only subjects whose name contains one of these words")
    parser.add_argument("--ranks", type=int, default=16, help="agreement: processes")
    parser.add_argument("--steps", type=int, default=4, help="agreement: steps of a subject in a round")
    args = parser.parse_args()
    {"engines": engines, "layouts": layouts, "agreement": agreement}[args.what](args)


if __name__ == "__main__":
    main()
