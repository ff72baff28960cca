"""Variables of the job or launch that this process is in, which a job that it submits must not inherit."""

import os
import re
from collections.abc import Iterable, Mapping

Env = Mapping[str, str]

# Set by Slurm, by mpirun and by torchrun for the processes that they start.
_OF_SLURM = re.compile(
    r"(SLURM|SLURMD|SRUN|SBATCH|SALLOC)_\w+|(CUDA|ROCR|HIP)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK"
)
_OF_MPI = re.compile(r"(OMPI|PMIX|PMI|PRTE|ORTE|HYDRA|HYDI|MPI)_\w+|MPIR_\w+")
_OF_TORCHRUN = re.compile(
    r"(TORCHELASTIC|HPCLM)_\w+|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|(GROUP|ROLE)_NAME|MASTER_(ADDR|PORT)"
)
_KEPT = {"SLURM_CONF", "HPCLM_SITE"}
# What a person may have set for all jobs; it stands where the job's own settings say nothing.
_WISHES = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_CLUSTERS": "clusters",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_WCKEY": "wckey",
}


def variables(options: Iterable[str], env: Env = os.environ) -> list[str]:
    """Names to take out of the environment before sbatch is called; ``options``: what the job itself sets.

    sbatch lets SBATCH_* go before what a script says, and hands everything else on to the job.
    """
    in_job, in_mpi = "SLURM_JOB_ID" in env, "OMPI_COMM_WORLD_RANK" in env or "PMIX_RANK" in env or "PMI_RANK" in env
    kept = set(_KEPT)
    if not in_job:
        kept |= {name for name, option in _WISHES.items() if option not in set(options)}
        kept |= {name for name in env if name.endswith("_VISIBLE_DEVICES")}
    if not in_mpi:  # OMPI_MCA_* and the like are then a person's own
        kept |= {name for name in env if _OF_MPI.fullmatch(name) and not name.startswith("PMI_")}
    rows = (_OF_SLURM, _OF_MPI, _OF_TORCHRUN)
    return sorted(name for name in env if name not in kept and any(row.fullmatch(name) for row in rows))


def without(options: Iterable[str], env: Env = os.environ) -> list[str]:
    """Words to put before a command that keep those variables from it."""
    names = variables(options, env)
    return ["env", *(word for name in names for word in ("-u", name))] if names else []
