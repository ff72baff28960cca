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
from typing import TYPE_CHECKING, Any

import bench_peers
from bench_peers import Step

if TYPE_CHECKING:  # loaded where they are used, so that --help answers at once
    import torch

    from hpclm.config import RunConfig
    from hpclm.model.stack import Stack

SHAPES: dict[str, dict[str, Any]] = {
    "small": dict(layers=4, hidden=256, heads=4, vocab_size=1024),
    "124m": dict(layers=12, hidden=768, heads=12, vocab_size=50257),
    "1.3b": dict(layers=24, hidden=2048, heads=16, vocab_size=50257),
}

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

    from hpclm.data.batches import Batch

    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(run.model.vocab_size, (args.batch, args.context + 1), generator=draw)
    mine = rows.view(-1, replicas, args.micro, args.context + 1)[:, replica].to(device)
    return [Batch(each[:, :-1].contiguous(), each[:, 1:].contiguous(), None, None, None) for each in mine]


def engine_step(args: argparse.Namespace, words: list[str], size: int, rank: int, device: Any, dtype: Any) -> Step:
    """A step of an engine, as the loop calls it."""
    from hpclm import engine as engines
    from hpclm.parallel.mesh import Mesh

    run = settings(args, words)
    mesh = Mesh.build(rank, size, run.parallel)
    engine = engines.build(run, mesh, device, dtype)
    batches = micro_batches(args, run, mesh.dp.size, mesh.dp.rank, device)

    def step() -> None:
        engine.train_step(batches, 1e-4, 0)

    return step


def model_of(run: RunConfig, dtype: Any, place: Any) -> Stack:
    """The model, for those who train it by hand."""
    from hpclm.model import gpt
    from hpclm.model.loss import TokenLoss
    from hpclm.model.stack import Stack

    specs = gpt.layers(run.model, run.engine, dtype, run.seed)
    return Stack(run.model, specs, dtype, loss=TokenLoss(), wrap=place)


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
        for tokens, labels, *_ in batches:
            loss = model(tokens, labels=labels, weights=weights)
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
        model = model_of(run, dtype, lambda _, layer: layer.to(device)).train()
        parameters = list(model.parameters())
        return loop(model, batches, parameters, lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0))
    if kind == "fsdp2 by hand":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype)
        model = model_of(run, dtype, lambda _, layer: layer.to(device)).train()
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

    model = model_of(run, dtype, lambda _, layer: layer.to(device)).train()
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
        for tokens, labels, *_ in batches:
            loss = engine(tokens, labels=labels, weights=weights)
            engine.backward(loss)
            engine.step()
            total = total + loss.detach()
        float(total)

    return step


BY_HAND = {
    "bare PyTorch": "native",
    "deepspeed ZeRO 1 by hand": "deepspeed, ZeRO 1",
    "deepspeed ZeRO 3 by hand": "deepspeed, ZeRO 3",
    "fsdp2 by hand": "fsdp2, stage 3",
}
"""Libraries by hand, and the engine that each is beside."""


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
    hardware.set_matmul(EngineConfig(), device)
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
        name: partial(engine_step, args, its, 1, 0, device, dtype) for name, its in ENGINES.items()
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
        print(f"| {name} | {statistics.median(times[name]):.4f} | {ratio(times, name, ALONE)} |")


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
    for name, its in LAYOUTS.items():
        if its is not None:
            steps[name] = engine_step(args, its, size, rank, device, dtype)
        else:
            steps[name] = engine_step(args, [], 1, 0, device, dtype) if rank == 0 else (lambda: None)
    say(args, rank, steps, device, words, answer)


ALONE = "no agreement"


def one_of_many(args: argparse.Namespace, rank: int, size: int, store: str, answer: Any) -> None:
    """One of the processes of ``agreement``; each subject makes ``--steps`` steps in a round, so that one waits for another."""
    import torch
    import torch.distributed as dist

    from hpclm import engine as engines
    from hpclm.parallel.mesh import Mesh
    from hpclm.parallel.step_vector import Reduction, StepVector

    device, dtype, words = prepare(args, rank, size, store)
    run = settings(args, [f"batch.global_size={args.micro * size}"])
    mesh = Mesh.build(rank, size, run.parallel)
    engine, vector = engines.build(run, mesh, device, dtype), StepVector(mesh.world, device)
    shape = argparse.Namespace(**vars(args) | {"batch": args.micro * size})
    batches = micro_batches(shape, run, size, rank, device)
    known = [float(number) for number in range(12)]

    def without() -> None:
        for _ in range(args.steps):
            engine.train_step(batches, 1e-4, 0)

    def late() -> None:
        before: Reduction | None = None
        for _ in range(args.steps):
            result = engine.train_step(batches, 1e-4, 0)
            queued = vector.start([*known, *result.values()])
            if before is not None:
                before.read()
            before = queued

    def at_once() -> None:
        for _ in range(args.steps):
            result = engine.train_step(batches, 1e-4, 0)
            float(result.loss)
            for count in (1, len(known)):
                dist.all_reduce(torch.zeros(count, dtype=torch.float64), dist.ReduceOp.MAX)

    say(args, rank, {ALONE: without, "one vector, read a step late": late, "two reductions between CPUs": at_once},
        device, words, answer, args.steps)  # fmt: skip


def say(
    args: argparse.Namespace, rank: int, steps: dict[str, Step], device: Any, words: str, answer: Any, each: int = 1
) -> None:
    """Time the subjects on all ranks, which begin each step together, and have rank 0 answer; the end of this process.

    ``each``: steps that a call makes.
    """
    import torch.distributed as dist

    from hpclm.node import hardware

    synchronize = hardware.synchronizer(device)

    def wait() -> None:
        synchronize()
        dist.barrier()

    times = timed(steps, args, wait, show=rank == 0)
    if rank == 0:
        answer.send((words, {name: [seconds / each for seconds in found] for name, found in times.items()}))
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
