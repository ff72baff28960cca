"""Submit a job script with sbatch, through submitit, or only check it; sbatch's errors in words. The only file that imports
submitit."""

import contextlib
import io
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from hpclm import files
from hpclm.errors import ConfigError, HpclmError
from hpclm.node import environment, processes
from hpclm.node.processes import NoAnswerError

# What sbatch says when it is not known whether the job is in the queue.
_UNANSWERED = re.compile(
    "unable to contact|connection|timed out|socket|communication|try again|temporarily|could not make sense",
    re.IGNORECASE,
)


class ScriptExecutor(SlurmExecutor):
    """submitit's executor, for an existing script. What it would add is left out: another script, and a pickled function."""

    def __init__(self, folder: Path, script: Path, before: list[str]):
        """``folder`` is for submitit's own notes; the words ``before`` stand before sbatch."""
        super().__init__(folder)
        self.script, self.before = script, before

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return files.read_text(self.script)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [*self.before, "sbatch", str(self.script)]

    def send(self) -> str:
        """Submit, and give the job's number."""
        return str(self._submit_command("").job_id)


def submit(script: Path, options: Iterable[str], lock: Path) -> str:
    """Put the script into the queue and give the job's number; ``options`` are those that it sets itself.

    ``lock`` is held for as long as sbatch lives, also when this process is killed. ConfigError: Slurm refused;
    another HpclmError: it is not known whether it did.
    """
    folder = files.aside(script.with_name("submitit"))
    folder.mkdir(0o700)
    held = ["flock", str(lock)] if shutil.which("flock") else []
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it then raises
            return ScriptExecutor(folder, script, [*held, *environment.unset_command(options)]).send()
    except (FailedJobError, FailedSubmissionError) as error:
        raise refused(str(error)) from None
    except RuntimeError as error:
        raise ConfigError(f"{error} Give --cluster local to train here") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def refused(said: str) -> HpclmError:
    """The error for what sbatch said: ConfigError, or HpclmError if the job may be in the queue, or not."""
    words = (
        " ".join(re.sub(r"(sbatch|allocation failure): (error: )?", "", said).split())
        or "sbatch failed without a message"
    )
    if _UNANSWERED.search(said):
        return HpclmError(f"Slurm did not answer: {words}; repeat the command: it checks the queue before it submits")
    way_out = ""
    if "generic resource" in said:
        way_out = (
            "; if this cluster has no GPUs to ask for, engine.device=cpu; if it names them, job.options.gres=gpu:NAME:N"
        )
    return ConfigError(f"Slurm refuses the job: {words}{way_out}")


def rehearse(text: str, options: Iterable[str]) -> str:
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
