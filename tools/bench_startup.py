"""What starting costs as the ranks become more: the rendezvous, process groups, and whole ranks.

``meet``: N clients of the real rendezvous, threads of a few processes, and one store. ``groups``: N members of a gloo group of
all, connected at once and on demand. ``ranks``: N ranks of ``hpclm train`` from their imports to their first step. ``files``: what
each of N ranks on this machine reads when it resumes a run, as strace sees it.

    python tools/bench_startup.py meet --clients 16 64 256 1024
    python tools/bench_startup.py groups --clients 16 64
    python tools/bench_startup.py ranks --clients 1 64
    python tools/bench_startup.py files --clients 1 2 4 8
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import re
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

OPERATIONS = ("set", "get", "add", "check", "wait", "compare_set", "multi_get", "multi_set")
MiB = 1 << 20


def counted(store: type, counts: Counter[str]) -> type:
    """A store class that counts the operations of all its stores, and the bytes that they read."""

    def method(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            answer = getattr(store, name)(self, *args)
            with lock:
                counts[name] += 1
                if name in ("get", "multi_get"):
                    counts["bytes"] += sum(map(len, answer if name == "multi_get" else [answer]))
            return answer

        return call

    def connect(self: Any, *args: Any, **kwargs: Any) -> None:
        with lock:  # PyTorch mixes up the addresses of two that connect at once
            store.__init__(self, *args, **kwargs)  # type: ignore[misc]

    lock = threading.Lock()
    return type("Counted", (store,), {"__init__": connect, **{name: method(name) for name in OPERATIONS}})


def proportional_memory(pid: int) -> int:
    """Bytes of a process, shared pages divided by the processes that share them."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    match = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def in_threads(work: Callable[[int], Any], members: Sequence[int]) -> dict[int, Any]:
    """``work(member)`` of all members at the same time; the first exception, if there is one."""
    done: dict[int, Any] = {}
    wrong: list[BaseException] = []

    def one(member: int) -> None:
        try:
            done[member] = work(member)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=one, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]
    return done


def meet(clients: int, processes: int) -> dict[str, Any]:
    """N clients find the store of rank 0, register, and learn who the others are."""
    import torch.distributed as dist

    from hpclm.config import ClusterConfig
    from hpclm.distributed import rendezvous
    from hpclm.distributed.bootstrap import World

    context = multiprocessing.get_context("fork")  # after the imports, whose memory all processes share
    answers, together, over = context.Queue(), context.Barrier(processes + 1), context.Event()
    host, run = socket.gethostname(), secrets.token_hex(8)

    def some(first: int) -> None:
        counts: Counter[str] = Counter()
        dist.TCPStore = counted(dist.TCPStore, counts)  # type: ignore[assignment,misc]
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        members = range(first, clients, processes)
        gc.disable()  # one process holds what hundreds of ranks know
        together.wait()
        worlds = {rank: World("Slurm", rank, clients, rank, clients, run, (host,) * clients) for rank in members}
        met = in_threads(lambda rank: rendezvous.connect(worlds[rank], ClusterConfig()), members)
        assert {len(client.ranks) for client in met.values()} == {clients}
        answers.put((counts, time.process_time()))
        over.wait()
        os._exit(0)

    workers = [context.Process(target=some, args=(first,)) for first in range(processes)]
    for worker in workers:
        worker.start()
    together.wait()
    began = time.perf_counter()
    results = [answers.get(timeout=600) for _ in workers]
    seconds = time.perf_counter() - began
    memory = sum(proportional_memory(worker.pid) for worker in workers if worker.pid)
    over.set()
    for worker in workers:
        worker.join()
    counts, cpu = sum((count for count, _ in results), Counter[str]()), sum(used for _, used in results)
    received = counts.pop("bytes")
    per_client = {name: round(number / clients, 1) for name, number in counts.most_common()}
    return {
        "clients": clients,
        "seconds": round(seconds, 2),
        "CPU seconds": round(cpu, 2),
        "MiB": memory // MiB,
        "KiB read by a client": received // clients // 1024,
        "operations of a client": round(sum(per_client.values()), 1),
        **per_client,
    }


def groups(clients: int, lazy: bool) -> dict[str, Any]:
    """N members, threads of one process, make a gloo group of all, and broadcast and gather once."""
    import torch
    import torch.distributed as dist

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    shared, stores = dist.HashStore(), dict[int, dist.Store]()  # of which a group keeps no reference of Python's
    counts: Counter[str] = Counter()

    class Counted(dist.Store):
        """Counts what gloo asks for."""

        def set(self, key: str, value: Any) -> None:
            counts["set"] += 1
            shared.set(key, value)

        def get(self, key: str) -> bytes:
            counts["get"] += 1
            value: bytes = shared.get(key)
            counts["bytes"] += len(value)
            return value

        def wait(self, keys: list[str], *limit: timedelta) -> None:
            counts["wait"] += 1
            shared.wait(keys, *limit)

    def member(rank: int) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=lazy)]
        options._timeout, options._threads = timedelta(minutes=5), 2
        stores[rank] = Counted()
        return dist.ProcessGroupGloo(stores[rank], rank, clients, options)

    def use(rank: int) -> None:
        mine, everyone = torch.ones(1), [torch.zeros(1) for _ in range(clients)]
        process_groups[rank].broadcast(mine, 0).wait()
        process_groups[rank].allgather([everyone], [mine]).wait()

    def opened() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before, began = opened(), time.perf_counter()
    process_groups = in_threads(member, range(clients))
    ready = time.perf_counter() - began
    in_threads(use, range(clients))
    seconds, files = time.perf_counter() - began, opened() - before
    received = counts.pop("bytes", 0)
    return {
        "clients": clients,
        "connected": "on demand" if lazy else "at once",
        "seconds until made": round(ready, 3),
        "until used": round(seconds, 3),
        "operations of a client": round(sum(counts.values()) / clients, 1),
        "KiB read by a client": round(received / clients / 1024, 1),
        "descriptors of a client": round(files / clients, 1),
    }


def environments(clients: int) -> list[dict[str, str]]:
    """The environment of each of N ranks on this machine, as torchrun sets it."""
    launch: dict[str, Any] = {
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        "WORLD_SIZE": clients,
        "LOCAL_WORLD_SIZE": clients,
    }
    with socket.create_server(("127.0.0.1", 0)) as free:
        launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1], "OMP_NUM_THREADS": 1}
    per_rank = ({**launch, "RANK": rank, "LOCAL_RANK": rank} for rank in range(clients))
    return [os.environ | {name: str(value) for name, value in one.items()} for one in per_rank]


def settings(clients: int, out: Path, steps: int) -> list[str]:
    """What N ranks of the debug model are started with."""
    words = ["configs/debug.yaml", f"budget.steps={steps}", "evaluate.every=0", f"batch.global_size={max(16, clients)}"]
    return [*words, "engine.device=cpu", f"out={out}", "log.tensorboard=false"]


def ranks(clients: int, out: Path) -> dict[str, Any]:
    """Seconds until N ranks of the debug model on this machine have done their first step."""
    from hpclm.node import python

    words = settings(clients, out, steps=1)
    before, began = os.times(), time.perf_counter()
    with ExitStack() as opened:
        started = [
            opened.enter_context(
                subprocess.Popen(
                    python.command("hpclm.train", *words),
                    env=env,
                    stdout=subprocess.DEVNULL,
                )
            )
            for env in environments(clients)
        ]
        peak, first, looked = 0, None, began
        while any(process.poll() is None for process in started):
            now = time.perf_counter()
            if first is None and (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size:
                first = now - began
            if now - looked > clients / 32:  # asking for 64 processes' memory takes part of a second
                with suppress(OSError, ProcessLookupError):
                    peak = max(
                        peak, sum(proportional_memory(process.pid) for process in started if process.poll() is None)
                    )
                looked = now
            time.sleep(0.05)
        first = first or time.perf_counter() - began  # ended since the last look
    codes = {process.returncode for process in started}
    if codes != {0}:
        raise SystemExit(f"ranks ended with {codes}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return dict(clients=clients, seconds=round(first, 1), cpu=round(cpu / clients, 2), MiB=peak // MiB)


def dataset(folder: Path) -> list[str]:
    """A dataset of 600,000 documents and 59 MB, whose index is cached, and its tokenizer, as settings."""
    import numpy as np

    from hpclm.preprocess.writer import Writer

    draw = np.random.default_rng(1)
    (folder / "dict.txt").write_text("".join(f"word{number} 1\n" for number in range(996)))
    with Writer(folder / "text", "u2") as writer:
        for _ in range(60):
            sizes = draw.integers(20, 80, 10_000)
            writer.extend(draw.integers(0, 1000, sizes.sum()), sizes, np.ones(10_000, int))
    data = f"data={{source: indexed, prefix: {folder}/text, tokenizer: fairseq, tokenizer_files: [{folder}/dict.txt]}}"
    return [data, "model={vocab_size: 1000, context: 32}"]


def rank(words: list[str], below: str, report: str) -> None:
    """Be one rank of ``hpclm train`` that keeps its memory maps, and at its end reports the pages it has used of them."""
    import mmap

    kept = []

    class Kept(mmap.mmap):
        def __init__(self, *_: Any, **__: Any) -> None:
            kept.append(self)

        def __exit__(self, *_: object) -> None:
            pass

        def madvise(self, *_: int) -> None:
            pass

    def end(code: int) -> None:
        maps = re.findall(r"^\w+-\w+ .* (/.*)\n(?:.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.M)
        Path(report).write_text(str(sum(1024 * int(used) for path, used in maps if path.startswith(below))))
        leave(code)

    leave, os._exit = os._exit, end  # type: ignore[assignment]
    mmap.mmap = Kept  # type: ignore[misc]
    from hpclm import cli

    os._exit(cli.function("train")(words))


def read_files(clients: int, folder: Path) -> list[dict[str, Any]]:
    """What each of N ranks that resume a run reads of the data and of the manifest: all but weights and code."""
    data, shown = dataset(folder), []
    for steps in (1, 2):
        trace = ["strace", "-f", "--seccomp-bpf", "-qq", "-y", "-e", "trace=openat,read,pread64,readv", "-o"]
        words = [*settings(clients, folder / "run", steps=2), f"stop_at={steps}", *data]
        words += [f"batch.global_size={clients}", "data.workers=0"]  # one sample each is read for training
        started = [
            subprocess.Popen(
                [*trace, f"{folder}/calls-{number}", sys.executable, __file__, "rank", *words]
                + ["--below", str(folder), "--report", f"{folder}/mapped-{number}"],
                env=env,
                stdout=subprocess.DEVNULL,
            )
            for number, env in enumerate(environments(clients))
        ]
        if any([process.wait() for process in started]):
            raise SystemExit("a rank failed")
    path = re.escape(str(folder)) + r"/(?:text|dict\.txt|run/checkpoints/step-0*1/MANIFEST)[^>]*"
    for number in range(clients):
        calls = (folder / f"calls-{number}").read_text(errors="replace")
        opened = re.findall(rf"openat\(.* = \d+<({path})>", calls)
        read = re.findall(rf"(?:read|pread64|readv)\(\d+<{path}>.* = (\d+)$", calls, re.M)
        shown.append(
            {
                "ranks": clients,
                "rank": number,
                "files": len({path for path in opened if Path(path).is_file()}),
                "opened": len(opened),
                "KB read": sum(map(int, read)) // 1000,
                "MB of mapped pages": round(int((folder / f"mapped-{number}").read_text()) / 1e6, 1),
            }
        )
    return shown


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["meet", "groups", "ranks", "files", "rank"])
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--below", help=argparse.SUPPRESS)
    parser.add_argument("--report", help=argparse.SUPPRESS)
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--processes", type=int, default=4, help="processes whose threads are the clients of meet")
    args = parser.parse_args()
    if args.what == "rank":
        rank(args.words, args.below, args.report)
    os.environ.setdefault(
        "RES_OPTIONS", "timeout:1 attempts:1"
    )  # PyTorch asks the DNS for the name behind every connection
    for number in args.clients:
        if args.what == "meet":
            print(json.dumps(meet(number, args.processes)), flush=True)
        elif args.what == "groups":
            for lazy in (False, True):
                print(json.dumps(groups(number, lazy)), flush=True)
        elif args.what == "files":
            with tempfile.TemporaryDirectory() as folder:
                for row in read_files(number, Path(folder)):
                    print(json.dumps(row), flush=True)
        else:
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps(ranks(number, Path(folder) / "run")), flush=True)
    os._exit(0)  # gloo's threads may outlive what they use


if __name__ == "__main__":
    main()
