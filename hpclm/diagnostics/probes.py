"""Probes of the preflight check. Every node must see the run directory and be able to write to it. The network is probed by an
all-reduce over all processes and by messages from each node to the next."""

import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hpclm.base import files
from hpclm.node import processes

PATIENCE = 5.0  # seconds within which a shared file system must show one node what another wrote
LARGE = 1 << 22  # bytes of a timed message
OPENING = 60.0  # seconds for all processes to connect
MESSAGE = 15.0  # seconds for one message


def mark(out: Path) -> str:
    """Write a file in the run directory ``out`` that the other nodes must see; returns the token that is its name and content."""
    token = secrets.token_hex(8)
    with suppress(OSError):  # probe_disk reports on every node that it cannot write
        files.write_text(marker(out, token), token)
    return token


def unmark(out: Path, token: str) -> None:
    """Remove the file that mark() wrote."""
    with suppress(OSError):
        marker(out, token).unlink()


def probe_disk(out: Path, token: str) -> dict[str, object]:
    """Free bytes of the run directory on this node, and whether it has rank 0's ``token``; or the error of writing there."""
    marked = marker(out, token)
    probe_file = marked.with_name(f"{marked.name}-{secrets.token_hex(4)}")

    def has_arrived() -> bool:
        with suppress(OSError):
            return files.read_text(marked, errors="replace") == token
        return False

    try:
        files.write_text(probe_file, token)
        probe_file.unlink()
        free = shutil.disk_usage(out).free
    except OSError as error:
        return {"error": f"{error.strerror} (errno {error.errno})"}
    return {"free": free, "same": processes.wait_until(has_arrived, PATIENCE, pause=0.1)}


def marker(out: Path, token: str) -> Path:
    """The file that rank 0 writes."""
    return out / f".preflight-{token}"


def all_reduce(size: int, device: torch.device) -> None:
    """An all-reduce over all ``size`` processes; RuntimeError if it does not complete, or the sum is wrong."""
    values = torch.ones(1 << 18, device=device)
    _wait([dist.all_reduce(values, async_op=True)], device, OPENING)
    if not bool((values == size).all()):
        raise RuntimeError("the sum is wrong: data are corrupted in transit")


def receive(before: int, after: int, device: torch.device) -> float:
    """GB/s of a message from rank ``before``, while this rank sends one to rank ``after``; RuntimeError if one is lost.

    All ranks of the ring call this at the same time; a short message first synchronises them.
    """
    took = 0.0
    for size in (4, LARGE):
        sent = torch.full((size // 4,), float(dist.get_rank()), device=device)
        received = torch.empty_like(sent)
        began = time.perf_counter()
        operations = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
        _wait(dist.batch_isend_irecv(operations), device, MESSAGE)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = time.perf_counter() - began
        if not bool((received == before).all()):
            raise RuntimeError("a message arrives changed")
    return LARGE / took / 1e9


def _wait(works: Sequence[dist.Work], device: torch.device, patience: float) -> None:
    """Wait until all ``works`` are complete; RuntimeError after ``patience`` seconds."""
    until = time.monotonic() + patience
    for work in works:
        if device.type == "cpu":
            work.wait(timedelta(seconds=max(0.1, until - time.monotonic())))
            continue
        while not work.is_completed():  # wait() of NCCL has no timeout
            if time.monotonic() > until:
                raise RuntimeError(f"no answer within {patience:.0f} s")
            time.sleep(0.0001)
        work.wait()  # raises the error of a failed message
