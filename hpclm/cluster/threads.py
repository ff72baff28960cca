"""How the threads of this process wait for each other."""

import os


def wait_politely() -> None:
    """Let idle OpenMP threads sleep instead of spin, unless the user chose; call it before torch is loaded.

    Spinning threads that share their core with another process make a step ten times as slow.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
