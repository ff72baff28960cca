"""The settings of a job: what to ask a scheduler for, and how its processes meet."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from hpclm.config.checks import Checked, at_least
from hpclm.registry import hint

TEMPLATES = ("srun", "mpirun", "torchrun", "container")

# What a field of sbatch is, so that a slip is found here and not by Slurm, or worse, taken for something else by it.
SHAPES = {
    "time": (
        re.compile(r"\d+(:[0-5]?\d){0,2}|\d+-\d+(:[0-5]?\d){0,2}|UNLIMITED|INFINITE", re.IGNORECASE),
        "minutes, HH:MM:SS or D-HH:MM:SS",
    ),
    "mem": (re.compile(r"\d+[KMGT]?B?", re.IGNORECASE), "a number and K, M, G or T, such as 64G"),
}
IN_ONE_WORD = ("partition", "account", "qos", "constraint", "exclude", "nodelist", "dependency")
# Options of sbatch that a job has a setting for, or that would break what it promises.
INSTEAD = {
    "job-name": "set job.name",
    "time": "set job.time",
    "partition": "set job.partition",
    "account": "set job.account",
    "qos": "set job.qos",
    "constraint": "set job.constraint",
    "exclude": "set job.exclude",
    "nodelist": "set job.nodelist",
    "nodefile": "set job.nodelist",
    "mem": "set job.mem",
    "cpus-per-task": "set job.cpus_per_task",
    "dependency": "set job.dependency",
    "nodes": "set job.nodes",
    "gpus": "set job.gpus, which is for each node",
    "gpus-per-task": "set job.gpus, which is for each node",
    "ntasks": "set job.nodes and job.gpus",
    "ntasks-per-node": "set job.nodes and job.gpus",
    "ntasks-per-gpu": "set job.nodes and job.gpus",
    "requeue": "set job.requeue",
    "no-requeue": "set job.requeue",
    "signal": "set job.warn_seconds",
    "output": "the log is in the run directory",
    "error": "the log is in the run directory",
    "open-mode": "the log is appended to, or a requeue would empty it",
    "array": "a run is one job; --sweep submits several runs",
    "wrap": "set job.setup or job.template",
    "input": "a job reads no input",
    **dict.fromkeys(
        ("hold-input", "help", "usage", "version", "parsable", "test-only", "wait", "quiet"), "leave it out"
    ),
}
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Variables that bash will not let go, or that say to a process who it is among the others.
OWN_NAMES = re.compile(
    r"BASHOPTS|BASH_VERSINFO|EUID|PPID|SHELLOPTS|UID|IFS|BASH_ENV|ENV|(SLURM|SLURMD|OMPI_COMM|PMI|PMIX|TORCHELASTIC|HPCLM)_\w*"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
)


@dataclass(frozen=True)
class JobConfig(Checked):
    """What `hpclm submit` asks a scheduler for. A site file (docs/launch.md) describes a cluster once for all runs."""

    name: str | None = None
    """What the job is called in the queue; null: as the run. Letters, digits and ._- stay, others become _."""
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
    """Nodes that must not be used; with a hostfile also slots of them, as in job.nodelist."""
    nodelist: str | None = None
    """Nodes that must be used; with a hostfile in DeepSpeed's syntax: node1@node2:4,5 is all of node1, two slots of node2."""
    mem: str | None = None
    """Memory of each node as Slurm writes it: 64G; 0 is all of it."""
    cpus_per_task: int | None = None
    """CPU cores of each process; null: what the cluster gives."""
    dependency: str | None = None
    """What must have ended before: afterok:1234."""
    options: dict[str, str] = field(default_factory=dict)
    """Any other option of sbatch by its long name: {reservation: course, mail-type: END}; an empty value is a flag."""
    warn_seconds: int = 120
    """Seconds before the end at which Slurm warns the run (USR2), so that it can save, or up to a minute
    earlier; 0: no warning."""
    requeue: bool = True
    """Let Slurm start the job again after preemption or a failed node."""
    template: str = "srun"
    """Script to submit: srun, mpirun, torchrun or container of slurm/, or the path of your own. With job.container, srun
    is container."""
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
        for name, (shape, words) in SHAPES.items():
            value = getattr(self, name)
            if value is not None and not shape.fullmatch(value):
                yield f"job.{name}={value!r} must be {words}"
        for name in (*IN_ONE_WORD, "name", "template", "venv", "conda", "container", "hostfile"):
            yield from _line(f"job.{name}", getattr(self, name), blank=name not in IN_ONE_WORD)
        for name in ("modules", "mounts"):
            for value in getattr(self, name):
                yield from _line(f"job.{name}", value, blank=name == "mounts")
        for value in self.setup:
            if not _is_text(value.replace("\n", " ").replace("\t", " ")):
                yield f"job.setup has the line {value!r}; it must be text without control characters"
        for option, value in self.options.items():
            yield from _option(option, value)
        for variable, value in self.env.items():
            yield from _variable(variable, value)
        yield from self._together()

    def _together(self) -> Iterator[str]:
        """What two settings cannot do at once."""
        if self.time and SHAPES["time"][0].fullmatch(self.time) and _seconds(self.time) <= self.warn_seconds:
            yield (
                f"job.time={self.time} is not longer than job.warn_seconds={self.warn_seconds}: the run would be told to leave as "
                "it starts; give it more time, or less warning"
            )
        if self.venv and self.conda:
            yield f"job.venv={self.venv} and job.conda={self.conda} exclude each other"
        if self.container:
            for name in ("venv", "conda"):
                if getattr(self, name):
                    yield f"job.{name}={getattr(self, name)} has no effect in job.container; Python is the container's"
            if self.template in ("mpirun", "torchrun"):
                yield f"job.container wants job.template=container, not {self.template}"
        elif self.template == "container":
            yield "job.template=container wants an image; set job.container"
        elif self.mounts:
            yield "job.mounts has no effect without job.container"
        if "/" not in self.template and not self.template.endswith(".sbatch") and self.template not in TEMPLATES:
            near = hint(self.template, list(TEMPLATES))
            yield f"job.template={self.template!r} must be one of {', '.join(TEMPLATES)}, or a path such as ./my.sbatch.{near}"


def _seconds(time: str) -> float:
    """Seconds of a time limit as sbatch(1) reads it: minutes[:seconds], h:m:s, days-h[:m[:s]]; 0 minutes and a word are no limit."""
    if not time[0].isdigit():
        return math.inf
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(n * unit for n, unit in zip(parts, units, strict=False)) or math.inf


def _is_text(value: str) -> bool:
    """Whether ``value`` has only characters that can be written, and read back, in a line of a file."""
    return all(c.isprintable() or c == "\u00a0" for c in value)


def _line(setting: str, value: str | None, blank: bool) -> Iterator[str]:
    """A sentence where ``value`` is not a line of text, or has spaces though it must not be ``blank``."""
    if value is None:
        return
    if not value.strip() or not _is_text(value):
        yield f"{setting}={value!r} must be one line of text, without control characters"
    elif not blank and re.search(r"\s", value):
        yield f"{setting}={value!r} must not have spaces"
    elif len(value) > 1000:
        yield f"{setting} has {len(value)} characters; Slurm takes at most some 1000"


def _option(name: str, value: str) -> Iterator[str]:
    long = name.removeprefix("--").lower()
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        yield f"job.options has {name!r}; write sbatch's long name without dashes before it, such as mail-type"
    elif long in INSTEAD:
        yield f"job.options.{name}: {INSTEAD[long]}"
    elif value:
        yield from _line(f"job.options.{name}", value, blank=True)


def _variable(name: str, value: str) -> Iterator[str]:
    if not ENV_NAME.fullmatch(name):
        yield f"job.env has {name!r}; a variable's name is letters, digits and _, and does not begin with a digit"
    elif OWN_NAMES.fullmatch(name):
        yield f"job.env.{name} belongs to the shell or to what starts the processes; leave it out"
    if "\0" in value or not _is_unicode(value):
        yield f"job.env.{name} holds a character that no environment can hold"


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class ClusterConfig(Checked):
    """How the processes of a run meet, and what is checked before they train."""

    start_seconds: int = 300
    """Seconds within which every process must have answered the roll call; the missing ones are named."""
    timeout_minutes: float = 10.0
    """Minutes after which a collective operation that does not return ends the run."""
    hang_minutes: float = 5.0
    """Minutes without progress on any process after which the run counts as hung: all write their Python stacks, the log
    names who holds up the others and where, and the run ends. The first step, starting, evaluating and saving have six
    times as long (two minutes at least), building the data any time; a step has twice the longest so far. 0: no watch."""
    hang: Literal["requeue", "stop"] = "requeue"
    """How a hung run ends: requeue with exit code 85, which starts the job again from the last checkpoint; stop with 1."""
    slow: float = 1.5
    """How many times the others' median a process must take for its own part of a step to be named as slow; 0: never."""
    interface: str | None = None
    """Network interface for traffic between nodes; null: for gloo the one that reaches the first node, for NCCL its own
    choice. NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, where set, go before it."""
    preflight: bool = True
    """Check hosts, devices, versions, disk and network before a run of several processes begins."""
    bind: bool = True
    """Keep each process of several on the cores near its GPU, or on its share of the NUMA nodes, unless the launcher has."""

    def problems(self) -> Iterator[str]:
        """What cannot work in the cluster settings."""
        yield from at_least(1, "cluster", start_seconds=self.start_seconds)
        yield from at_least(0, "cluster", hang_minutes=self.hang_minutes)
        if self.slow and not 1 < self.slow < float("inf"):
            yield f"cluster.slow={self.slow} must be more than 1, or 0 to name no process"
        if not self.timeout_minutes > 0:
            yield f"cluster.timeout_minutes={self.timeout_minutes} must be more than 0"
