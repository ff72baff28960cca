"""What a job asks Slurm for: the settings as options of sbatch, and how they are written in a script."""

import re
from pathlib import Path

from hpclm.config import RunConfig
from hpclm.errors import ConfigError

Options = dict[str, str | None]
"""Long name -> value; an empty one is a flag, and None takes the option out of the template."""

GPU_OPTIONS = {"gres", "gpus-per-node", "gpus-per-socket"}
_BARE = re.compile(r"[A-Za-z0-9_./:=,@%+^-]*")


def options(config: RunConfig, out: Path) -> Options:
    """The options of the job that trains ``config`` in the run directory ``out``, an absolute path."""
    job = config.job
    found: Options = {
        "job-name": name(job.name or config.name),
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.gpus),
        "cpus-per-task": str(job.cpus_per_task) if job.cpus_per_task else None,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "exclude": job.exclude,
        "nodelist": job.nodelist,
        "mem": job.mem,
        "dependency": job.dependency,
    }
    found = {option: value for option, value in found.items() if value is not None}
    if config.engine.device != "cpu" and not GPU_OPTIONS & job.options.keys():
        found["gpus-per-node"] = str(job.gpus)
    found["output"] = pattern(out / "logs") + "/job-%j.log"
    found["open-mode"] = "append"
    found |= {"requeue": "", "no-requeue": None} if job.requeue else {"requeue": None, "no-requeue": ""}
    found["signal"] = f"USR2@{job.warn_seconds}" if job.warn_seconds else None
    return found | job.options


def name(text: str) -> str:
    """``text`` as a job's name: Slurm and the shell both print it."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip("-")[:100] or "hpclm"


def pattern(path: Path) -> str:
    """``path`` as Slurm's file names want it, with nothing in it for Slurm to fill in."""
    text = str(path)
    if not text.isprintable() or "\\" in text:
        raise ConfigError(
            f"run directory {text!r}: Slurm takes no backslash and no control character there; choose another out="
        )
    return text.replace("%", "%%")


def directive(option: str, value: str) -> str:
    """One #SBATCH line. Slurm's own parser reads it: double quotes hold everything, \\ keeps a quote or itself."""
    if not value:
        return f"#SBATCH --{option}"
    if not _BARE.fullmatch(value):
        value = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    return f"#SBATCH --{option}={value}"
