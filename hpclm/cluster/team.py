"""The processes of a run as one value: what rank 0 does for all, what all agree on, and how they end together."""

import gc
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpclm import errors
from hpclm.cluster import bootstrap, children, guardian, interfaces, secrets
from hpclm.cluster.bootstrap import World
from hpclm.cluster.cause import LONGEST, lost_a_peer
from hpclm.cluster.ending import GuestLine, HostLine
from hpclm.cluster.line import Line
from hpclm.cluster.rendezvous import Store, meet
from hpclm.cluster.rollcall import Host, Present
from hpclm.cluster.watchdog import Watch
from hpclm.config import ClusterConfig
from hpclm.errors import REQUEUE, ConfigError, HpclmError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
T = TypeVar("T")


class Team:
    """This process among its peers. With one process everything here costs nothing, and there is no process group."""

    def __init__(
        self,
        world: World,
        hosts: tuple[str, ...],
        line: Line | None = None,
        store: "Store | None" = None,
        watch: Watch | None = None,
    ):
        self.launcher, self.rank, self.size = world.launcher, world.rank, world.size
        self.local_rank, self.local_size, self.hosts = world.local_rank, world.local_size, hosts
        self._line, self._store = line, store
        self.watch = watch or Watch(ClusterConfig(hang_minutes=0, slow=0), Present.of(world))
        self._patient: Any = None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather(None)

    def gather(self, value: Any, patient: bool = False) -> list[Any]:
        """Every rank's ``value`` (what JSON can say), in the order of ranks, on every rank.

        ``patient``: what comes before may take a rank hours longer than another, as writing may.
        """
        self.watch.beat()
        if self.size == 1:
            return [value]
        import torch
        import torch.distributed as dist

        group = self._patient if patient else None
        own = json.dumps(value).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(own)]), group=group)
        width = int(max(sizes))
        texts = [torch.zeros(width, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, torch.frombuffer(bytearray(own.ljust(width)), dtype=torch.uint8), group=group)
        return [json.loads(bytes(text[: int(size)].numpy())) for text, size in zip(texts, sizes, strict=True)]

    def highest(self, value: float) -> float:
        """The greatest of the ranks' values, on every rank."""
        return self.highest_each(value)[0]

    def highest_each(self, *values: float) -> list[float]:
        """The greatest of the ranks' first values, of their second ones, …, on every rank."""
        self.watch.beat()
        if self.size == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        held = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(held, dist.ReduceOp.MAX)
        return held.tolist()

    def first(self, act: Callable[[], T]) -> T:
        """``act()`` on rank 0 alone; its result (what JSON can say), or its HpclmError, on every rank."""
        self.watch.beat()
        if self.size == 1:
            return act()
        import torch
        import torch.distributed as dist

        said, failed = b"", None
        result: Any = None
        if self.leads:
            try:
                result = act()
                said = json.dumps({"result": result}).encode()
            except HpclmError as error:
                failed = error
                problems = error.problems if isinstance(error, ConfigError) else str(error)
                said = json.dumps({"error": type(error).__name__, "what": problems}).encode()
        length = torch.tensor([len(said)])
        dist.broadcast(length, 0, group=self._patient)  # rank 0 may write, or read, for hours
        text = torch.frombuffer(bytearray(said.ljust(int(length))), dtype=torch.uint8)
        dist.broadcast(text, 0, group=self._patient)
        if not self.leads:
            heard = json.loads(bytes(text.numpy()))
            if "error" in heard:
                failed = getattr(errors, heard["error"], HpclmError)(heard["what"])
            result = heard.get("result")
        if failed:
            failed.shared = True
            raise failed
        return result

    def connect(self, device: "torch.device", minutes: float) -> None:
        """Bring the process group up: gloo between CPUs, with NCCL beside it between GPUs.

        A collective that takes longer than ``minutes`` raises.
        """
        if self._store is None:
            return
        import torch.distributed as dist

        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        limit = timedelta(minutes=minutes)
        store = self._store(self.rank, self.size, limit)
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=limit,
        )  # without device_id NCCL waits for its first use: what is wrong with it is for the preflight check to name
        self._patient = dist.new_group(backend="gloo", timeout=timedelta(days=7))

    @contextmanager
    def guard(self, shared: Path | None = None) -> Iterator[None]:
        """While the block runs, this rank's failure ends all of them, and the first cause is told.

        ``shared``: the file of rank 0's log, which another rank writes the cause to when rank 0 is gone; each rank's own
        log gets it too. An error that every rank raises alike ends each on its own.
        """
        if self._line is None:
            yield
            return

        def tell(text: str, speaker: bool) -> None:
            if speaker or shared:
                log.error(text)
            if speaker and shared and not self.leads:
                told = text.encode(errors="backslashreplace")
                with shared.open("ab+") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - 2 * LONGEST))
                    if told not in file.read():
                        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} E ".encode() + told + b"\n")

        self._line.tell = tell
        try:
            yield
        except BaseException as error:
            if getattr(error, "shared", False):
                raise
            caused = lost_a_peer(error)
            if isinstance(error, HpclmError):
                text = str(error)
            elif isinstance(error, KeyboardInterrupt):
                text = "interrupted"
            elif isinstance(error, SystemExit):
                text = f"it called sys.exit({error.code!r})\n{traceback.format_exc()}"
            else:
                text = traceback.format_exc()
            children.kill()
            self._line.die(secrets.Redactor()(text), exit_code(error), caused)
            late = threading.Timer(
                15.0, os._exit, args=(exit_code(error),)
            )  # a collective that hangs would hold us back
            late.daemon = True
            late.start()
            error.shared = True  # type: ignore[attr-defined]  # told: an outer guard only passes it on
            raise

    def leave(self) -> None:
        """Part from the others once all are here."""
        self.watch.at("leaving")
        import torch.distributed as dist

        gc.collect()  # what still holds the process group would abort at exit
        if dist.is_initialized():
            dist.barrier()
        if self._line:
            self._line.leave()
        if dist.is_initialized():
            dist.destroy_process_group()


def alone(settings: ClusterConfig | None = None) -> Team:
    """The team of a process without peers; with ``settings`` its watchdog can be set to work."""
    world = World("single", 0, 1)
    me = Present.of(world)
    return Team(world, (me.host,), watch=Watch(settings, me) if settings else None)


def exit_code(error: BaseException) -> int:
    """The code a process ends with that raises ``error``."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code or 1  # others still count on this process
    return error.exit_code if isinstance(error, HpclmError) else 1


@contextmanager
def join(world: World, settings: ClusterConfig) -> Iterator[Team]:
    """Hold the roll call, and give the team; at the end of the block all part.

    ConfigError when the processes contradict each other, HpclmError when some do not come. Of an error that all ranks
    raise alike, only rank 0 speaks.
    """
    children.adopt()
    pipe = guardian.post() if world.launcher != "single" else None
    if world.size == 1:
        team = alone(settings)
        with team.watch:
            yield team
        return
    met = meet(world, settings)
    me = met.end.everyone[world.rank]
    line: Line = HostLine(me, met.end) if isinstance(met.end, Host) else GuestLine(me, met.end)
    if bootstrap.job():
        line.lost = REQUEUE  # Slurm can start it again, and may not have seen that a node is gone
    interfaces.choose(settings.interface, met.interface)
    if pipe is not None:
        guardian.tell(pipe, *(os.fstat(each.fileno()).st_ino for each in line.sockets))
    job = "" if world.launcher == "local" else str(bootstrap.job().get("job_id", ""))
    watch = Watch(settings, me, line, job)
    team = Team(world, tuple(present.host for present in met.end.everyone), line, met.store, watch)
    try:
        with team.guard(), watch:
            yield team
            sys.stdout.flush()
            team.leave()
            if pipe is not None:
                guardian.tell(pipe)
    except HpclmError as error:
        line.leave()
        if pipe is not None:
            guardian.tell(pipe)
        if not team.leads:
            raise SystemExit(error.exit_code) from None
        raise
