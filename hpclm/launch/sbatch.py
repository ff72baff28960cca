"""Check a job script without submitting it; sbatch's errors in words."""

import re

from hpclm.errors import ConfigError, HpclmError
from hpclm.launch.options import Options
from hpclm.node import environment, processes
from hpclm.node.processes import NoAnswerError

# What sbatch says when it is not known whether the job is in the queue.
_UNANSWERED = re.compile(
    "unable to contact|connection|timed out|socket|communication|try again|temporarily|could not make sense",
    re.IGNORECASE,
)


class UnansweredError(HpclmError):
    """Slurm did not answer: the job may be in the queue, or not."""


def refused(said: str) -> HpclmError:
    """The error for what sbatch said."""
    words = (
        " ".join(re.sub(r"(sbatch|allocation failure): (error: )?", "", said).split())
        or "sbatch failed without a message"
    )
    if _UNANSWERED.search(said):
        return UnansweredError(
            f"Slurm did not answer: {words}; repeat the command: it checks the queue before it submits"
        )
    way_out = ""
    if "generic resource" in said:
        way_out = (
            "; if this cluster has no GPUs to ask for, engine.device=cpu; if it names them, job.options.gres=gpu:NAME:N"
        )
    return ConfigError(f"Slurm refuses the job: {words}{way_out}")


def rehearse(text: str, options: Options) -> str:
    """The answer of ``sbatch --test-only`` to a script that sets ``options``; ConfigError where it refuses the job."""
    command = [*environment.unset_command(options), "sbatch", "--test-only"]
    try:
        code, _, said = processes.ask(command, 60.0, text=text)
    except NoAnswerError as error:
        return f"sbatch --test-only: {error}"
    if code:
        objection = refused(said)
        if isinstance(objection, ConfigError):
            raise objection
        return str(objection)
    return " ".join(said.replace("sbatch: ", "").split())
