"""Submit a job script with sbatch, through submitit. The only file that imports submitit, which is slow to load."""

import contextlib
import io
import shutil
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from hpclm import files
from hpclm.errors import ConfigError
from hpclm.launch.options import Options
from hpclm.launch.sbatch import refused
from hpclm.node import environment


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


def submit(script: Path, asked: Options, lock: Path) -> str:
    """Put the script into the queue and give the job's number; ``asked``: the options that it sets itself.

    ``lock`` is held for as long as sbatch lives, also when this process is killed. ConfigError: Slurm refused;
    another HpclmError: it is not known whether it did.
    """
    folder = files.aside(script.with_name("submitit"))
    folder.mkdir(0o700)
    held = ["flock", str(lock)] if shutil.which("flock") else []
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it then raises
            return ScriptExecutor(folder, script, [*held, *environment.unset_command(asked)]).send()
    except (FailedJobError, FailedSubmissionError) as error:
        raise refused(str(error), asked) from None
    except RuntimeError as error:
        raise ConfigError(f"{error} Give --cluster local to train here") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
