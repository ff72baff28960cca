"""Start the ranks of this machine through torchrun's public API, and end with the exit code of the run.

``run_here`` starts all ranks of a run on one machine. In a job of several nodes, the supervisor runs this module on each node.
Unlike torchrun, it forwards signals to the ranks so that they can save, its exit code says why the run ended, and it does not
restart ranks that ended on purpose. For this, each rank writes its exit code to a file (``ends.note``).
"""

from hpclm.base import folders
from hpclm.node import import_errors, preemption, threads

if __name__ == "__main__":  # before the other imports, which take seconds
    import_errors.report_uncaught()
    preemption.catch_from_the_start("train")
    threads.prepare()

import argparse
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import DistError, HashStore, TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hpclm.base.errors import ExitCode, shell_code
from hpclm.distributed import network
from hpclm.distributed.failure import verdict
from hpclm.launch.child import Forward
from hpclm.launch.schedulers import current_job
from hpclm.node import ends, parent, processes, python, slurm
from hpclm.node.ends import End
from hpclm.node.job import OwnJob

FINAL = [code for code in ExitCode if code.final]
"""Exit codes of ranks that must not be restarted. Nor is a rank restarted that has saved and asks for another start of the job."""
BY_TORCHRUN = 20  # seconds after the first failure: a rank killed later was killed by torchrun, which waits 30 s
JOIN = 600.0  # seconds until the first node's launcher must answer, the same as torchrun's own limit
LOOPBACK = "hpclm-loopback"


class EndedError(Exception):
    """The ranks have ended on purpose, and are not restarted."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


class RankFiles(DefaultLogsSpecs):
    """Prepares each start of this node's ranks: torchrun's agent calls ``reify`` before each start."""

    def __init__(self, own: Path, folder: Path):
        """``own``: the folder for torchrun's files. ``folder``: the folder for the ends of ranks."""
        super().__init__(str(own))
        self.folder = folder
        self.received: list[int] = []
        """The signals that this process has received."""
        self._ranks: list[int] = []

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of each local rank of ``envs``; EndedError if the ranks must not be started."""
        left = ends.read_ends(self.folder)
        before = [left[rank] for rank in self._ranks if rank in left and not left[rank].symptom]
        final = [end.exit_code for end in before if end.exit_code in (*FINAL, ExitCode.REQUEUE)]
        if self.received or final:
            raise EndedError((*final, ExitCode.REQUEUE)[0])
        cause = verdict(self.folder)
        for env in envs.values():
            count = env["TORCHELASTIC_RESTART_COUNT"]
            max_restarts = env["TORCHELASTIC_MAX_RESTARTS"]
            if int(count):
                why = cause.text.partition("\n")[0] if cause else "a rank ended without a message"
                env[ends.RESTARTED] = f"restart {count} of {max_restarts}: {why}"
        self._ranks = [int(env["RANK"]) for env in envs.values()]
        ends.forget(self.folder, self._ranks)
        return super().reify(envs)


class Loopback(StaticTCPRendezvous):
    """A rendezvous of one machine. Its store, which the ranks use too, listens only on the loopback interface."""

    def __init__(self, parameters: RendezvousParameters):
        listener = network.listen(network.candidates(parameters.run_id), "127.0.0.1")
        super().__init__("127.0.0.1", listener.getsockname()[1], 0, 1, parameters.run_id, timeout=60)
        address = (self.master_addr, self.master_port)
        handle = listener.detach()
        self.server = TCPStore(*address, None, True, self.timeout, wait_for_workers=False, master_listen_fd=handle)

    def get_backend(self) -> str:
        """The registered name of this rendezvous."""
        return LOOPBACK

    def next_rendezvous(self) -> RendezvousInfo:
        """A rendezvous of this node alone."""
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self.master_addr, self.master_port))


def run_here(command: Sequence[str], count: int, restarts: int = 0) -> int:
    """Run ``count`` ranks of ``command`` on this machine; returns the exit code."""
    os.environ["HPCLM_LAUNCHER"] = "local"
    rendezvous_handler_registry.register(LOOPBACK, Loopback)
    return launch(command, 1, count, restarts, current_job(), run_id=secrets.token_hex(8), rdzv_backend=LOOPBACK)


def main(argv: list[str], job: OwnJob) -> int:
    """Run this node's ranks in a job of several nodes; returns the exit code."""
    parser = argparse.ArgumentParser(prog="hpclm.launch.torchrun")
    for option, default in (("--nnodes", 1), ("--nproc-per-node", 1), ("--max-restarts", 0)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--rdzv-id", required=True)
    parser.add_argument("--rdzv-endpoint", required=True, metavar="HOST:PORT")
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads.per_process(args.nproc_per_node, env={})))
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # srun sends it when the launcher of another node exits
    host, _, port = args.rdzv_endpoint.rpartition(":")
    node = slurm.number(os.environ, slurm.NODE_OF_STEP)
    addresses = slurm.addresses()
    if node and addresses:
        host = network.first_to_answer([host, *addresses], int(port), JOIN) or host
    elif addresses:
        host = network.own_address(host) or addresses[0]
    return launch(
        python.command(args.module, *args.arguments),
        args.nnodes,
        args.nproc_per_node,
        args.max_restarts,
        job,
        run_id=args.rdzv_id,
        rdzv_backend="static",  # all nodes restart together: a rank that loses another ends too
        rdzv_endpoint=f"{host}:{port}",
        rdzv_configs={"rank": node},
    )


def launch(command: Sequence[str], nodes: int, ranks: int, restarts: int, job: OwnJob, **rendezvous: Any) -> int:
    """Run this node's ``ranks`` to their end, in the job ``job``; returns the exit code."""
    os.environ[parent.PID] = f"{rendezvous['run_id']} {os.getpid()}"
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks log their own errors
    with folders.temporary_folder() as folder:
        errors = Path(os.environ.setdefault(ends.FOLDER, str(folder)))
        notes = RankFiles(folder, errors)
        forward = Forward(
            lambda: processes.children_with("TORCHELASTIC_ERROR_FILE"), {signal.SIGHUP: signal.SIGTERM}, signal.SIGKILL
        )
        notes.received = forward.received
        rendezvous["signals_to_handle"] = "SIGQUIT"  # the other signals are forwarded
        config = LaunchConfig(nodes, nodes, ranks, notes, max_restarts=restarts, **rendezvous)
        with preemption.handling(forward):
            try:
                elastic_launch(config, command[0])(*command[1:])
                return 0
            except EndedError as ended:
                return ended.code
            except ChildFailedError as failed:
                return exit_code(first_failures(failed.failures), errors, forward.received)
            except KeyboardInterrupt:
                _report("second Ctrl-C: exiting now without saving")
                return ExitCode.INTERRUPTED
            except (RendezvousError, DistError) as error:  # the first node is lost
                _report(f"torchrun on {socket.gethostname()} lost its connection to the others: {error}")
                return ExitCode.REQUEUE if job.id else ExitCode.FAILED
            finally:
                processes.kill_children()


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def first_failures(failures: Mapping[int, ProcessFailure]) -> dict[int, ProcessFailure]:
    """The ranks that failed, in order of time, without those that torchrun killed because another had failed."""
    ordered = sorted(failures.items(), key=lambda failure: failure[1].timestamp)
    late = ordered[0][1].timestamp + BY_TORCHRUN
    return {
        rank: failure for rank, failure in ordered if failure.exitcode != -signal.SIGKILL or failure.timestamp < late
    }


def exit_code(failures: Mapping[int, ProcessFailure], folder: Path, received: Collection[int] = ()) -> int:
    """The exit code of a run with these ``failures`` of ranks. Writes a file in ``folder`` for each rank that left none.

    ``received``: signals that were forwarded. A rank that a forwarded signal killed was still starting, and had nothing to save.
    """
    left = ends.read_ends(folder)
    for number, (rank, failure) in enumerate(failures.items()):
        if rank in left or -failure.exitcode in (signal.SIGTERM, *received):
            continue
        code = shell_code(failure.exitcode)
        how = f"ended with exit code {code}"
        if failure.exitcode < 0:
            how = f"was {processes.killed_by(-failure.exitcode)}"
        cause = f"rank {rank} on {socket.gethostname()} (pid {failure.pid}) {how}"
        # this end gets a later time than those that ranks have written, because it may be their consequence
        ends.leave(folder, End(rank, code, cause, time.time() + number))
    found = verdict(folder)
    if found and found.exit_code is not None:
        return found.exit_code
    codes = [failure.exitcode for failure in failures.values()]
    if any(-code in received for code in codes):
        return ExitCode.REQUEUE
    return shell_code(codes[0])


if __name__ == "__main__":
    started_by = os.getppid()
    job = current_job()
    code = main(sys.argv[1:], job)
    if os.getppid() != started_by:
        job.end_step(code)
    sys.stdout.flush()
    sys.stderr.flush()
    # srun ends all tasks if one exits with a code other than 0, so a late signal must not change this exit code
    os._exit(code)
