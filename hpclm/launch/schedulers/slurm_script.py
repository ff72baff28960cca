"""The script of a Slurm job, which submitit writes: the job's options, its set-up, and the line that runs its supervisor.

submitit's own last line would run a pickled function. Here that line is a comment.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpclm.base import files, folders
from hpclm.base.errors import ConfigError
from hpclm.config import JobConfig, RunConfig
from hpclm.config.sbatch import OPTIONS, requesting
from hpclm.launch.schedulers import JobScript
from hpclm.launch.schedulers import slurm_commands as slurm
from hpclm.launch.schedulers.slurm_commands import Options
from hpclm.node import environment, processes
from hpclm.node import slurm as variables
from hpclm.node.processes import NoAnswerError

NODES_SECONDS = 5.0  # for scontrol to show all nodes
GPUS = re.compile(r"\bgpu(?::[^:,(]+)?:(\d+)", re.IGNORECASE)
STUB = "#!/bin/sh\necho Submitted batch job 1\n"
"""Takes the place of sbatch and srun, so that submitit writes a script without submitting it."""


def render(config: RunConfig, path: Path, setup: Sequence[str], command: Sequence[str]) -> JobScript:
    """The script of a job of ``config`` with the settings at ``path``, OUT/config.yaml: the lines of shell ``setup``, then ``command``.

    ConfigError if bash cannot parse it.
    """
    if config.job.restarts and config.job.template != "torchrun":
        raise ConfigError(f"job.restarts={config.job.restarts} needs job.template=torchrun, not {config.job.template}")
    options = options_of(config, path.parent)
    parameters = {
        "setup": [*setup],
        "python": f"exec {shlex.join(command)} #",
        "additional_parameters": {_key(name): _value(value) for name, value in options.items() if value is not None},
    }
    with folders.temporary_folder() as folder:
        for program in ("sbatch", "srun"):
            (folder / program).write_text(STUB)
            (folder / program).chmod(0o700)
        with environment.preserved():
            os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
            submit(parameters, folder / "job")
        # submitit's comment names a folder that will not exist when the job runs
        text, _, _ = files.read_text(folder / "job" / "1_submission.sh").rpartition(" # ")
        text += "\n"
    code, _, errors = processes.ask(["bash", "-n"], 30.0, text=text)
    if code or errors.strip():  # bash only warns of an unterminated here-document, which would swallow the rest
        raise ConfigError(f"bash cannot read the script with job.setup: {errors.strip()}")
    return JobScript(text, parameters)


def submit(parameters: Mapping[str, Any], folder: Path) -> str:
    """Submit a job through submitit, which writes the script into ``folder``; returns the job's ID."""
    from submitit import SlurmExecutor  # slow to load
    from submitit.helpers import CommandFunction

    executor = SlurmExecutor(folder, python=parameters["python"])
    executor.update_parameters(
        setup=parameters["setup"],
        additional_parameters=parameters["additional_parameters"],
        time=None,
        wckey=None,
        signal_delay_s=0,
        stderr_to_stdout=True,
        use_srun=False,
    )
    return str(executor.submit(CommandFunction(["true"])).job_id)


def _key(option: str) -> str:
    """An option's name in submitit, which would otherwise add its own parameter with this name."""
    return option if option == "open-mode" else option.replace("-", "_")


def _value(value: str) -> str | bool:
    """An option's value for submitit, which quotes it for a shell. To Slurm's parser a backslash escapes even inside quotes."""
    return value.replace("\\", "\\\\") if value else True


def options_of(config: RunConfig, out: Path) -> Options:
    """The options of the job that trains ``config`` in the run directory ``out``, an absolute path."""
    job = config.job
    options: Options = {
        option.name: str(value)
        for option in OPTIONS.values()
        if option.setting and (value := getattr(job, option.setting)) is not None
    }
    options["ntasks-per-node"] = str(job.gpus)
    if config.engine.device != "cpu" and not _asks_for_gpus(job):
        options["gpus-per-node"] = str(job.gpus)
        kinds = node_kinds(job)
        refuse_without_gpus(job, kinds)
        if not requesting("share") & job.options.keys():
            options = {**of_nodes(job, kinds), **options}
    options["output"] = pattern(out / "logs") + "/job-%j.log"
    options["open-mode"] = "append"
    options["requeue" if job.requeue else "no-requeue"] = ""
    options["propagate"] = "NONE"
    options["signal"] = f"USR2@{job.warn_seconds}"  # to the ranks, which srun starts as tasks of Slurm
    if job.template == "mpirun":  # to the supervisor, which forwards it
        options["signal"] = f"B:USR2@{job.warn_seconds}"
    return options | {"job-name": name(out.name)} | job.options


def _asks_for_gpus(job: JobConfig) -> bool:
    """Whether an option of ``job`` asks for GPUs; ConfigError if it asks for more or fewer than the job has processes."""
    asks = False
    for option in sorted(requesting("gpus") & job.options.keys()):
        count = _gpus_in(option, job.options[option])
        if count not in (None, 0, job.gpus):
            raise ConfigError(
                f"job.options.{option}={job.options[option]} asks for {count} GPUs of each node, but job.gpus={job.gpus}, one process "
                f"each; set job.gpus={count} (--gpus {count}), or change job.options.{option}"
            )
        asks = asks or count != 0
    return asks


def _gpus_in(option: str, value: str) -> int | None:
    """The number of GPUs of each node that an option of sbatch asks for.

    None if Slurm does not manage GPUs (gres=none), and for options that ask for parts of a GPU or do not count by node.
    """
    if option == "gpus-per-socket":
        return None
    items = [re.sub(r"^(gres[/:])", "", item.strip()).split(":") for item in value.split(",")]
    if option == "gpus-per-node":
        items = [["gpu", *item] for item in items]
    kinds = {item[0].lower() for item in items}
    if kinds & {"none", "mps", "shard"}:
        return None
    counts = [item[-1] for item in items if item[0].lower() == "gpu"]
    return sum(int(count) if count.isdecimal() else 1 for count in counts)


def name(text: str) -> str:
    """``text`` as a job name that Slurm and shells print safely, of letters and digits of any script and ``._-``."""
    return re.sub(r"[^\w.-]+", "_", text).lstrip("-")[:100] or "hpclm"


def pattern(path: Path) -> str:
    """``path`` in the syntax of Slurm's file names, without replacement symbols."""
    text = str(path)
    if not text.isprintable() or re.search(r"\\|%[jtAa]", text):
        raise ConfigError(
            f"run directory {text!r}: Slurm and submitit take no backslash, control character, %j, %t, %A or %a there; "
            "choose another out="
        )
    return text.replace("%", "%%")


def node_kinds(job: JobConfig) -> str:
    """A line with cores, megabytes and generic resources for each kind of node that ``job`` may get; "" if scontrol does not answer.

    The figures leave out cores and memory that a node keeps for the system; only scontrol shows these.
    """
    env = slurm.env_for(slurm.clusters(job.options))
    try:
        _, answer, _ = slurm.ask(["scontrol", "show", "node", "--oneliner"], NODES_SECONDS, env)
    except NoAnswerError:
        return ""
    kinds = dict[str, None]()
    chosen = set((job.partition or "").split(","))
    for line in answer.splitlines():
        node = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "CPUTot" in node and (not job.partition or chosen & set(node.get("Partitions", "").split(","))):
            memory = variables.number(node, "RealMemory") - variables.number(node, "MemSpecLimit")
            kinds[f"{node.get('CPUEfctv', node['CPUTot'])}|{memory}|{node.get('Gres')}\n"] = None
    return "".join(kinds)


def refuse_without_gpus(job: JobConfig, kinds: str) -> None:
    """ConfigError if no node has GPUs and Slurm would not notice: without `gpu` in GresTypes it ignores --gpus-per-node."""
    if not kinds.strip() or "gpu" in kinds.lower():
        return
    env = slurm.env_for(slurm.clusters(job.options))
    if "gpu" in slurm.setting("GresTypes", default="gpu", env=env).lower():
        return
    raise ConfigError(
        f"job.gpus={job.gpus}, but Slurm lists no GPUs on the nodes of {job.partition or 'this cluster'}: engine.device=cpu "
        "trains on the CPU; if the nodes have GPUs that Slurm does not manage, set job.options.gres=none"
    )


def of_nodes(job: JobConfig, kinds: str) -> dict[str, str]:
    """Options of sbatch for cores and memory that ``job`` does not set: its GPUs' share of a node, from Slurm's own figures.

    Without a request, many clusters give a process one core and a few hundred MB. {} if ``kinds`` has no node with enough GPUs.
    """
    nodes = []
    for cores, megabytes, resources in (line.split("|") for line in kinds.splitlines()):
        gpus = sum(map(int, GPUS.findall(resources)))
        if gpus >= job.gpus:
            nodes.append((int(cores), int(megabytes), gpus))
    options = {}
    if nodes and job.cpus_per_task is None:
        options["cpus-per-task"] = str(max(1, min(cores // gpus for cores, _, gpus in nodes)))
    if nodes and job.mem is None:
        options["mem"] = f"{min(memory * job.gpus // gpus for _, memory, gpus in nodes)}M"
        if all(gpus == job.gpus for *_, gpus in nodes):
            options["mem"] = "0"  # all memory of the node
    return options
