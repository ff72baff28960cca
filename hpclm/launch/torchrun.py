"""Start the ranks of this machine through torchrun's public API, and end with the exit code of the run.

On one machine, ``run_here`` does so. In a Slurm job of several nodes, the template runs this module once on each. What torchrun itself does not do: signals are
forwarded to the ranks so that they can save, the exit code says why the run ended, and ranks that ended on purpose are not
restarted. For that each rank leaves its exit code in the file that TORCHELASTIC_ERROR_FILE names (``restart.note``).
"""

from hpclm.node import preemption

if __name__ == "__main__":  # before the other imports, which take a while
    preemption.catch_from_the_start("train")

import argparse
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError, HashStore, TCPStore
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std
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

from hpclm import files
from hpclm.distributed import bootstrap, network, restart
from hpclm.distributed.signed import SECRET
from hpclm.errors import REQUEUE
from hpclm.launch import foreground
from hpclm.node import processes, python, threads

FINAL = (64, 66, 75, 93)
"""Exit codes of a rank that must not be restarted; neither must one that has saved and exits with 85."""
BY_TORCHRUN = 20  # seconds after the first failure; torchrun kills ranks that are still running after 30
LOOPBACK = "hpclm-loopback"


class EndedError(Exception):
    """The ranks have ended on purpose, and are not restarted."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


class RankLogs(LogsSpecs):
    """Where ranks print, and the files with their exit codes; torchrun asks before it starts the ranks, each time."""

    def __init__(self, folder: Path, first: tuple[str, str] = ("", ""), separate: bool = True):
        """``first``: paths of the standard output and error of local rank 0, empty: as this process. ``separate``: the other
        ranks print to files in ``folder``."""
        super().__init__(str(folder), redirects=Std.NONE, tee=Std.NONE)
        self.folder, self.first, self.separate = folder, first, separate
        self.received: list[int] = []
        """Signals that this process has received."""

    @property
    def root_log_dir(self) -> str:
        """Where the files are."""
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of each local rank of ``envs``; EndedError if the ranks are not to be started."""
        if self.received:
            raise EndedError(REQUEUE)
        out, err, error_files = {}, {}, {}
        for local_rank, env in envs.items():
            path = self.path(int(env["RANK"]))
            out[local_rank], err[local_rank] = (f"{path}.out", f"{path}.err") if local_rank else self.first
            error_files[local_rank] = env["TORCHELASTIC_ERROR_FILE"] = f"{path}.json"
        if int(envs[0]["TORCHELASTIC_RESTART_COUNT"]):
            self._prepare_restart(envs)
        if not self.separate:
            out, err = dict.fromkeys(envs, self.first[0]), dict.fromkeys(envs, self.first[1])
        nothing = dict.fromkeys(envs, "")
        return LogsDest(out, err, nothing, nothing, error_files)

    def _prepare_restart(self, envs: Mapping[int, dict[str, str]]) -> None:
        notes = [self.note(int(env["RANK"])) for env in envs.values()]
        if final := [note["exit_code"] for note in notes if note.get("exit_code") in (*FINAL, REQUEUE)]:
            raise EndedError(final[0])
        why = next((note["message"] for note in notes if note.get("message")), "a rank ended without a message")
        for env in envs.values():
            count, most = env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"]
            env[restart.RESTARTED] = f"restart {count} of {most}: {why}"
            Path(env["TORCHELASTIC_ERROR_FILE"]).unlink(missing_ok=True)

    def path(self, rank: int) -> Path:
        """The path of a rank's files, without their ends."""
        return self.folder / f"rank-{rank:05d}"

    def note(self, rank: int) -> dict[str, Any]:
        """What a rank has noted about its end; {} if nothing."""
        with suppress(OSError, ValueError):
            return dict(json.loads(files.read_text(Path(f"{self.path(rank)}.json"))))
        return {}

    def last_lines(self, rank: int, lines: int = 20) -> str:
        """The last lines that a rank printed to a file as errors."""
        with suppress(OSError):
            text = files.read_text(Path(f"{self.path(rank)}.err"), errors="replace")
            return "\n".join(text.splitlines()[-lines:])
        return ""


class Loopback(StaticTCPRendezvous):
    """The rendezvous of one machine. Its store, which the ranks use too, listens on loopback only."""

    def __init__(self, parameters: RendezvousParameters):
        listener = network.listen(network.candidates(parameters.run_id), "127.0.0.1")
        super().__init__("127.0.0.1", listener.getsockname()[1], 0, 1, parameters.run_id, timeout=60)
        address, handle = (self.master_addr, self.master_port), listener.detach()
        self.server = TCPStore(*address, None, True, self.timeout, wait_for_workers=False, master_listen_fd=handle)

    def get_backend(self) -> str:
        """The name it is registered by."""
        return LOOPBACK

    def next_rendezvous(self) -> RendezvousInfo:
        """This node, alone."""
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self.master_addr, self.master_port))


def run_here(command: Sequence[str], count: int, log: Path, run_id: str, restarts: int = 0) -> int:
    """Run ``count`` ranks of ``command`` on this machine; the exit code.

    Rank 0 prints as this process does, and to ``log`` unless that is a terminal; the others to files next to it.
    """
    os.environ |= {"HPCLM_LAUNCHER": "local", SECRET: secrets.token_hex(16)}
    rendezvous_handler_registry.register(LOOPBACK, Loopback)
    folder = files.private_folder(log.with_suffix(""), "log folder")
    with foreground.killed_with_this_process(log) as mark, foreground.copied_to(log) as first:
        os.environ |= mark
        logs = RankLogs(folder, first)
        config = LaunchConfig(1, 1, count, logs, run_id, "rank", rdzv_backend=LOOPBACK, max_restarts=restarts)
        code = launch(config, command, logs, lambda text: foreground.log_line(text, log, "E"))
    if not code:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def main(argv: list[str]) -> int:
    """Run this node's ranks in a Slurm job of several nodes."""
    parser = argparse.ArgumentParser(prog="hpclm.launch.torchrun")
    for option in ("--nnodes", "--nproc-per-node", "--max-restarts"):
        parser.add_argument(option, type=int, default=0 if option == "--max-restarts" else 1)
    parser.add_argument("--rdzv-id", required=True)
    parser.add_argument("--rdzv-endpoint", required=True, metavar="HOST:PORT")
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads.per_process(args.nproc_per_node, env={})))
    with tempfile.TemporaryDirectory(prefix="hpclm-") as folder:
        logs = RankLogs(Path(folder), separate=False)
        config = LaunchConfig(
            args.nnodes,
            args.nnodes,
            args.nproc_per_node,
            logs,
            args.rdzv_id,
            "rank",
            rdzv_backend="static",  # all nodes restart together, since a rank that loses another ends too
            rdzv_endpoint=args.rdzv_endpoint,
            rdzv_configs={"rank": int(os.environ.get("SLURM_NODEID", "0"))},
            max_restarts=args.max_restarts,
        )
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # srun sends it when the launcher of another node exits
        return launch(config, python.command(args.module, *args.arguments), logs, _print)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def launch(config: LaunchConfig, command: Sequence[str], logs: RankLogs, report: Callable[[str], None]) -> int:
    """Run the ranks to their end, with ``logs``; the exit code. ``report`` prints what the ranks could not."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks log what happened
    processes.adopt_orphans()
    config = replace(config, signals_to_handle="SIGQUIT")  # others are forwarded
    with preemption.handling(_Forward(logs.received)):
        try:
            elastic_launch(config, command[0])(*command[1:])
            return 0
        except EndedError as ended:
            return ended.code
        except ChildFailedError as failed:
            causes = first_failures(failed.failures)
            for rank, failure in causes.items():
                if text := described(rank, failure, logs):
                    report(text)
            noted = {logs.note(rank).get("exit_code") for rank in failed.failures}
            return exit_code([failure.exitcode for failure in causes.values()], noted, logs.received)
        except KeyboardInterrupt:
            report("second Ctrl-C: exiting now without saving")
            return 128 + signal.SIGINT
        except (RendezvousError, DistError) as error:  # the first node is lost
            report(f"torchrun on {socket.gethostname()} lost its connection to the others: {error}")
            return REQUEUE if bootstrap.job() else 1
        finally:
            processes.kill_children()


def first_failures(failures: Mapping[int, ProcessFailure]) -> dict[int, ProcessFailure]:
    """The ranks that failed, without those that torchrun killed because of them."""
    first = min(failure.timestamp for failure in failures.values())
    late = first + BY_TORCHRUN
    ended = {-signal.SIGTERM, -signal.SIGKILL}
    return {rank: each for rank, each in failures.items() if each.exitcode not in ended or each.timestamp < late}


def exit_code(codes: Sequence[int], noted: Collection[int | None] = (), received: Collection[int] = ()) -> int:
    """The exit code of a run whose ranks ended with ``codes``; 128 + n if signal n killed one.

    ``noted``: codes that ranks chose themselves. Others end with 85 too if torchrun ends them during their start.
    ``received``: signals that were forwarded. One that kills a rank came during its start, when there was nothing to save.
    """
    final = [code for code in codes if code in FINAL]
    warned = [code for code in codes if -code in received]
    if final or (REQUEUE in codes and (REQUEUE in noted or received)):
        return (*final, REQUEUE)[0]
    killed = [-code for code in codes if code < 0 and code not in warned and code != -signal.SIGTERM]
    crashed = [number for number in killed if number not in (signal.SIGKILL, signal.SIGABRT)]
    raised = [code for code in codes if code > 0 and code != REQUEUE]
    if crashed or signal.SIGKILL in killed:
        return 128 + (*crashed, signal.SIGKILL)[0]
    if raised or killed:
        return (*raised, *(128 + number for number in killed))[0]
    return REQUEUE if warned or REQUEUE in codes else 128 + signal.SIGTERM


def described(rank: int, failure: ProcessFailure, logs: RankLogs) -> str:
    """What the ranks could not log: that a signal killed one, or that one ended before the rendezvous; empty otherwise."""
    code, who = failure.exitcode, f"rank {rank} (pid {failure.pid})"
    if code < 0:
        expected = -code in (signal.SIGTERM, *logs.received)
        return "" if expected else f"{who} was {processes.killed_by(-code)}"
    lines = "" if logs.note(rank) or code in (*FINAL, REQUEUE) else logs.last_lines(rank)
    return f"{who} ended with exit code {code}; it printed:\n{lines}" if lines else ""


class _Forward:
    """Forwards signals to the ranks, each once; a second Ctrl-C ends them."""

    def __init__(self, received: list[int]):
        self.received = received

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again, kill = number in self.received, number == signal.SIGINT and number in self.received
        if again and not kill:
            return
        self.received.append(number)
        sent = signal.SIGKILL if kill else signal.SIGTERM if number == signal.SIGHUP else number
        for rank in processes.children_with("TORCHELASTIC_ERROR_FILE"):
            processes.send_signal(rank, sent)
        if kill:
            raise KeyboardInterrupt


if __name__ == "__main__":
    parent = os.getppid()
    code = main(sys.argv[1:])
    restart.report(code, parent)
    sys.stdout.flush()
    sys.stderr.flush()
    # srun ends all tasks if one exits with a code other than 0: a late signal must not change this one's
    os._exit(code)
