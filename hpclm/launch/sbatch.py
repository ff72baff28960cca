"""Check a job script without submitting it; sbatch's errors in words."""

import re

from hpclm.errors import ConfigError, HpclmError
from hpclm.launch.options import Options, too_many_gpus
from hpclm.node import environment, processes
from hpclm.node.processes import NoAnswerError

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
