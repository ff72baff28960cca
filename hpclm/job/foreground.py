"""A launch that the person waits for: its log, its line in the ledger, its guardian."""

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from hpclm import files
from hpclm.config import RunConfig
from hpclm.job import guardian, ledger
from hpclm.job.ledger import Submission
from hpclm.job.streams import Streams
from hpclm.job.supervise import Manner, Process, supervise


def launch(
    config: RunConfig,
    cluster: str,
    processes: Sequence[Process],
    nodes: int,
    tasks_per_node: int,
    manner: Manner | None = None,
    notes: Sequence[str] = (),
    command: Sequence[str] = (),
    conclude: Callable[[int, Callable[[str, str], None]], int] | None = None,
    name: str = "",
) -> int:
    """Run ``processes`` in the foreground and give the exit code; the first one's output is what the person sees.

    ``notes`` are told first; ``command`` is what the person typed, secrets taken out. ``conclude`` turns the exit code
    into the one to leave with, and may say why. ``cluster`` stands in the ledger, ``name`` in the log's own.
    """
    out = files.writable_folder(config.out, "run directory", mode=0o700)
    logs = files.writable_folder(out / "logs", "log folder", mode=0o700)
    log = (logs / f"job-{name or cluster}-{os.getpid()}.log").absolute()
    ledger.append(
        out,
        Submission(
            cluster=cluster,
            job_id=str(os.getpid()),
            host=socket.gethostname(),
            nodes=nodes,
            tasks_per_node=tasks_per_node,
            log=str(log),
            command=list(command),
            folder=str(Path.cwd()),
        ),
    )

    def act(lifeline: int) -> int:
        streams = Streams(log)
        for note in notes:
            streams.say(note)
        code = supervise(processes, lifeline, streams, manner)
        return conclude(code, streams.say) if conclude else code

    return guardian.guarded(act)
