"""A rank ends with the process that started it, from its first line on: nothing else would stop the rank or start it again.

The kernel sees to it where the launcher is known to start ranks from its main thread (the kernel's signal comes when the *thread*
ends), and a thread of the rank does everywhere. Once the ranks have met, the watchdog takes over, which also logs the cause.

Tasks of Slurm are left to Slurm, and processes without a launcher may have been detached on purpose (nohup, setsid).
"""

import ctypes
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PID = "HPCLM_LAUNCHER_PID"
"""Variable with torchrun's run ID and the PID of the agent that starts the ranks, set by hpclm's launchers."""
LAUNCHED = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
"""Variables of which a rank of torchrun or mpirun has one (``bootstrap.LAUNCHERS``, without Slurm)."""
AGENT = re.compile(rb"torchrun|torch\.distributed\.(run|launch)")
"""In the command line of torchrun, which starts ranks from its main thread."""
LOOPBACK = re.compile(r"tcp4?://127\.0\.0\.1:(\d+)")
PR_SET_PDEATHSIG = 1
TURN = 0.25  # seconds between two looks at the parent


class ParentWatch(threading.Thread):
    """Ends this process when process ``parent`` has ended, until ``end_watch``."""

    def __init__(self, parent: int):
        super().__init__(name="hpclm-parent", daemon=True)
        self.parent = parent
        self.over = threading.Event()

    def run(self) -> None:
        """Look for the parent until the watch is over."""
        while not self.over.wait(TURN):
            if os.getppid() != self.parent:
                _exit()


def watch_from_the_start(verb: str, env: Mapping[str, str] = os.environ) -> None:
    """Have this process end with its launcher if it is a rank of the verb ``train``; the first act of its main thread."""
    if verb != "train" or not any(name in env for name in LAUNCHED):
        return
    run_id, _, recorded = env.get(PID, "").rpartition(" ")
    by_hpclm = bool(run_id) and run_id == env.get("TORCHELASTIC_RUN_ID")
    parent = int(recorded) if by_hpclm else os.getppid()
    if by_hpclm or _is_agent(parent):
        signal_at_death_of_parent(signal.SIGKILL)
    if os.getppid() != parent or not (by_hpclm or _launcher_answers(env)):
        _exit()
    with suppress(RuntimeError):  # no more threads for this user: the verb says so
        ParentWatch(parent).start()


def launcher() -> int:
    """The PID of the process that started this one."""
    return next((watch.parent for watch in _watches()), os.getppid())


def end_watch() -> None:
    """Leave the launcher to the caller, which watches it from now on."""
    for watch in _watches():
        watch.over.set()
        signal_at_death_of_parent(signal.SIGCONT)  # a stopped rank wakes, and ends too


def _watches() -> Iterator[ParentWatch]:
    return (thread for thread in threading.enumerate() if isinstance(thread, ParentWatch))


def signal_at_death_of_parent(number: int) -> None:
    """Have the kernel send this process a signal when the thread that started it ends (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def _is_agent(pid: int) -> bool:
    """Whether a process is torchrun, as far as this one may know."""
    with suppress(OSError):
        return AGENT.search(Path(f"/proc/{pid}/cmdline").read_bytes()) is not None
    return False


def _launcher_answers(env: Mapping[str, str]) -> bool:
    """Whether what the launcher serves on this machine is still there: the launcher may have ended before this process looked."""
    for endpoint in _served(env):
        try:
            socket.create_connection(endpoint, 5.0).close()
        except ConnectionRefusedError:
            return False
        except OSError:  # the rendezvous says what is wrong
            continue
    return True


def _served(env: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Addresses on this machine at which the launcher listens as long as it lives: of torchrun's store, and of Open MPI's daemon."""
    local = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and env.get("GROUP_WORLD_SIZE") == "1"
    if local and env.get("MASTER_PORT", "").isdecimal():
        yield env.get("MASTER_ADDR", ""), int(env["MASTER_PORT"])
    elif "TORCHELASTIC_RUN_ID" not in env:
        servers = {text for name, text in env.items() if name.startswith("PMIX_SERVER_URI")}
        yield from (("127.0.0.1", int(port)) for uri in servers for port in LOOPBACK.findall(uri))


def _exit() -> NoReturn:
    with suppress(OSError):  # the launcher may have read it
        os.write(
            2, b"the launcher is gone during the start: exiting, because nothing would restart or stop this rank\n"
        )
    os._exit(1)
