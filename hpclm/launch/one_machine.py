"""All ranks on this machine, under one elastic agent whose store listens on loopback only."""

import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from hpclm import files
from hpclm.distributed import network
from hpclm.distributed.shutdown import LOGGED
from hpclm.distributed.signed import SECRET, SignedStore
from hpclm.launch import elastic, foreground


class OneMachine(StaticTCPRendezvous):
    """A rendezvous of one agent. The ranks' store is the agent's, on loopback, so no other machine can reach it."""

    def __init__(self, run_id: str):
        listener = network.listen(network.candidates(run_id), "127.0.0.1")
        super().__init__("127.0.0.1", listener.getsockname()[1], 0, 1, run_id, timeout=60)
        where, handle = (self.master_addr, self.master_port), listener.detach()
        self._server = TCPStore(*where, None, True, self.timeout, wait_for_workers=False, master_listen_fd=handle)

    def next_rendezvous(self) -> RendezvousInfo:
        """This agent, alone."""
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self.master_addr, self.master_port))

    def is_logged(self, run_id: str) -> bool:
        """Whether rank 0 has logged why the run failed."""
        name = f"{run_id}.{os.environ['HPCLM_RENDEZVOUS']}"
        return bool(SignedStore(PrefixStore(name, self._server), name, os.environ[SECRET]).get(LOGGED))


def run_here(command: Sequence[str], count: int, log: Path, run_id: str, restarts: int = 0) -> int:
    """Run ``count`` ranks of ``command`` on this machine; the exit code.

    Rank 0 prints as this process does: directly to a terminal, otherwise also to ``log``. The output of the others is
    in files next to it.
    """
    marked = foreground.mark()
    os.environ |= {**marked, "HPCLM_LAUNCHER": "local", SECRET: secrets.token_hex(16)}
    rendezvous = OneMachine(run_id)
    spec = elastic.specification(command, count, rendezvous, restarts)
    folder = log.with_suffix("")
    with foreground.killed_with_this_process(marked, log), _first_rank(log) as first:
        output = elastic.RankOutput(folder, first)
        code, failed = elastic.supervise(spec, output)
        for ended in failed:
            known = not ended.rank or ended.code in elastic.FINAL or rendezvous.is_logged(run_id)
            elastic.log_failed_rank(ended, log, "" if known else output.last_lines(ended.rank))
    if not code:
        shutil.rmtree(folder, ignore_errors=True)
    return code


@contextmanager
def _first_rank(log: Path) -> Iterator[tuple[str, str]]:
    """Paths for the standard output and error of rank 0, which this process shows and logs."""
    if sys.stderr is not None and sys.stderr.isatty():
        yield "", ""
        return
    with os.fdopen(files.appending(log, 0o600), "ab", buffering=0) as file:
        output = foreground.Output(file, hold=False)
        pipes = [os.pipe(), os.pipe()]
        for (source, _), shown in zip(pipes, (sys.stdout, sys.stderr), strict=True):
            output.copy(os.fdopen(source, "rb", buffering=0), shown)
        try:
            yield f"/proc/self/fd/{pipes[0][1]}", f"/proc/self/fd/{pipes[1][1]}"
        finally:
            for _, sink in pipes:
                os.close(sink)
            output.finish(False)
