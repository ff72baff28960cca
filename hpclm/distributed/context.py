"""The processes of a run as one object: collectives, calls on rank 0 alone, and a joint exit."""

import gc
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpclm.base import errors
from hpclm.base.errors import ConfigError, ExitCode, HpclmError
from hpclm.config import ClusterConfig
from hpclm.distributed import bootstrap, network
from hpclm.distributed.bootstrap import World
from hpclm.distributed.ending import RankEnding
from hpclm.distributed.ranks import RankInfo
from hpclm.distributed.rendezvous import connect
from hpclm.distributed.stragglers import EVERY, Stragglers
from hpclm.distributed.watchdog import Watchdog
from hpclm.node import ends, preemption, processes
from hpclm.node.job import OwnJob

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore

log = logging.getLogger(__name__)
T = TypeVar("T")
DISCONNECT = 60.0  # seconds for ranks that have done their work to disconnect from one another
UNLIMITED = timedelta(days=7)  # time limit if one rank may arrive hours after another


def waits_in(name: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorator of a method that waits for other ranks: the watchdog does not blame a waiting rank for a hang."""

    def decorator(method: Callable[..., T]) -> Callable[..., T]:
        @wraps(method)
        def noted(self: "DistributedContext", *args: Any, **kwargs: Any) -> T:
            self.watchdog.waits_in = name
            try:
                return method(self, *args, **kwargs)
            finally:
                self.watchdog.waits_in = ""

        return noted

    return decorator


class DistributedContext:
    """This rank and its peers. A single process needs no process group, and every method returns at once."""

    def __init__(
        self,
        world: World,
        ranks: tuple[RankInfo, ...],
        watchdog: Watchdog,
        store: "TCPStore | None" = None,
        job: OwnJob | None = None,
    ):
        self.world = world
        self.rank = world.rank
        self.size = world.size
        self.ranks = ranks
        self.watchdog = watchdog
        self.ending = watchdog.ending
        self.job = job or OwnJob()
        self.hosts = tuple({info.node: info.host for info in ranks}.values())
        """The host name of every node, in the order of ranks; several nodes may have the same name."""
        me = ranks[world.rank]
        # compare process tables, because several containers or cloned machines may have the same host name
        self.first_on_node = next(info.rank for info in ranks if info.process_table == me.process_table)
        """The lowest rank of this rank's node."""
        self.exit_code: int = ExitCode.DONE
        """Exit code of this process once its work is done."""
        self.failure: BaseException | None = None
        """An error of this rank alone, not shared by all ranks."""
        self._store = store
        self._stragglers: Stragglers | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_gather(None)

    def all_gather(self, value: Any, unlimited: bool = False) -> list[Any]:
        """Every rank's ``value`` (JSON), in rank order, on every rank. ``unlimited``: without a time limit."""
        return self._gather(value, unlimited, everywhere=True)

    def gather(self, value: Any, unlimited: bool = False) -> list[Any]:
        """Every rank's ``value`` (JSON), in rank order, on rank 0; an empty list on the others."""
        return self._gather(value, unlimited, everywhere=False)

    def _gather(self, value: Any, unlimited: bool, everywhere: bool) -> list[Any]:
        self.watchdog.tick()
        if self.size == 1:
            return [value]
        import torch

        encoded = json.dumps(value).encode()
        # gloo gathers tensors of one size, so the lengths come first
        sizes = self._exchange(torch.tensor([len(encoded)]), unlimited)
        width = int(max(sizes))
        texts = self._exchange(_text_tensor(encoded, width), unlimited, everywhere)
        return [json.loads(bytes(text[: int(size)].numpy())) for text, size in zip(texts, sizes, strict=False)]

    @waits_in("all_gather")
    def _exchange(self, tensor: "torch.Tensor", unlimited: bool, everywhere: bool = True) -> "list[torch.Tensor]":
        """Every rank's tensor, on every rank; unless ``everywhere``, only on rank 0, and an empty list on the others."""
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

        group: Any = dist.group.WORLD
        gather = group.gather
        options: Any = dist.GatherOptions()
        if everywhere:
            gather = group.allgather
            options = AllgatherOptions()
        if unlimited:  # for this operation: a second group with a longer limit would connect all ranks once more
            options.timeout = UNLIMITED
        parts: list[torch.Tensor] = []
        if everywhere or self.is_main:
            parts = [tensor.new_zeros(tensor.shape) for _ in range(self.size)]
        gather([parts] if parts else [], [tensor], options).wait()
        return parts

    @waits_in("all_reduce")
    def all_reduce_max(self, *values: float) -> list[float]:
        """The maximum of each value over all ranks, on every rank."""
        self.watchdog.tick()
        if self.size == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        # float64 holds steps, bytes and times exactly
        vector = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(vector, dist.ReduceOp.MAX)
        return vector.tolist()

    def run_on_main(self, act: Callable[[], T]) -> T:
        """Call ``act`` on rank 0 only. Every rank returns the result (JSON), or raises the HpclmError of ``act``."""
        self.watchdog.tick()
        if self.size == 1:
            return act()
        import torch

        message = b""
        failed: HpclmError | None = None
        result: Any = None
        if self.is_main:
            try:
                result = act()
                message = json.dumps({"result": result}).encode()
            except HpclmError as error:
                failed = error
                problems = error.problems if isinstance(error, ConfigError) else str(error)
                message = json.dumps({"error": type(error).__name__, "problems": problems}).encode()
        length = int(self._broadcast(torch.tensor([len(message)])))
        text = self._broadcast(_text_tensor(message, length))
        if not self.is_main:
            received = json.loads(bytes(text.numpy()))
            if "error" in received:
                failed = getattr(errors, received["error"], HpclmError)(received["problems"])
            result = received.get("result")
        if failed:
            failed.shared = True  # every rank raises it, so exit_on_error() need not tell the others
            raise failed
        return result

    def keep_on_main(self, act: Callable[[], T]) -> T | None:
        """Call ``act`` on rank 0 only. Rank 0 returns the result, of any type; the others return None. If ``act`` raises an
        HpclmError, every rank raises it."""
        results: list[T] = []
        self.run_on_main(lambda: results.append(act()))
        return results[0] if results else None

    @waits_in("run_on_main")
    def _broadcast(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Rank 0's tensor, on every rank."""
        import torch.distributed as dist

        group: Any = dist.group.WORLD
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = UNLIMITED  # rank 0 may read or write for hours
        group.broadcast([tensor], options).wait()
        return tensor

    def init_process_group(self, device: "torch.device", minutes: float, logs: Path | None = None) -> None:
        """Set up PyTorch's process group: gloo between CPUs and, on GPUs, also NCCL with its flight recorder.

        A run on GPUs has no other gloo group, because gloo connects all members with each other at once. A collective that takes longer
        than ``minutes`` raises, unless it is called unlimited; PyTorch then writes the recorder's content to ``logs``.
        """
        if self._store is None:
            return
        self.watchdog.timer.on_gpu = device.type == "cuda"
        if device.type == "cuda" and logs is not None:
            network.record_collectives(logs)
        import torch.distributed as dist

        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        limit = timedelta(minutes=minutes)
        self._store.set_timeout(limit)  # new groups wait for their members in the store, up to its limit
        # without device_id: PyTorch would then create new groups by ncclCommSplit, which needs all ranks and would hang, because only a
        # group's members create it (see GroupOptions, which connects each group before the first step)
        dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.size, timeout=limit)

    def write_to(self, out: Path, record: Callable[..., object], stages: int = 1) -> None:
        """Use the run directory ``out``, which is now open. ``record``: adds an event to its record. ``stages``: pipeline stages."""
        self.ending.write_to(out, record)
        if self.ending.folder:
            self.watchdog.write_to(self.ending.folder)
        if self.is_main and self.size > 1:
            self._stragglers = Stragglers(self.ranks, record, stages)

    def compare_work(self, step: int) -> None:
        """Every few steps, compare the work of all ranks; rank 0 logs the slow ones. All ranks call it before each step."""
        timer = self.watchdog.timer
        if self.size > 1 and timer.steps and timer.steps % EVERY == 0:
            rows = self.gather([timer.work, timer.seconds])
            if self._stragglers:
                self._stragglers.update(rows, step)

    @contextmanager
    def exit_on_error(self) -> Iterator[None]:
        """If this rank fails in the block, leave the cause for the others and report it once.

        If a connection was lost, the cause is raised instead. An error that all ranks raise (``HpclmError.shared``) is passed on.
        """
        try:
            yield
        except BaseException as error:
            if self._store is None or error is self.failure or getattr(error, "shared", False):
                raise
            self.failure = self.ending.explained(error)
            if self.failure is error:
                raise
            raise self.failure from None

    def finish(self) -> None:
        """Disconnect from the other ranks, once all have arrived. The work is done, so if this fails or takes too long, the exit code stays."""
        self.watchdog.leave()
        import torch.distributed as dist

        gc.collect()  # objects that still hold the process group would abort at exit
        late = threading.Timer(DISCONNECT, self._leave_the_others)
        late.daemon = True
        late.start()
        try:
            if dist.is_initialized():
                dist.barrier()  # the first to disconnect would break connections that others still use
                dist.destroy_process_group()
        except RuntimeError as error:  # another rank is gone
            log.warning(
                "%s had finished its work, but could not disconnect: %s",
                self.ranks[self.rank],
                str(error).partition("\n")[0],
            )
        late.cancel()
        if self.is_main and self.ending.folder:
            ends.tidy(self.ending.folder)

    def _leave_the_others(self) -> None:
        """Exit although the main thread waits for another rank, which may take forever."""
        waited = f"could not disconnect from the other ranks within {DISCONNECT:.0f} s"
        text = f"{self.ranks[self.rank]} had finished its work, but {waited}; it ends with exit code {self.exit_code}"
        self.ending.done(text, self.exit_code)


def single(
    settings: ClusterConfig | None = None, job: OwnJob | None = None, world: World | None = None
) -> DistributedContext:
    """The context of a process without peers. ``settings``: settings of its watchdog. ``job``: the job of this process."""
    world = world or World("single", 0, 1)
    ranks = (RankInfo.of(world),)
    watchdog = Watchdog(settings or ClusterConfig(hang_minutes=0), RankEnding(ranks[0], ranks))
    return DistributedContext(world, ranks, watchdog, job=job)


@contextmanager
def join(world: World, settings: ClusterConfig, job: OwnJob | None = None) -> Iterator[DistributedContext]:
    """Connect to the other ranks of ``world``, all in ``job``, and disconnect at the end of the block.

    ConfigError if the ranks contradict each other, HpclmError if some do not arrive. Only rank 0 prints an error that all ranks raise.
    """
    job = job or OwnJob()
    if world.launcher != "single":
        processes.adopt_orphans()  # so that they end with this rank
    if world.size == 1:
        context = single(settings, job, world)
        context.watchdog.start()
        try:
            yield context
        finally:
            context.watchdog.stop()
        return
    met = connect(world, settings)
    preemption.ranks_have_met()
    ending = RankEnding(met.ranks[world.rank], met.ranks, bootstrap.lost_code(world.launcher, job))
    context = DistributedContext(world, met.ranks, Watchdog(settings, ending), met.store, job)
    context.watchdog.start()
    try:
        with context.exit_on_error():
            network.use_interface(settings.interface, met.interface)  # an interface may be missing on this node alone
            yield context
            sys.stdout.flush()
            context.finish()
    except HpclmError as error:
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # after the first rank's exit the launcher ends the others
        context.watchdog.leave()
        ends.note(error.exit_code, str(error))
        if not context.is_main and error is not context.failure:
            raise SystemExit(error.exit_code) from None
        raise
    finally:
        context.watchdog.stop()


def _text_tensor(text: bytes, width: int) -> "torch.Tensor":
    """[width] bytes: ``text`` padded with spaces."""
    import torch

    return torch.frombuffer(bytearray(text.ljust(width)), dtype=torch.uint8)
