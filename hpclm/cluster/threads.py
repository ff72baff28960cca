"""What this process asks of the system before it begins: how its threads wait, how many files it may open."""

import os
import resource
from contextlib import suppress

from hpclm.cluster import placement


def wait_politely() -> None:
    """Let idle OpenMP threads sleep instead of spin, unless the user chose; call it before torch is loaded.

    Spinning threads that share their core with another process make a step ten times as slow.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def limit(threads: int) -> None:
    """Let numerical libraries use ``threads`` threads; call it before torch is loaded."""
    os.environ["OMP_NUM_THREADS"] = str(threads)


def share(processes: int) -> None:
    """Let each of ``processes`` that this one starts use its part of the cores, unless the user chose.

    torchrun by itself gives each one thread.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(placement.threads(processes, env={})))


def open_many_files() -> None:
    """Raise the soft limit of open files to the hard one: a blend of datasets keeps several for each of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard) if soft != hard else (soft, hard))
