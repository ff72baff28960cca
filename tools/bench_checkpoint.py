"""Saving and loading a state beside other libraries and the machine's own limits, interleaved in one run.

    python tools/bench_checkpoint.py                       # 504 tensors of fp32, 530 MB
    python tools/bench_checkpoint.py --megabytes 2000 --folder /lustre/me
    python tools/bench_checkpoint.py --training --rounds 15   # steps of a small model while the state is written

Durable: the time until all bytes are on the disk (fsync). Stall: the time a step waits before training may continue. Ratios are
medians over the rounds, each within one round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # loaded where they are used, so that --help answers at once
    from torch import Tensor

    from hpclm.engine import Shard

Named = dict[str, "Tensor"]
Measured = dict[str, float]  # seconds: stall, durable, load


class EngineState:
    """An engine as the store sees it: all tensors on this process."""

    def __init__(self, tensors: Named):
        self.tensors_ = tensors

    def tensors(self) -> Iterator[Shard]:
        """All of it, on this process."""
        from hpclm.engine import Shard

        return iter([Shard.whole(name, tensor) for name, tensor in self.tensors_.items()])

    def scalars(self) -> dict[str, Any]:
        """What else an engine has."""
        return {"optimizer_steps": 1, "loss_scale": None}

    def load(self, saved: Any, scalars: dict[str, Any]) -> None:
        """Copy every tensor into the one that is there, as engines do."""
        for name, tensor in self.tensors_.items():
            tensor.copy_(saved.block(name, (0,) * tensor.ndim, tuple(tensor.shape)))


def state(megabytes: int, count: int) -> Named:
    """Tensors of fp32, of the shapes a transformer has."""
    import torch

    draw = torch.Generator().manual_seed(0)
    size = megabytes * 1_000_000 // (4 * count)
    return {f"model.{n}": torch.rand(size // 512, 512, generator=draw) for n in range(count)}


def timed(act: Callable[[], Any]) -> float:
    """Seconds that ``act`` takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def sync(folder: Path) -> None:
    """Have all files of ``folder`` on the disk."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


class Subjects:
    """Each is asked for what it took in one round, in an empty folder."""

    def __init__(self, tensors: Named):
        import torch

        from hpclm.checkpoint.staging import ShardSnapshot

        self.tensors = tensors
        self.bytes = sum(4 * tensor.numel() for tensor in tensors.values())
        self.other = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        self._snapshot = ShardSnapshot()
        self._staging: Any = None
        for tensor in self.other.values():
            tensor.fill_(1.0)

    def hpclm(self, folder: Path) -> Measured:
        """Saved before training continues; loaded with every hash held against the files."""
        store = self._store(folder)
        engine, progress = EngineState(self.tensors), self._progress(1)
        took = timed(lambda: store.save(engine, progress))
        loaded = EngineState(self.other)
        load = timed(lambda: store.resume(loaded, "require"))
        name = next(iter(self.tensors))
        assert bool((self.other[name] == self.tensors[name]).all())
        return {"stall": took, "durable": took, "load": load}

    def hpclm_beside(self, folder: Path) -> Measured:
        """Saved beside the training: the copy, then written in a thread."""
        store = self._store(folder)
        store._snapshot = self._snapshot  # a run's second save, and every one after it
        engine, progress = EngineState(self.tensors), self._progress(1)
        began = time.perf_counter()
        store.begin(engine, progress)
        stall = time.perf_counter() - began
        store.commit()
        return {"stall": stall, "durable": time.perf_counter() - began}

    def torch_save(self, folder: Path) -> Measured:
        """torch.save, and torch.load with weights_only."""
        import torch

        path = folder / "x.pt"
        stall = timed(lambda: torch.save(self.tensors, path))
        fsync = timed(lambda: sync(folder))
        load = timed(lambda: self._copy(torch.load(path, weights_only=True)))
        return {"stall": stall, "durable": stall + fsync, "load": load}

    def safetensors(self, folder: Path) -> Measured:
        """safetensors.torch.save_file and load_file."""
        from safetensors.torch import load_file, save_file

        path = folder / "x.safetensors"
        stall = timed(lambda: save_file(self.tensors, path))
        fsync = timed(lambda: sync(folder))
        load = timed(lambda: self._copy(load_file(path)))
        return {"stall": stall, "durable": stall + fsync, "load": load}

    def dcp(self, folder: Path) -> Measured:
        """torch.distributed.checkpoint."""
        from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
        from torch.distributed.checkpoint.state_dict_saver import save

        stall = timed(lambda: save(self.tensors, checkpoint_id=folder / "x", no_dist=True))
        fsync = timed(lambda: sync(folder))
        load = timed(lambda: dcp_load(self.other, checkpoint_id=folder / "x", no_dist=True))
        return {"stall": stall, "durable": stall + fsync, "load": load}

    def dcp_async(self, folder: Path) -> Measured:
        """Its async_save, staging buffers made anew."""
        return self._async(folder, None)

    def dcp_reused(self, folder: Path) -> Measured:
        """Its async_save with a stager that keeps its buffers."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if self._staging is None:
            self._staging = DefaultStager(StagingOptions(False, False, False, False))
        return self._async(folder, self._staging)

    def deepspeed(self, folder: Path) -> Measured:
        """DeepSpeed's checkpoint engine, which its save_checkpoint writes with."""
        from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

        engine: Any = TorchCheckpointEngine()
        path = str(folder / "x.pt")
        stall = timed(lambda: engine.save(self.tensors, path))
        fsync = timed(lambda: sync(folder))
        load = timed(lambda: self._copy(engine.load(path)))
        return {"stall": stall, "durable": stall + fsync, "load": load}

    def limits(self, folder: Path) -> Measured:
        """The same bytes: copied, written and synced, read into tensors that are there; and each with their hash."""
        import xxhash

        from hpclm.checkpoint.format import HASH_BLOCK_BYTES, memory

        copy = timed(lambda: self._copy(self.tensors))
        views = [memory(tensor) for tensor in self.tensors.values()]

        def write() -> None:
            handle = os.open(folder / "x", os.O_WRONLY | os.O_CREAT, 0o600)
            for view in views:
                for begin in range(0, len(view), HASH_BLOCK_BYTES):
                    block = view[begin : begin + HASH_BLOCK_BYTES]
                    while len(block):
                        block = block[os.write(handle, block) :]
            os.fsync(handle)
            os.close(handle)

        def hashed() -> None:
            for view in views:
                xxhash.xxh3_64_digest(view)

        def read() -> None:
            handle, begin = os.open(folder / "x", os.O_RDONLY), 0
            for tensor in self.other.values():
                target = memory(tensor)
                while len(target):
                    count = os.preadv(handle, [target], begin)
                    begin, target = begin + count, target[count:]
            os.close(handle)

        durable, hashing, load = timed(write), timed(hashed), timed(read)
        return {"stall": copy, "durable": durable, "load": load, "hash": hashing}

    def _async(self, folder: Path, staging: Any) -> Measured:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            future: Any = async_save(self.tensors, checkpoint_id=folder / "x", async_stager=staging, no_dist=True)
            stall = time.perf_counter() - began
            future.result()
        sync(folder)
        return {"stall": stall, "durable": time.perf_counter() - began}

    def _copy(self, tensors: Named) -> None:
        for name, tensor in self.other.items():
            tensor.copy_(tensors[name])

    def _store(self, folder: Path) -> Any:
        from hpclm.checkpoint import CheckpointStore, Retention

        return CheckpointStore(folder / "checkpoints", Retention(), {})

    def _progress(self, step: int) -> Any:
        from hpclm.checkpoint import Progress

        return Progress(step)


def core_waits() -> float:
    """Seconds for which this thread has been ready and had no core: other programs on the machine are to blame, not the writer."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def training(args: argparse.Namespace) -> int:
    """Time steps of a small model while nothing else happens, and while a thread writes a checkpoint."""
    import shutil

    import torch

    from hpclm import config
    from hpclm import engine as engines
    from hpclm.checkpoint import CheckpointStore, Progress, Retention, staging
    from hpclm.parallel.mesh import Compute
    from hpclm.parallel.micro_batch import MicroBatch

    torch.set_num_threads(1)
    shape = [
        "model.layers=4",
        "model.hidden=256",
        "model.attention.heads=4",
        "model.vocab_size=1024",
        "model.context=256",
    ]
    rest = ["batch.global_size=4", "batch.micro_size=4", "data.source=synthetic", "budget.steps=1"]
    run = config.load(None, [*shape, *rest, "engine.precision=fp32", "engine.device=cpu"])
    engine = engines.build(run.for_engine(), Compute(torch.device("cpu"), torch.float32))
    tokens = torch.randint(1024, (4, 257), generator=torch.Generator().manual_seed(0))
    batch = MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    saved = EngineState(state(args.megabytes, args.tensors))
    snapshot = staging.ShardSnapshot()

    def steps(until: Callable[[int], bool]) -> list[float]:
        taken: list[float] = []
        while not until(len(taken)):
            waited = core_waits()
            seconds = timed(lambda: float(engine.train_step([batch], 1e-4, 0).loss))
            taken.append(seconds - (core_waits() - waited))
        return taken[:-1] if len(taken) > 1 else taken  # the last one may have outlived the writing

    def beside_save(folder: Path) -> list[float]:
        store = CheckpointStore(folder / "checkpoints", Retention(), {})
        store._snapshot = snapshot
        store.begin(saved, Progress(1))
        times = steps(lambda _: store.written())
        store.commit()
        return times

    steps(lambda done: done == 5)
    ratios: list[float] = []
    for number in range(args.rounds + 1):
        before = steps(lambda done: done == 9)
        folder = Path(tempfile.mkdtemp(dir=args.folder))
        os.sync()
        during = beside_save(folder)
        shutil.rmtree(folder)
        after = steps(lambda done: done == 9)
        if number:
            ratios.append(statistics.median(before + after) / statistics.median(during))
    low, *_, high = statistics.quantiles(ratios, n=4)
    print(
        f"{args.megabytes} MB written beside steps of {statistics.median(before):.3f} s, {args.rounds} rounds: training keeps"
    )
    print(f"{statistics.median(ratios):.3f} ({low:.3f}-{high:.3f}) of its speed")
    return 0


NAMES = {
    "limits": "limits: copy / write + fsync / read",
    "hpclm": "hpclm",
    "hpclm_beside": "hpclm, beside the training",
    "torch_save": "torch.save + fsync",
    "safetensors": "safetensors + fsync",
    "dcp": "DCP + fsync",
    "dcp_async": "DCP async + fsync",
    "dcp_reused": "DCP async, staging reused + fsync",
    "deepspeed": "DeepSpeed's checkpoint engine + fsync",
}


def main() -> int:
    """Read the arguments, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=530)
    parser.add_argument("--tensors", type=int, default=504)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="on the disk to measure (default: the system's for temporary files)")
    parser.add_argument("--only", nargs="*", choices=NAMES)
    parser.add_argument("--training", action="store_true", help="time training beside the writing instead")
    args = parser.parse_args()
    if args.training and args.rounds < 2:
        parser.error("--training needs --rounds 2 or more, for quartiles")
    if args.training:
        return training(args)
    import torch
    from tqdm import tqdm

    from hpclm.node.hardware import keep_freed_memory

    keep_freed_memory()  # for all of them, as hpclm train does on a CPU
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process needs none
    subjects = Subjects(state(args.megabytes, args.tensors))
    names = ["limits", *(name for name in NAMES if name != "limits" and (not args.only or name in args.only))]
    results: dict[str, list[Measured]] = {name: [] for name in names}
    for number in tqdm(range(args.rounds + 1), desc="rounds", disable=None):
        for name in names:
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                os.sync()
                measured = getattr(subjects, name)(Path(folder))
            if number:  # the first makes buffers and loads libraries
                results[name].append(measured)
    print(
        f"{subjects.bytes / 1e6:,.0f} MB in {args.tensors} tensors, {args.rounds} rounds, torch {torch.__version__}\n"
    )
    show(results)
    return 0


def show(results: dict[str, list[Measured]]) -> None:
    """Print medians, and ratios to the limits of the same round: hashing counted where hpclm's files are hashed."""
    limits = results["limits"]
    hashing = statistics.median(row["hash"] for row in limits)
    print(f"hashing alone (xxh3): {hashing:.3f} s\n")
    print("| | stall s | of a copy | durable s | of write + fsync + hash | load s | of read + hash |")
    print("|---|---|---|---|---|---|---|")
    for name, rows in results.items():
        cells = [NAMES[name]]
        for key, extra in (("stall", 0.0), ("durable", 1.0), ("load", 1.0)):
            if key not in rows[0]:
                cells += ["-", "-"]
                continue
            pairs = [row[key] / (limit[key] + extra * limit["hash"]) for row, limit in zip(rows, limits, strict=True)]
            cells.append(f"{statistics.median(row[key] for row in rows):.3f}")
            cells.append(f"{statistics.median(pairs):.2f} ({min(pairs):.2f}-{max(pairs):.2f})")
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    sys.exit(main())
