"""The settings of a job as options of sbatch, and how they are written in a script."""

import re
from collections.abc import Iterator
from pathlib import Path

from hpclm.config import JobConfig, RunConfig
from hpclm.errors import ConfigError
from hpclm.node import slurm
from hpclm.node.processes import NoAnswerError

Options = dict[str, str | None]
"""Long name -> value; "" for a flag; None removes the option from the template."""

MEMORY_AND_CORES = {"mem-per-gpu", "mem-per-cpu", "cpus-per-gpu", "exclusive"}
SAME_NAMES = ("time", "partition", "account", "qos", "constraint", "exclude", "nodelist", "mem", "dependency")
GPU_OPTIONS = {"gres", "gpus-per-node", "gpus-per-socket"}
SINFO_SECONDS = 5.0  # for sinfo to answer
GPUS = re.compile(r"\bgpu(?::[^:,(]*[a-z][^:,(]*)?:(\d+)", re.IGNORECASE)
_BARE = re.compile(r"[A-Za-z0-9_./:=,@%+^-]*")


def options(config: RunConfig, out: Path) -> Options:
    """The options of the job that trains ``config`` in the run directory ``out``, an absolute path."""
    job = config.job
    found: Options = {
        "job-name": name(job.name or config.name),
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.gpus),
        "cpus-per-task": str(job.cpus_per_task) if job.cpus_per_task else None,
        **{name: getattr(job, name) for name in SAME_NAMES},
    }
    found = {option: value for option, value in found.items() if value is not None}
    if config.engine.device != "cpu" and not GPU_OPTIONS & job.options.keys():
        found["gpus-per-node"] = str(job.gpus)
        if not MEMORY_AND_CORES & job.options.keys():
            found = {**shares(job), **found}
    found["output"] = pattern(out / "logs") + "/job-%j.log"
    found["open-mode"] = "append"
    found |= {"requeue": "", "no-requeue": None} if job.requeue else {"requeue": None, "no-requeue": ""}
    found["signal"] = f"USR2@{job.warn_seconds}" if job.warn_seconds else None
    return found | job.options


def name(text: str) -> str:
    """``text`` as a job name that Slurm and shells print safely."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip("-")[:100] or "hpclm"


def pattern(path: Path) -> str:
    """``path`` in the syntax of Slurm's file names, without replacement symbols."""
    text = str(path)
    if not text.isprintable() or "\\" in text:
        raise ConfigError(
            f"run directory {text!r}: Slurm takes no backslash and no control character there; choose another out="
        )
    return text.replace("%", "%%")


def directive(option: str, value: str) -> str:
    """One #SBATCH line, for Slurm's own parser: in double quotes, \\ escapes a quote or itself."""
    if not value:
        return f"#SBATCH --{option}"
    if not _BARE.fullmatch(value):
        value = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    return f"#SBATCH --{option}={value}"


def set_in(script: str) -> Options:
    """The options that a script sets, by their long names."""
    return dict(re.findall(r'^#SBATCH --([a-z-]+)(?:="?([^"\n]*))?', script, re.MULTILINE))


def shares(job: JobConfig) -> dict[str, str]:
    """Options of sbatch for cores and memory where ``job`` has none: its GPUs' share of a node, by Slurm's own figures.

    Without a request many clusters give a process one core and a few hundred MB. {} where sinfo lists no nodes with
    GPUs.
    """
    if job.cpus_per_task is not None and job.mem is not None:
        return {}
    return of_nodes(job, _sinfo(job.partition))


def too_many_gpus(asked: Options) -> str | None:
    """Why no node has the GPUs ``asked`` for, by Slurm's own figures; None if that is not known, or one has them."""
    wanted, partition = asked.get("gpus-per-node") or "", asked.get("partition")
    most = max((gpus for *_, gpus in _nodes(_sinfo(partition))), default=0)
    if not wanted.isdecimal() or not 0 < most < int(wanted):
        return None
    return f"nodes of {partition or 'this cluster'} have at most {most} GPUs; --gpus {wanted} counts those of each node"


def _sinfo(partition: str | None) -> str:
    """sinfo's answer: cores, megabytes and generic resources of each kind of node; empty without one."""
    where = ["--partition", partition] if partition else []
    try:
        code, told, _ = slurm.ask(["sinfo", "--noheader", "--format=%c|%m|%G", *where], SINFO_SECONDS)
    except NoAnswerError:
        return ""
    return told if code == 0 else ""


def of_nodes(job: JobConfig, told: str) -> dict[str, str]:
    """The same from sinfo's answer ``told``: cores, megabytes and generic resources of each kind of node."""
    nodes = [node for node in _nodes(told) if node[2] >= job.gpus]
    if not nodes:
        return {}
    found = {}
    if job.cpus_per_task is None:
        found["cpus-per-task"] = str(max(1, min(cores // gpus for cores, _, gpus in nodes)))
    if job.mem is None:
        whole = all(gpus == job.gpus for *_, gpus in nodes)
        found["mem"] = "0" if whole else f"{min(memory * job.gpus // gpus for _, memory, gpus in nodes)}M"
    return found


def _nodes(told: str) -> Iterator[tuple[int, int, int]]:
    """Cores, megabytes and GPUs of each kind of node that has GPUs."""
    for line in told.splitlines():
        cores, memory, resources = (*line.split("|"), "", "")[:3]
        numbers = [re.match(r"\d+", text.strip()) for text in (cores, memory)]
        gpus = sum(map(int, GPUS.findall(resources)))
        if gpus and all(numbers):
            yield int(numbers[0][0]), int(numbers[1][0]), gpus  # type: ignore[index]
