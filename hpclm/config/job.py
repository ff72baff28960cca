"""The settings of a job: what to ask a scheduler for, and how its processes meet."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from hpclm.config.checks import Checked, at_least


@dataclass(frozen=True)
class JobConfig(Checked):
    """What `hpclm submit` asks a scheduler for. A site file (docs/launch.md) describes a cluster once for all runs."""

    cluster: Literal["auto", "slurm", "local", "mpirun"] = "auto"
    """Where the processes run: slurm asks for a job; local is this machine; mpirun goes by job.hostfile.
    auto: mpirun where a hostfile is set, slurm where sbatch is installed, else local."""
    nodes: int = 1
    """Nodes."""
    gpus: int = 1
    """GPUs of each node; one process runs on each. On machines without GPUs: processes of each node."""
    time: str | None = None
    """Time limit as Slurm writes it: minutes, HH:MM:SS or D-HH:MM:SS; null: the partition's."""
    partition: str | None = None
    """Partition (queue) to ask."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that nodes must have."""
    exclude: str | None = None
    """Nodes that must not be used."""
    nodelist: str | None = None
    """Nodes that must be used."""
    mem: str | None = None
    """Memory of each node as Slurm writes it: 64G; 0 is all of it."""
    cpus_per_task: int | None = None
    """CPU cores of each process; null: what the cluster gives."""
    dependency: str | None = None
    """What must have ended before: afterok:1234."""
    options: dict[str, str] = field(default_factory=dict)
    """Any other option of sbatch by its long name: {reservation: course, mail-type: END}; an empty value is a flag."""
    warn_seconds: int = 120
    """Seconds before the end at which Slurm warns the run (USR2), so that it can save; 0: no warning."""
    requeue: bool = True
    """Let Slurm start the job again after preemption or a failed node."""
    template: str = "srun"
    """Script to submit: srun, mpirun, torchrun or container of slurm/, or the path of your own."""
    modules: list[str] = field(default_factory=list)
    """Environment modules to load."""
    venv: str | None = None
    """Python virtual environment to activate; null: the one hpclm submit runs in."""
    conda: str | None = None
    """conda environment to activate, by name or path."""
    setup: list[str] = field(default_factory=list)
    """Lines of shell for the job's script, before the processes start. They run as they stand."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of every process. Secrets do not belong here: export them where you submit."""
    container: str | None = None
    """Container image to run in: a .sif or image name; null: none."""
    runtime: Literal["apptainer", "pyxis", "docker"] = "apptainer"
    """What runs job.container."""
    mounts: list[str] = field(default_factory=list)
    """Folders the container sees too: /data, or /outside:/inside."""
    hostfile: str | None = None
    """Machines to run on through mpirun, in DeepSpeed's syntax: a line "host slots=8" for each."""

    def problems(self) -> Iterator[str]:
        """What cannot work in the job settings."""
        yield from at_least(1, "job", nodes=self.nodes, gpus=self.gpus, cpus_per_task=self.cpus_per_task)
        yield from at_least(0, "job", warn_seconds=self.warn_seconds)


@dataclass(frozen=True)
class ClusterConfig(Checked):
    """How the processes of a run meet, and what is checked before they train."""

    start_seconds: int = 300
    """Seconds within which every process must have answered the roll call; the missing ones are named."""
    timeout_minutes: float = 10.0
    """Minutes after which a collective operation that does not return ends the run."""
    interface: str | None = None
    """Network interface for traffic between nodes; null: the one that reaches the first node.
    NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, where set, go before it."""
    preflight: bool = True
    """Check hosts, devices, versions, disk and network before a run of several processes begins."""
    bind: bool = True
    """Keep each process of several on the cores near its GPU, or on its share of the NUMA nodes, unless the launcher has."""

    def problems(self) -> Iterator[str]:
        """What cannot work in the cluster settings."""
        yield from at_least(1, "cluster", start_seconds=self.start_seconds)
        if not self.timeout_minutes > 0:
            yield f"cluster.timeout_minutes={self.timeout_minutes} must be more than 0"
