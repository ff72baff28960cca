"""Check a job script without submitting it, and a job that was submitted; sbatch's errors in words."""

import re
import sys
from collections.abc import Mapping
from contextlib import suppress

from hpclm.errors import ConfigError, HpclmError
from hpclm.launch.options import Options, too_many_gpus
from hpclm.node import environment, processes, slurm
from hpclm.node.processes import NoAnswerError
from hpclm.terminal import say

USUAL = {"", "None", "Priority", "Resources", "Dependency", "BeginTime", "JobHeldUser", "JobHeldAdmin"}
"""Reasons for which jobs wait as their owners expect."""
ASKED = {
    "Partition": "partition",
    "NumNodes": "nodes",
    "NumCPUs": "cores",
    "TimeLimit": "time",
    "Dependency": "dependency",
}
LIMITS = (
    "MaxNodes",
    "MaxTime",
    "MaxMemPerNode",
    "MaxMemPerCPU",
    "MaxCPUsPerNode",
    "AllowAccounts",
    "AllowQos",
    "TotalNodes",
)

# What sbatch says when it is not known whether the job is in the queue.
_UNANSWERED = re.compile(
    "unable to contact|connection|timed out|socket|communication|try again|temporarily|could not make sense",
    re.IGNORECASE,
)

UNCONFIGURED = "configuration source"


def refused(said: str, asked: Options) -> HpclmError:
    """The error for what sbatch said of a job with the options ``asked``: ConfigError, or HpclmError if the job may be in the
    queue, or not."""
    words = (
        " ".join(re.sub(r"(sbatch|allocation failure): (error: )?", "", said).split())
        or "sbatch failed without a message"
    )
    if _UNANSWERED.search(said):
        return HpclmError(f"Slurm did not answer: {words}; repeat the command: it checks the queue before it submits")
    if UNCONFIGURED in said:
        return ConfigError(
            "Slurm's commands are installed here, but no cluster is configured: set SLURM_CONF, or give --cluster local"
        )
    way_out = ""
    if "generic resource" in said:
        way_out = (
            "; if this cluster has no GPUs to ask for, engine.device=cpu; if it names them, job.options.gres=gpu:NAME:N"
        )
    elif "configuration is not available" in said and (largest := too_many_gpus(asked)):
        way_out = f"; {largest}"
    return ConfigError(f"Slurm refuses the job: {words}{way_out}")


def rehearse(text: str, asked: Options) -> str:
    """The answer of ``sbatch --test-only`` to a script with the options ``asked``; ConfigError where it refuses the job."""
    command = [*environment.unset_command(asked), "sbatch", "--test-only"]
    try:
        code, _, said = processes.ask(command, 60.0, text=text)
    except NoAnswerError as error:
        return f"sbatch --test-only: {error}"
    if UNCONFIGURED in said:
        return "Slurm has not checked this script: its commands are installed here, but no cluster is configured"
    if code:
        objection = refused(said, asked)
        if isinstance(objection, ConfigError):
            raise objection
        return str(objection)
    return " ".join(said.replace("sbatch: ", "").split())


def check_startable(job: str) -> None:
    """ConfigError if Slurm has accepted a job that it can never start; the job is cancelled then."""
    try:
        its = slurm.shown("job", job)
    except NoAnswerError:
        return
    reason = its.get("Reason", "")
    if its.get("JobState") != "PENDING" or reason in USUAL:
        return
    if not slurm.NEVER.fullmatch(reason):
        say(f"warning: job {job} waits for {reason}", file=sys.stderr)
        return
    asks = ", ".join(f"{name}={its[field]}" for field, name in ASKED.items() if its.get(field, "(null)") != "(null)")
    asks = re.sub(r"nodes=(\d+)-\1\b", r"nodes=\1", asks)
    slurm.cancel(job)
    raise ConfigError(
        f"Slurm can never start this job ({reason}), so it was cancelled: it asks for {asks}{_limits(its)}"
    )


def _limits(its: Mapping[str, str]) -> str:
    """The limits of the job's partition, in words; empty if Slurm does not answer."""
    with suppress(NoAnswerError):
        partition = slurm.shown("partition", its.get("Partition", ""))
        found = [
            f"{name}={partition[name]}" for name in LIMITS if partition.get(name, "ALL") not in ("ALL", "UNLIMITED")
        ]
        return f"; limits of the partition: {', '.join(found)}" if found else ""
    return ""
