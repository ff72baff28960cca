"""What sbatch says: its objections in words, and its opinion of a script without submitting it."""

import re
import subprocess

from hpclm.cluster import surrounding
from hpclm.errors import ConfigError, HpclmError
from hpclm.job.options import Options

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
        " ".join(re.sub(r"(sbatch|allocation failure): (error: )?", "", said).split()) or "sbatch failed without a word"
    )
    if _UNANSWERED.search(said):
        return UnansweredError(
            f"Slurm did not answer: {words}; the same command looks into the queue before it submits"
        )
    way_out = ""
    if "generic resource" in said:
        way_out = (
            "; if this cluster has no GPUs to ask for, engine.device=cpu; if it names them, job.options.gres=gpu:NAME:N"
        )
    return ConfigError(f"Slurm refuses the job: {words}{way_out}")


def rehearse(text: str, options: Options) -> str:
    """The answer of ``sbatch --test-only`` to a script that sets ``options``; ConfigError where it refuses the job."""
    command = [*surrounding.without(options), "sbatch", "--test-only"]
    try:
        done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"sbatch --test-only: {error}"
    said = done.stderr.decode(errors="replace")
    if done.returncode:
        objection = refused(said)
        if isinstance(objection, ConfigError):
            raise objection
        return str(objection)
    return " ".join(said.replace("sbatch: ", "").split())
