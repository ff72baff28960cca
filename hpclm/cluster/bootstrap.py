"""Who this process is among those of the run, read from what its launcher left in the environment."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpclm.errors import ConfigError

Env = Mapping[str, str]


@dataclass(frozen=True)
class World:
    """This process among all processes of the run, whoever started them."""

    launcher: str
    rank: int
    size: int
    local_rank: int


def _reader(launcher: str, rank: str, size: str, local_rank: str) -> Callable[[Env], World]:
    def read(env: Env) -> World:
        try:
            return World(launcher, int(env[rank]), int(env[size]), int(env[local_rank]))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"{launcher} started this process, but {error} is missing or no number in its environment"
            ) from None

    return read


def single(env: Env) -> World:
    """One process that nobody launched."""
    return World("single", 0, 1, 0)


# The first row whose variable is set wins. Launchers nest, so the innermost come first: torchrun and mpirun run inside
# Slurm jobs. SLURM_STEP_ID, unlike SLURM_PROCID, is set by srun and not in a batch script.
LAUNCHERS: tuple[tuple[str, Callable[[Env], World]], ...] = (
    ("TORCHELASTIC_RUN_ID", _reader("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK")),
    (
        "OMPI_COMM_WORLD_RANK",
        _reader("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ),
    ("MPI_LOCALRANKID", _reader("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")),
    ("SLURM_STEP_ID", _reader("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")),
)


def detect(env: Env = os.environ) -> World:
    """The world of this process; ConfigError when the launcher's variables do not add up."""
    for variable, read in LAUNCHERS:
        if variable in env:
            return read(env)
    return single(env)
