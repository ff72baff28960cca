"""End a rank with the process that started it, because nothing else would stop or restart the rank.

The kernel sends the signal. Slurm ends its tasks itself, and processes without a launcher may be detached on purpose (nohup, setsid).
"""

import ctypes
import os
import re
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress

from hpclm.base.errors import shell_code

PID = "HPCLM_LAUNCHER_PID"
"""Variable with torchrun's run ID and the PID of the agent that starts the ranks, set by hpclm's launchers."""
LAUNCHED = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
"""Variables set by torchrun and mpirun for their ranks (``bootstrap.LAUNCHERS`` without Slurm)."""
LOOPBACK = re.compile(r"tcp4?://127\.0\.0\.1:(\d+)")
PR_SET_PDEATHSIG = 1


def end_with_launcher(command: str, env: Mapping[str, str] = os.environ) -> None:
    """Make this process end with its launcher if it is a rank of hpclm train. The main thread calls this first."""
    if command != "train" or not any(name in env for name in LAUNCHED):
        return
    run_id, _, recorded = env.get(PID, "").rpartition(" ")
    by_hpclm = run_id and run_id == env.get("TORCHELASTIC_RUN_ID")
    end_with(int(recorded) if by_hpclm else os.getppid(), signal.SIGKILL)
    if not by_hpclm and not _launcher_answers(env):
        os._exit(shell_code(-signal.SIGKILL))


def end_with(parent: int, number: int) -> None:
    """Make the kernel send this process the signal ``number`` when its parent, process ``parent``, ends."""
    signal_at_death_of_parent(number)
    if os.getppid() != parent:  # it has ended already
        os._exit(shell_code(-signal.SIGKILL))


def signal_at_death_of_parent(number: int) -> None:
    """Make the kernel send this process a signal when the thread that started it ends (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def _launcher_answers(env: Mapping[str, str]) -> bool:
    """False if the launcher is dead for certain: it may have ended before this process looked for its parent."""
    for endpoint in _served(env):
        try:
            socket.create_connection(endpoint, 5.0).close()
        except ConnectionRefusedError:
            return False
        except OSError:  # the rendezvous will report it
            continue
    return True


def _served(env: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """The addresses on this machine at which a live launcher listens: torchrun's store, or Open MPI's daemon."""
    local = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and env.get("GROUP_WORLD_SIZE") == "1"
    if local and env.get("MASTER_PORT", "").isdecimal():
        yield env.get("MASTER_ADDR", ""), int(env["MASTER_PORT"])
    elif "TORCHELASTIC_RUN_ID" not in env:
        servers = {text for name, text in env.items() if name.startswith("PMIX_SERVER_URI")}
        yield from (("127.0.0.1", int(port)) for uri in servers for port in LOOPBACK.findall(uri))
