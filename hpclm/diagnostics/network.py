"""Speed of the network between the processes of a run: short all-reduces, over all of them and between pairs of nodes."""

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

LARGE = 1 << 23
SIZES = (1 << 18, 1 << 20, LARGE, LARGE, LARGE)  # bytes; the first opens the connection
SECONDS = 0.25  # after an all-reduce that takes longer, the measurement stops
OPENING = 60.0  # seconds that all processes may take to connect
PATIENCE = 15.0  # seconds that one message may take


def total(device: torch.device) -> float:
    """GB/s of an all-reduce over all processes: its bytes by its seconds; RuntimeError if it does not complete."""
    best = 0.0
    for size, patience in ((1 << 20, OPENING), (1 << 20, PATIENCE), (LARGE, PATIENCE)):
        values = torch.ones(size // 4, device=device)
        began = time.perf_counter()
        _wait([dist.all_reduce(values, async_op=True)], device, patience)
        took = torch.tensor([time.perf_counter() - began], device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        best = max(best, size / float(took) / 1e9)
        if patience == PATIENCE and float(took) > SECONDS:
            break
    return best


def measure(mine: int, partner: int, device: torch.device) -> float:
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
    _wait(works, sent.device, PATIENCE)


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
