"""The environment of this process, handed on as a value to what is started from it."""

import os
from collections.abc import Mapping

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
