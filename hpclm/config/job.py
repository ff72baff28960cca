"""Settings of a job: what to request from the scheduler, and how the processes find each other."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from hpclm.config.checks import as_list
from hpclm.config.sbatch import OPTIONAL_VALUE, OPTIONS
from hpclm.config.section import Rule, Section
from hpclm.config.setting import setting

CLUSTERS = dict.fromkeys(("auto", "slurm", "local", "mpirun"), "")
LONGEST_TIMEOUT = 1_000_000  # minutes, two years: PyTorch counts in nanoseconds

# The syntax of sbatch. Without these patterns, Slurm would find a typo much later, or misread it.
SHAPES = {
    "time": (
        re.compile(r"\d{1,9}(:[0-5]?\d){0,2}|\d{1,9}-\d{1,9}(:[0-5]?\d){0,2}|UNLIMITED|INFINITE", re.IGNORECASE),
        "minutes, HH:MM:SS or D-HH:MM:SS",
    ),
    "mem": (re.compile(r"\d+[KMGT]?B?", re.IGNORECASE), "a number and K, M, G or T, such as 64G"),
}
WITHOUT_SPACES = ("partition", "exclude", "nodelist", "modules")
NOTIFY = re.compile(r"https?://[!-.0-~][!-~]*|\$[A-Za-z_]\w*")
MAIL = """let Slurm send it: 'job.options={mail-type: "END,FAIL", mail-user: you@example.org}'"""
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Variables that bash protects, and variables that give a process its rank.
RESERVED = re.compile(
    r"BASHOPTS|BASH_VERSINFO|EUID|PPID|SHELLOPTS|UID|IFS|BASH_ENV|ENV|(SLURM|SLURMD|OMPI_COMM|PMI|PMIX|TORCHELASTIC|HPCLM)_\w*"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
)


def _shaped(name: str, shape: re.Pattern[str], meaning: str) -> Rule:
    """The rule that job.``name`` has the syntax of sbatch."""
    return Rule(
        lambda job: getattr(job, name) is not None and not shape.fullmatch(getattr(job, name)),
        lambda job: f"job.{name}={getattr(job, name)!r} must be {meaning}",
    )


def _one_line(name: str, blank: bool) -> Rule:
    """The rule that job.``name``, a text or a list, has no line breaks; ``blank``: spaces are allowed."""
    return Rule(
        lambda job: [wrong for line in as_list(getattr(job, name)) for wrong in _line(f"job.{name}", line, blank)]
    )


@dataclass(frozen=True)
class JobConfig(Section, key="job"):
    """The resources that `hpclm submit` requests. A site file (hpclm docs launch) describes a cluster for all runs."""

    cluster: str = setting(
        "auto",
        "slurm, local, mpirun (on job.hostfile), or package.module:Name. auto: mpirun with a hostfile, slurm with "
        "sbatch, otherwise local.",
        names=CLUSTERS,
    )
    nodes: int = setting(1, "Nodes.", at_least=1)
    gpus: int = setting(1, "GPUs per node, one process each; without GPUs: processes per node.", at_least=1)
    time: str | None = setting(None, "Time limit: minutes, HH:MM:SS or D-HH:MM:SS; null: the partition's.")
    partition: str | None = setting(None, "Partition (queue).")
    exclude: str | None = setting(None, "Nodes to exclude; with a hostfile also slots.")
    nodelist: str | None = setting(
        None,
        "Nodes to use; with a hostfile in DeepSpeed's syntax: node1@node2:4,5 is all of node1 and two slots of node2.",
    )
    mem: str | None = setting(
        None, "Memory per node, such as 64G; 0: all; null: the GPUs' share (from scontrol), or the cluster's default."
    )
    cpus_per_task: int | None = setting(
        None,
        "Cores per process; null: a GPU's share (from scontrol), or the cluster's default.",
        at_least=1,
        unit="cores",
    )
    options: dict[str, str] = setting(
        {},
        "Other options of sbatch by long names: {account: me, qos: high, mail-type: END}; flags have an empty value.",
        secret=True,
        runs_code=True,
    )
    warn_seconds: int = setting(
        120, "Seconds before the time limit at which Slurm sends USR2, to save; 0: never.", at_least=0
    )
    requeue: bool = setting(True, "Let Slurm requeue the job after preemption or a node failure.")
    restarts: int = setting(
        0,
        "Restarts of failed ranks inside the allocation (template=torchrun, local runs); 0: the job ends, and is "
        "requeued if job.requeue is set.",
        at_least=0,
    )
    template: Literal["srun", "mpirun", "torchrun"] = setting(
        "srun", "Launcher of the ranks: srun, mpirun, or torchrun on each node."
    )
    modules: list[str] = setting([], "Environment modules to load.", runs_code=True)
    venv: str | None = setting(
        None,
        "Virtual environment to activate; null: that of hpclm submit.",
        path=True,
        only_with="not job.container: the image has its own Python",
        runs_code=True,
    )
    conda: str | None = setting(
        None,
        "conda environment to activate, by name or path.",
        path=True,
        only_with="not job.container: the image has its own Python",
        runs_code=True,
    )
    setup: list[str] = setting(
        [], "Shell commands of the job script, run verbatim before the processes start.", runs_code=True
    )
    notify: list[str] = setting(
        [],
        "Whom to notify when the run fails, finishes or restarts: a webhook, or $NAME of a variable that holds "
        "one (hpclm docs sinks).",
        secret=True,
    )
    snapshot: bool = setting(
        False,
        "Run a copy of the code, kept in the run directory, in every attempt; false: the current code, with a "
        "warning if it has changed.",
        only_with="not job.container: the image holds the code",
    )
    env: dict[str, str] = setting(
        {},
        "Environment variables of all processes, verbatim. Secrets are refused: export them before you submit.",
        secret=True,
        runs_code=True,
    )
    container: str | None = setting(
        None, "Image to run in: a .sif file or an image name.", path=True, url=True, runs_code=True
    )
    runtime: Literal["apptainer", "pyxis", "docker"] = setting(
        "apptainer", "Container runtime.", warn_without="job.container"
    )
    mounts: list[str] = setting(
        [],
        "Folders to mount in the container: /data, or /outside:/inside.",
        path=":",
        only_with="job.container",
        runs_code=True,
    )
    hostfile: str | None = setting(
        None,
        'Machines for mpirun, in DeepSpeed\'s syntax: a line "host slots=8" for each.',
        path=True,
        warn_without="job.cluster=auto|mpirun",
        runs_code=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda job: job.restarts and job.cluster == "mpirun",
            "{job.restarts}: mpirun cannot restart ranks; use job.cluster=local or Slurm",
        ),
        *(_shaped(name, *row) for name, row in SHAPES.items()),
        *(_one_line(name, blank=False) for name in WITHOUT_SPACES),
        *(_one_line(name, blank=True) for name in ("venv", "conda", "container", "hostfile", "mounts")),
        Rule(
            lambda job: [
                f"job.setup contains {text!r}; it must be text without control characters"
                for text in job.setup
                if not _is_text(text.replace("\n", " ").replace("\t", " "))
            ]
        ),
        Rule(lambda job: [problem for name, value in job.options.items() for problem in _option(name, value)]),
        Rule(lambda job: [problem for name, value in job.env.items() for problem in _variable(name, value)]),
        Rule(lambda job: [problem for number, target in enumerate(job.notify) for problem in _target(number, target)]),
        Rule(
            lambda job: job.time and SHAPES["time"][0].fullmatch(job.time) and seconds_of(job.time) <= job.warn_seconds,
            "{job.time} must be longer than {job.warn_seconds}: otherwise the warning would come at the start",
        ),
        Rule(lambda job: job.venv and job.conda, "{job.venv} and {job.conda} cannot be combined"),
        Rule(
            lambda job: job.container and job.template != "srun",
            lambda job: f"job.container needs job.template=srun, not {job.template}",
        ),
    )


def seconds_of(time: str) -> float:
    """Seconds of a time limit (see sbatch(1)): minutes[:seconds], h:m:s, days-h[:m[:s]]; inf for 0 and for words."""
    if not time[0].isdigit():
        return math.inf
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(n * unit for n, unit in zip(parts, units, strict=False)) or math.inf


def _is_text(value: str) -> bool:
    return all(c.isprintable() or c == "\u00a0" for c in value)


def _line(setting: str, value: str | None, blank: bool) -> Iterator[str]:
    """Problems with a text of one line; ``blank``: spaces are allowed."""
    if value is None:
        return
    if not value.strip() or not _is_text(value):
        yield f"{setting}={value!r} must be one line of text, without control characters"
    elif not blank and re.search(r"\s", value):
        yield f"{setting}={value!r} must not have spaces"
    elif len(value) > 1000:
        yield f"{setting} has {len(value)} characters; Slurm allows about 1000"


def _option(name: str, value: str) -> Iterator[str]:
    known = OPTIONS.get(name.removeprefix("--").lower())
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        yield f"job.options contains {name!r}; use long names without leading dashes, such as mail-type"
    elif known and known.instead:
        yield f"job.options.{name}: {known.instead}"
    elif value:
        yield from _line(f"job.options.{name}", value, blank=True)
    elif known and not known.flag and known.name not in OPTIONAL_VALUE:
        yield f"job.options.{name} is empty; give its value, or leave it out"


def _target(number: int, target: str) -> Iterator[str]:
    """Problems with an entry of job.notify. The messages do not show it, because a webhook is a password."""
    mail = f"; for mail, {MAIL}" if target.startswith("mailto:") else ""
    if not NOTIFY.fullmatch(target):
        yield f"job.notify.{number} is not a target; it must be a webhook, or $NAME of an environment variable that holds one{mail}"


def _variable(name: str, value: str) -> Iterator[str]:
    if not ENV_NAME.fullmatch(name):
        yield f"job.env contains {name!r}; names of variables are letters, digits and _, and do not begin with a digit"
    elif RESERVED.fullmatch(name):
        yield f"job.env.{name} is set by the shell or the launcher; leave it out"
    if re.search("[\0\ud800-\udfff]", value):
        yield f"job.env.{name} contains a character that is not allowed in environment variables"


@dataclass(frozen=True)
class ClusterConfig(Section, key="cluster"):
    """Start-up, timeouts and checks of the processes."""

    start_seconds: int = setting(300, "Seconds for all processes to connect; missing ones are named.", at_least=1)
    timeout_minutes: float = setting(
        10.0, "Timeout of collective operations, which ends the run.", more_than=0, at_most=LONGEST_TIMEOUT
    )
    hang_minutes: float = setting(
        5.0,
        "Minutes without progress after which a run ends, and reports all stacks and the blocking rank; six times as "
        "long for start-up, first step, evaluations and saves. 0: off.",
        at_least=0,
    )
    interface: str | None = setting(
        None,
        "Network interface between nodes; null: the interface to the first node for gloo, NCCL's own choice for NCCL. "
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME override it.",
    )
    preflight: bool = setting(
        True, "Check nodes, devices, versions, disk and network before a run of several processes."
    )
    self_check: bool | None = setting(
        None,
        "Self-check before a run: compare two steps of two blocks with a plain implementation in fp32, and use a "
        "slower implementation if they differ. null: on GPUs.",
    )
    verify_every: int = setting(
        500,
        "Steps between checks for silent corruption, besides one before every save; 0: never.",
        at_least=0,
        unit="steps",
    )
