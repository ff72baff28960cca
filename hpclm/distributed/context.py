"""The processes of a run as one object: collectives, work on rank 0, and a common end."""

import gc
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpclm import errors
from hpclm.config import ClusterConfig
from hpclm.distributed import bootstrap, failure, network
from hpclm.distributed.bootstrap import World
from hpclm.distributed.failure import Failure
from hpclm.distributed.rendezvous import RankInfo, connect
from hpclm.distributed.shutdown import Shutdown, exit_after
from hpclm.distributed.store import JsonStore
from hpclm.distributed.watchdog import Watchdog
from hpclm.errors import ConfigError, ExitCode, HpclmError
from hpclm.node import ends, parent, preemption, processes, secrets
from hpclm.node.job import Job

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
T = TypeVar("T")
CAUSE = 60.0  # seconds that a rank which lost a connection waits for its watchdog to end it with the cause
DISCONNECT = 60.0  # seconds that ranks which have done their work have to disconnect from one another
LATEST = 15.0  # seconds that the main thread has to exit after an error: a collective may hang
EXIT = 0.5  # seconds that rank 0, whose end closes the store, stays after an error that all ranks raise
UNLIMITED = timedelta(days=7)  # for a collective in which one rank may arrive hours after another


def waits_in(name: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """For a method that waits for other ranks: tells the watchdog so, which takes ranks that wait for no culprits of a hang."""

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
    """This rank among its peers. With one process there is no process group, and everything here is free."""

    def __init__(
        self,
        world: World,
        ranks: tuple[RankInfo, ...],
        watchdog: Watchdog,
        store: JsonStore | None = None,
        job: Job | None = None,
    ):
        self.launcher, self.rank, self.size = world.launcher, world.rank, world.size
        self.local_rank, self.local_size = world.local_rank, world.local_size
        self.began = world.began
        """When this rank began, in seconds since 1970."""
        self.ranks, self.watchdog, self.job = ranks, watchdog, job or Job()
        self.hosts = tuple({info.node: info.host for info in ranks}.values())
        """The host name of every node, in the order of ranks; several nodes may have the same one."""
        me = ranks[world.rank]
        # by the process table, not the host's name: containers and cloned machines may share one
        self.first_on_node = next(info.rank for info in ranks if info.process_table == me.process_table)
        """The lowest rank of this rank's node."""
        self._store = store
        self.exit_code: int = ExitCode.DONE
        """Of this process, once its work is done."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_gather(None)

    def all_gather(self, value: Any, unlimited: bool = False) -> list[Any]:
        """Every rank's ``value`` (JSON), in rank order, on every rank.

        ``unlimited``: without a time limit, since one rank may arrive hours after another.
        """
        return self._gather(value, unlimited, everywhere=True)

    def gather(self, value: Any, unlimited: bool = False) -> list[Any]:
        """Every rank's ``value`` (JSON), in rank order, on rank 0; an empty list on the others, which receive nothing."""
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
        """Every rank's tensor, on every rank or, unless ``everywhere``, on rank 0; on the others an empty list."""
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

        group: Any = dist.group.WORLD
        # the limit is the operation's: a second group with a longer one would connect all ranks with each other again
        options: Any = AllgatherOptions() if everywhere else dist.GatherOptions()
        if unlimited:
            options.timeout = UNLIMITED
        parts = [tensor.new_zeros(tensor.shape) for _ in range(self.size)] if everywhere or self.is_main else []
        (group.allgather if everywhere else group.gather)([parts] if parts else [], [tensor], options).wait()
        return parts

    @waits_in("all_reduce")
    def all_reduce_max(self, *values: float) -> list[float]:
        """The maximum over all ranks of the first values, of the second ones, …, on every rank."""
        self.watchdog.tick()
        if self.size == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        # float64, so that steps, bytes and times come back as they were
        vector = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(vector, dist.ReduceOp.MAX)
        return vector.tolist()

    def run_on_main(self, act: Callable[[], T]) -> T:
        """``act()`` on rank 0 only; its result (JSON), or its HpclmError, on every rank."""
        self.watchdog.tick()
        if self.size == 1:
            return act()
        import torch

        message, failed = b"", None
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
            # all ranks raise it, so that exit_on_error() need not tell anybody
            failed.shared = True
            raise failed
        return result

    @waits_in("run_on_main")
    def _broadcast(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Rank 0's tensor, on every rank."""
        import torch.distributed as dist

        options, group = dist.BroadcastOptions(), dist.group.WORLD
        options.rootRank, options.timeout = 0, UNLIMITED  # rank 0 may write, or read, for hours
        group.broadcast([tensor], options).wait()  # type: ignore[union-attr]
        return tensor

    def init_process_group(self, device: "torch.device", minutes: float, logs: Path | None = None) -> None:
        """Set up PyTorch's process group: gloo between CPUs, and NCCL beside it, with its flight recorder, between
        GPUs. It is the only gloo group of a run on GPUs: gloo connects all its members with each other at once.

        A collective that takes longer than ``minutes`` raises, except those that are called unlimited here; PyTorch then
        writes the recorder's content to ``logs``.
        """
        if self._store is None:
            return
        self.watchdog.timer.on_gpu = device.type == "cuda"
        if device.type == "cuda" and logs is not None:
            network.record_collectives(logs)
        import torch.distributed as dist

        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        limit = timedelta(minutes=minutes)
        # new groups wait for their members in the store, by the store's limit
        self._store.raw.set_timeout(limit)
        # without device_id: a new group would be split off by ncclCommSplit, in which all ranks must take part, and hang,
        # because only its members make it (GroupOptions, which connects each group before the first step)
        dist.init_process_group(backend, store=self._store.raw, rank=self.rank, world_size=self.size, timeout=limit)

    @contextmanager
    def exit_on_error(self, run_log: Path | None = None) -> Iterator[None]:
        """During the block, a failure of this rank ends all ranks, and the first failure is logged.

        ``run_log``: the file of rank 0's log, to which another rank writes the failure if rank 0 cannot. An error that
        all ranks raise (``HpclmError.shared``) needs none of this.
        """
        if self._store is None or self.watchdog.heartbeat is None:
            yield
            return
        self.watchdog.shutdown.log = run_log or self.watchdog.shutdown.log
        try:
            yield
        except BaseException as error:
            if getattr(error, "shared", False):
                raise
            self._fail(error)
            error.shared = True  # type: ignore[attr-defined]  # an outer one only passes it on
            raise

    def finish(self) -> None:
        """Disconnect from the other ranks once all are here. The work is done: where that fails or takes too long, this process ends
        as it would have."""
        self.watchdog.enter("leaving")
        import torch.distributed as dist

        gc.collect()  # what still holds the process group would abort at exit
        self.watchdog.leave()
        late = threading.Timer(DISCONNECT, self._leave_the_others)
        late.daemon = True
        late.start()
        try:
            if dist.is_initialized():
                # the first to disconnect would break connections that others still use
                dist.barrier()
                dist.destroy_process_group()
        except RuntimeError as error:  # another rank is gone
            log.warning("%s had done its work: %s", self.ranks[self.rank], str(error).partition("\n")[0])
        late.cancel()
        self.watchdog.stop()

    def _leave_the_others(self) -> None:
        """End this process, whose main thread waits for another rank and may do so forever."""
        if not self.watchdog.shutdown.claim():
            return
        exit_after(LATEST, self.exit_code)  # a disk may be why
        log.warning(
            "%s had done its work, and could not disconnect from the other ranks within %.0f s; it ends with exit code %d",
            self.ranks[self.rank],
            DISCONNECT,
            self.exit_code,
        )
        ends.note(self.exit_code)
        self.watchdog.shutdown.clean_up()
        with suppress(OSError, ValueError):  # the launcher, which read them, may be gone
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(self.exit_code)

    def _fail(self, error: BaseException) -> None:
        """Publish ``error`` to the other ranks; returns when this process may exit.

        If it only says that a connection was lost, the watchdog ends this process once the cause is known.
        """
        heart, shutdown = self.watchdog.heartbeat, self.watchdog.shutdown
        assert heart is not None
        code, text = described(error)
        # redacted, because a traceback may show a token, and every rank and the log get this text
        observed = Failure(self.rank, "raised", code, failure.shortened(secrets.Redactor()(text)))
        if failure.lost_a_peer(error) and self.watchdog.watches:
            if heart.failure is None:
                log.warning(
                    "%s lost its connection to another rank: %s", self.ranks[self.rank], str(error).partition("\n")[0]
                )
            # only a symptom: the rank that was killed or failed is the cause, and replaces it
            observed = replace(observed, kind="disconnected", code=heart.lost_code)
            with suppress(RuntimeError):
                failure.publish(heart.store, observed)
            time.sleep(CAUSE)
        if heart.failure or heart.lost or not shutdown.claim():
            time.sleep(CAUSE)
        try:
            first = failure.publish(heart.store, observed)
        except RuntimeError:
            first = observed
        # of the first failure, which may be another rank's: what follows from it would mislead
        text = first.describe(self.ranks)
        ends.note(code, text)
        shutdown.log_failure(text, heart.store)
        error.logged = self.is_main  # type: ignore[attr-defined]  # the command line need not say it again
        shutdown.wait_for_others(heart.store)
        shutdown.clean_up()
        exit_after(LATEST, code)


def single(settings: ClusterConfig | None = None, job: Job | None = None) -> DistributedContext:
    """The context of a process without peers; ``settings``: for its watchdog, ``job``: that it is part of."""
    world = World("single", 0, 1)
    me = RankInfo.of(world)
    watchdog = Watchdog(settings or ClusterConfig(hang_minutes=0), (me,), me, Shutdown(me, (me,)))
    return DistributedContext(world, (me,), watchdog, job=job)


@contextmanager
def join(world: World, settings: ClusterConfig, job: Job | None = None) -> Iterator[DistributedContext]:
    """Connect to the other ranks of ``world``, in the job ``job``, and disconnect at the end of the block.

    ConfigError if the ranks contradict each other, HpclmError if some do not arrive. An error that all ranks raise is
    printed by rank 0 only.
    """
    # a run survives the death of the process by which srun started it: Slurm, or the end of the run, ends the job
    launcher = None if world.launcher in ("single", bootstrap.SRUN) else parent.launcher()
    job = job or Job()
    if world.launcher != "single":
        processes.adopt_orphans()  # so that orphans of its children end with this rank
    if world.size == 1:
        context = single(settings, job)
        context.launcher, context.began = world.launcher, world.began
        context.watchdog.start(launcher=launcher)
        try:
            yield context
        finally:
            context.watchdog.stop()
        return
    met = connect(world, settings)
    preemption.ranks_have_met()
    me = met.ranks[world.rank]
    shutdown = Shutdown(me, met.ranks, bootstrap.marker(world))
    watchdog = Watchdog(settings, met.ranks, me, shutdown, bootstrap.lost_code(world.launcher, job.identity), job)
    watchdog.start(met.store, launcher)
    context = DistributedContext(world, met.ranks, watchdog, met.store, job)
    try:
        with context.exit_on_error():
            # inside exit_on_error(): an interface that one node lacks ends all ranks with its message
            network.use_interface(settings.interface, met.interface)
            yield context
            sys.stdout.flush()
            context.finish()
    except HpclmError as error:
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first rank to end has its launcher end the others
        watchdog.leave()
        if not context.is_main:
            raise SystemExit(error.exit_code) from None
        time.sleep(EXIT)
        raise


def _text_tensor(text: bytes, width: int) -> "torch.Tensor":
    """[width] bytes of ``text``, filled up with spaces."""
    import torch

    return torch.frombuffer(bytearray(text.ljust(width)), dtype=torch.uint8)


def described(error: BaseException) -> tuple[int, str]:
    """The exit code of a process that raises ``error``, and the message; a traceback unless it is the user's or the machine's."""
    if isinstance(error, HpclmError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, "interrupted"
    if isinstance(error, SystemExit):  # the others still need this process
        code = error.code if isinstance(error.code, int) and error.code in errors.FAILURES else ExitCode.FAILED
        return code, f"it called sys.exit({error.code!r})\n{traceback.format_exc()}"
    return ExitCode.FAILED, traceback.format_exc()
