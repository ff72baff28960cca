"""torchrun's elastic agent: it starts the ranks of one node, watches them, restarts them and ends them.

In a job of several nodes, the template starts one on each node (``hpclm.launch.elastic TORCHRUN-ARGUMENTS``),
and they connect as torchrun's agents do; ``one_machine`` runs a single one. Differences from torchrun: the exit code is
that of the rank that failed, signals are forwarded to the ranks so that they can save, and a rank that exits on purpose
is not restarted.
"""

from hpclm.node import preemption

if __name__ == "__main__":  # before the other imports, which take a while
    preemption.catch_from_the_start("train")

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError, Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler

from hpclm import errors, files
from hpclm.distributed import bootstrap, failure, restart
from hpclm.distributed.failure import Failure
from hpclm.distributed.restart import RESTARTED
from hpclm.distributed.signed import SignedStore
from hpclm.launch import foreground, restarts
from hpclm.node import affinity, processes, python

FINAL = {errors.REQUEUE, 64, 66, 75, 93}
"""Exit codes of a rank that exits on purpose: restarting it here would not help."""
EXIT_GRACE = 30.0  # seconds for the other ranks to exit if one has exited on purpose
FAILED_GRACE = 4.0  # and if it has failed
GRACE = 2  # seconds between SIGTERM and SIGKILL for ranks that are still running after that
INTERRUPTED = 1  # the same after a second Ctrl-C
MONITOR = 0.1  # seconds between checks of the ranks


class RankOutput(LogsSpecs):
    """Local rank 0 prints to ``first`` (empty: as the agent), the others to files in ``folder``."""

    def __init__(self, folder: Path, first: tuple[str, str] = ("", "")):
        """``first``: paths of the standard output and error of local rank 0."""
        super().__init__(str(folder), redirects=Std.NONE, tee=Std.NONE)
        self.folder, self.first = folder, first

    @property
    def root_log_dir(self) -> str:
        """Where the files are."""
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Where each local rank of ``envs`` prints."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        out, err, error_files = {}, {}, {}
        for local_rank, env in envs.items():
            path = self.folder / f"rank-{int(env['RANK']):05d}"
            out[local_rank], err[local_rank] = (f"{path}.out", f"{path}.err") if local_rank else self.first
            error_files[local_rank] = env["TORCHELASTIC_ERROR_FILE"] = f"{path}.json"
        nothing = dict.fromkeys(envs, "")
        return LogsDest(out, err, nothing, nothing, error_files)

    def last_lines(self, rank: int, lines: int = 20) -> str:
        """The last lines that a rank other than local rank 0 printed to standard error."""
        with suppress(OSError):
            text = files.read_text(self.folder / f"rank-{rank:05d}.err", errors="replace")
            return "\n".join(text.splitlines()[-lines:])
        return ""


@dataclass(frozen=True)
class FailedRank:
    """A rank that has failed."""

    rank: int
    pid: int
    code: int
    """Exit code, or minus the signal that killed it."""


class Agent(LocalElasticAgent):
    """The agent of one node."""

    failed: tuple[FailedRank, ...] = ()
    """The ranks that failed first."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.received: list[int] = []
        """Signals that were forwarded to the ranks."""
        self._last = restarts.AgentInfo(0)  # what this agent reports about the last round
        self._before: Store | None = None  # its store
        # PyTorch would restart the ranks without counting it if another agent waits; here it counts as a failure
        handler = self._worker_group.spec.rdzv_handler
        self._waiting, self._looked = handler.num_nodes_waiting, 0.0
        handler.num_nodes_waiting = lambda: 0  # type: ignore[method-assign]

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        restarts.publish_again(worker_group.spec.rdzv_handler)
        super()._rendezvous(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        codes = {local_rank: handler.proc.poll() for local_rank, handler in handlers.items()}
        if any(codes.values()) and not self.failed:
            ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
            ended = [FailedRank(ranks[each], handlers[each].proc.pid, code) for each, code in codes.items() if code]
            self.failed = tuple(sorted(ended, key=lambda rank: rank.code >= 0))  # the killed ones are the cause
            self._tell_ranks(worker_group)
            self._end_others([handler.proc for handler in handlers.values()])
            if self._remaining_restarts:
                self._note_failure(worker_group)
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY and self._others_restart():
            self._end_others([handler.proc for handler in handlers.values()])
            self._note_failure(worker_group)
            return RunResult(state=WorkerState.FAILED)
        if any(rank.code in FINAL or -rank.code in self.received for rank in self.failed):
            self._remaining_restarts = 0
        return result

    def _others_restart(self) -> bool:
        """Whether another agent has left this round and waits for the next; checked once a second."""
        if not self._remaining_restarts or time.monotonic() - self._looked < 1.0:
            return False
        self._looked = time.monotonic()
        return self._waiting() > 0

    def _ranks_store(self, group: WorkerGroup) -> SignedStore | None:
        run_id = f"{group.spec.rdzv_handler.get_run_id()}.{os.environ['HPCLM_RENDEZVOUS']}"
        return restarts.ranks_store(group, run_id)

    def _tell_ranks(self, group: WorkerGroup) -> None:
        """Publish which rank was killed by a signal: ranks of other nodes see only a closed connection."""
        killed = next((each for each in self.failed if each.code < 0 and -each.code != signal.SIGTERM), None)
        if killed and (store := self._ranks_store(group)):
            launcher = "local" if os.environ.get("HPCLM_LAUNCHER") == "local" else "torchrun"
            code = bootstrap.lost_code(launcher, self._remaining_restarts > 0)
            with suppress(RuntimeError):
                size = group.workers[0].world_size
                killed_by = f"was {processes.killed_by(-killed.code)}"
                failure.publish(store, Failure(killed.rank, "killed", code, killed_by), size)

    def _note_failure(self, group: WorkerGroup) -> None:
        """Record why this round ended, for the next one."""
        assert group.store is not None
        if why := restarts.first_failure(self._ranks_store(group)):
            group.store.compare_set(restarts.REASON_KEY, "", why[: restarts.REASON])

    def _end_others(self, ranks: Sequence[subprocess.Popen]) -> None:
        """Give the other ranks time to publish what they know and to exit; then end them, sooner than torchrun, which takes 30 s."""
        on_purpose = any(rank.code in FINAL for rank in self.failed)
        first = EXIT_GRACE if on_purpose else FAILED_GRACE
        for number, seconds in ((None, first), (signal.SIGTERM, GRACE), (signal.SIGKILL, 5.0)):
            for rank in ranks:
                if number and rank.poll() is None:
                    processes.send_signal(rank.pid, number)
            processes.wait_until(lambda: all(rank.poll() is not None for rank in ranks), seconds, MONITOR)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # the ranks' store may be that of the last round, with all its keys; each agent counts its own restarts
        store, self.failed = worker_group.store, ()
        assert store is not None
        if self._before is not None and self._before.check([restarts.REASON_KEY]):
            self._last = replace(self._last, reason=self._before.get(restarts.REASON_KEY).decode())
        agents = restarts.exchange(worker_group, replace(self._last, restarts_left=self._remaining_restarts))
        self._before = store
        self._remaining_restarts = min(each.restarts_left for each in agents)
        self._last = restarts.AgentInfo(0, again=True)
        os.environ.pop(RESTARTED, None)
        if why := restarts.reason(agents):
            most = worker_group.spec.max_restarts
            os.environ[RESTARTED] = f"restart {most - self._remaining_restarts} of {most}: {why}"
        if worker_group.group_rank == 0:
            store.set("hpclm", secrets.token_hex(8))
        os.environ["HPCLM_RENDEZVOUS"] = store.get("hpclm").decode()
        started = super()._start_workers(worker_group)
        for number in self.received:  # received before the ranks were started
            self._send(number)
        return started

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = GRACE) -> None:
        super()._shutdown(death_sig, min(timeout, GRACE))

    def forward(self, number: int) -> None:
        """Send a signal to the ranks, and to those of later rounds."""
        self.received.append(number)
        self._send(number)

    def _send(self, number: int) -> None:
        for handler in getattr(self._pcontext, "subprocess_handlers", {}).values():
            processes.send_signal(handler.proc.pid, number)


def main(argv: list[str]) -> int:
    """Run this node's ranks in a job of several nodes; takes torchrun's arguments, with -m MODULE."""
    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous import registry as rendezvous

    args = run.parse_args(argv)
    if str(args.nproc_per_node).isdigit():
        affinity.limit_threads_of(int(args.nproc_per_node))
    config, _, _ = run.config_from_args(args)
    command = python.command(args.training_script, *args.training_script_args)
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    handler = rendezvous.get_rendezvous_handler(parameters)
    spec = specification(command, config.nproc_per_node, handler, config.max_restarts)
    assert config.logs_specs is not None
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # srun sends it when the agent of another node exits
    try:
        code, failed = supervise(spec, config.logs_specs)
        for ended in failed:
            log_failed_rank(ended, None, "")
        return code
    finally:
        with suppress(RendezvousError):  # its store is on the first node, which may be lost
            handler.shutdown()


def specification(command: Sequence[str], count: int, handler: RendezvousHandler, restarts: int) -> WorkerSpec:
    """What the agent of this node runs: ``count`` ranks of ``command``, restarted at most ``restarts`` times."""
    return WorkerSpec(
        role="rank",
        local_world_size=count,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=handler,
        max_restarts=restarts,
        monitor_interval=MONITOR,
        event_log_handler="null",
    )


def supervise(spec: WorkerSpec, output: LogsSpecs) -> tuple[int, tuple[FailedRank, ...]]:
    """Run the agent; the exit code, and the ranks that failed first."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks log what happened
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the others are forwarded
    processes.adopt_orphans()
    agent = Agent(spec, output, shutdown_timeout=GRACE)
    with _signals(agent):
        try:
            result = agent.run()
        except KeyboardInterrupt:
            print("second Ctrl-C: exiting now without saving", file=sys.stderr, flush=True)
            return 128 + signal.SIGINT, ()
        except (RendezvousError, DistError) as error:  # the first node is lost, or another has ended the run
            text = f"the agent on {socket.gethostname()} lost its connection to the others: {error}"
            print(text, file=sys.stderr, flush=True)
            code = exit_code(False, [ended.code for ended in agent.failed], agent.received)
            return (errors.REQUEUE if bootstrap.job() and code == 1 else code), agent.failed
        finally:
            processes.kill_children()
    succeeded = result.state == WorkerState.SUCCEEDED
    code = exit_code(succeeded, [ended.code for ended in agent.failed], agent.received)
    warned = [ended for ended in agent.failed if -ended.code in agent.received]
    return code, tuple(ended for ended in agent.failed if ended not in warned)


def exit_code(succeeded: bool, codes: Sequence[int], sent: Collection[int] = ()) -> int:
    """0, or that of the rank that failed; 128 + n if signal n killed it.

    ``sent``: warnings that were forwarded to the ranks. One that ends a rank came before the rank could catch it, when
    there was nothing to save.
    """
    if succeeded:
        return 0
    if errors.REQUEUE in codes and {*codes} <= {errors.REQUEUE, -signal.SIGKILL, -signal.SIGTERM}:
        return errors.REQUEUE  # a hung rank may have been killed
    if codes and {*codes} <= {errors.REQUEUE, *(-number for number in sent)}:
        return errors.REQUEUE
    killed = [code for code in codes if code < 0 and -code != signal.SIGTERM]
    first = killed[0] if killed else next(iter(codes), 1)
    return first if first > 0 else 128 - first


def log_failed_rank(ended: FailedRank, log: Path | None, last_lines: str) -> None:
    """Log what the ranks could not: that a signal killed one, or that one exited before the rendezvous."""
    text = ""
    if ended.code < 0 and -ended.code != signal.SIGTERM:
        text = f"rank {ended.rank} (pid {ended.pid}) was {processes.killed_by(-ended.code)}"
    elif last_lines:
        text = f"rank {ended.rank} (pid {ended.pid}) ended with exit code {ended.code}; it printed:\n{last_lines}"
    if text and log is not None:
        foreground.log_line(text, log, "E")
    elif text:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def _signals(agent: Agent) -> Iterator[None]:
    """During the block, signals are forwarded to the ranks, each once; a second Ctrl-C raises KeyboardInterrupt."""
    seen: set[int] = set()

    def handle(number: int, frame: FrameType | None) -> None:
        if number in seen:
            if number == signal.SIGINT:
                agent._shutdown(signal.SIGKILL, INTERRUPTED)
                raise KeyboardInterrupt
            return
        seen.add(number)
        agent.forward(signal.SIGTERM if number == signal.SIGHUP else number)

    with preemption.handling(handle):
        yield


if __name__ == "__main__":
    parent = os.getppid()
    code = main(sys.argv[1:])
    restart.report(code, parent)
    sys.stdout.flush()
    sys.stderr.flush()
    # srun ends all tasks if one exits with a code other than 0: a late signal must not change this one's
    os._exit(code)
