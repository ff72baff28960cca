"""What the preflight check tries out: the run directory, which every node must see and be able to write to, and the network,
by short all-reduces over all processes and between pairs of nodes."""

import json
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hpclm import files
from hpclm.node import processes

PATIENCE = 5.0  # seconds that a shared file system may take to show one node what another wrote
LARGE = 1 << 23
SIZES = (1 << 18, 1 << 20, LARGE, LARGE, LARGE)  # bytes; the first opens the connection
SECONDS = 0.25  # after an all-reduce that takes longer, the measurement stops
OPENING = 60.0  # seconds that all processes may take to connect
MESSAGE = 15.0  # seconds that one message may take


def seen(out: Path, name: str, content: str, patience: float = PATIENCE) -> bool:
    """Whether the file that another process wrote is visible here."""

    def arrived() -> bool:
        with suppress(OSError):
            return files.read_text(out / name, errors="replace") == content
        return False

    return processes.wait_until(arrived, patience, pause=0.1)


def look(out: Path, token: str, node: int) -> dict[str, object]:
    """What node number ``node`` finds in the run directory, where rank 0 has written ``token``."""
    began = time.monotonic()
    try:
        files.write_text(out / marker(token, node), json.dumps(node))
        free = shutil.disk_usage(out).free
    except OSError as error:
        return {"error": f"{error.strerror} (errno {error.errno})"}
    return {"free": free, "same": seen(out, marker(token), token), "seconds": round(time.monotonic() - began, 3)}


def marker(token: str, node: int | None = None) -> str:
    """Name of the file that rank 0 writes, or node number ``node``."""
    return f".preflight-{token}" + ("" if node is None else f"-{node}")


def unmark(out: Path, token: str, nodes: Iterable[int]) -> None:
    """Remove the files of one check, as far as they are visible here."""
    for name in (marker(token), *(marker(token, node) for node in nodes)):
        with suppress(OSError):
            (out / name).unlink()


def all_ranks(device: torch.device) -> float:
    """GB/s of an all-reduce over all processes: its bytes by its seconds; RuntimeError if it does not complete."""
    best = 0.0
    for size, patience in ((1 << 20, OPENING), (1 << 20, MESSAGE), (LARGE, MESSAGE)):
        values = torch.ones(size // 4, device=device)
        began = time.perf_counter()
        _wait([dist.all_reduce(values, async_op=True)], device, patience)
        took = torch.tensor([time.perf_counter() - began], device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        best = max(best, size / float(took) / 1e9)
        if patience == MESSAGE and float(took) > SECONDS:
            break
    return best


def pair(mine: int, partner: int, device: torch.device) -> float:
    """GB/s of an all-reduce between this rank and ``partner``, which calls this at the same time; the best of several.

    RuntimeError if a message does not arrive, or arrives corrupted.
    """
    best = 0.0
    for attempt, size in enumerate(SIZES):
        values = torch.full((size // 4,), float(mine + 1), device=device)
        took = _all_reduce(values, mine, partner, device)
        if not bool((values == mine + partner + 2).all()):
            raise RuntimeError("the sum of an all-reduce is wrong: data are corrupted on the way")
        if attempt == 0:
            continue
        best = max(best, size / took / 1e9)
        seconds = torch.tensor([took], device=device)
        others = torch.empty_like(seconds)
        _exchange(seconds, others, partner)  # so that both stop after the same size
        if max(float(seconds), float(others)) > SECONDS:
            break
    return best


def _all_reduce(values: torch.Tensor, mine: int, partner: int, device: torch.device) -> float:
    """Sum this rank's and the partner's ``values``, each rank one half; returns the seconds it took."""
    lower, upper = values.chunk(2)
    own, others = (lower, upper) if mine < partner else (upper, lower)
    came = torch.empty_like(own)
    began = time.perf_counter()
    _exchange(others, came, partner)
    own += came
    _exchange(own, others, partner)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _exchange(sent: torch.Tensor, received: torch.Tensor, partner: int) -> None:
    """Send one tensor to the partner and receive another; RuntimeError if that takes too long."""
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)])
    _wait(works, sent.device, MESSAGE)


def _wait(works: Sequence[dist.Work], device: torch.device, patience: float) -> None:
    """Wait until all are complete; RuntimeError after ``patience`` seconds."""
    until = time.monotonic() + patience
    for work in works:
        if device.type == "cpu":
            work.wait(timedelta(seconds=max(0.1, until - time.monotonic())))
            continue
        while not work.is_completed():  # wait() of NCCL has no timeout
            if time.monotonic() > until:
                raise RuntimeError(f"no answer within {patience:.0f} s")
            time.sleep(0.0001)
        work.wait()  # raises the error of a failed one
