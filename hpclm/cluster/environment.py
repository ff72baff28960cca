"""The environment of this process, handed on as a value to what is started from it."""

import os
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

RANKS = ("HPCLM_RANK", "HPCLM_WORLD_SIZE", "HPCLM_LOCAL_RANK", "HPCLM_LOCAL_WORLD_SIZE", "HPCLM_RENDEZVOUS")
"""What hpclm's own launcher tells each process."""


def inherited(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """A copy of the environment, without what an outer launcher of hpclm's told this process about itself."""
    return {name: value for name, value in env.items() if name not in RANKS}


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def rank(env: Mapping[str, str] = os.environ) -> int:
    """This process's number among those that an MPI launcher or Slurm started; 0 where nobody says."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"):
        if env.get(name, "").isdigit():
            return int(env[name])
    return 0


def for_deepspeed(kind: str, index: int, builds: bool = False, env: MutableMapping[str, str] = os.environ) -> None:
    """Tell DeepSpeed which device is this process's, the ``index``-th of a ``kind``; call it before it is imported.

    ``builds``: it will compile something. A job then does so in a folder of its own on each node: a process that is killed
    meanwhile leaves a lock behind, on which every later run would wait for ever.
    """
    env["DS_ACCELERATOR"] = kind
    env["LOCAL_RANK"] = str(index)
    if (
        "OMPI_COMM_WORLD_LOCAL_RANK" in env
    ):  # it insists on equal numbers, and where tasks see one GPU each they are not
        env["OMPI_COMM_WORLD_LOCAL_RANK"] = str(index)
    if builds and "TORCH_EXTENSIONS_DIR" not in env and "SLURM_JOB_ID" in env:
        name = f"hpclm-extensions-{os.getuid()}-{env['SLURM_JOB_ID']}-{env.get('SLURM_RESTART_COUNT', '0')}"
        env["TORCH_EXTENSIONS_DIR"] = str(Path(env.get("TMPDIR") or tempfile.gettempdir()) / name)
