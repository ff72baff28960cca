"""Slurm: jobs are submitted with sbatch, through submitit, which only this file imports, when it submits: it is slow to load."""

import contextlib
import io
import re
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpclm import files
from hpclm.errors import ConfigError, HpclmError
from hpclm.node import environment, processes, slurm
from hpclm.node.processes import NoAnswerError
from hpclm.node.slurm import JobState
from hpclm.scheduler import Queued, Scheduler
from hpclm.terminal import say

if TYPE_CHECKING:
    from hpclm.config import RunConfig

QUEUE = "%i|%T|%r|%o"
SCRIPT = re.compile(r"script-(\d+)\.sbatch")
MPI = ("orted", "prted", "prterun", "hydra_bstrap_proxy", "hydra_pmi_proxy")
"""Names of the steps that an mpirun starts for its own daemons."""
USUAL = {"", "None", "Priority", "Resources", "Dependency", "BeginTime", "JobHeldUser", "JobHeldAdmin"}
"""Reasons for which jobs wait as their owners expect."""
REQUESTS = {
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
UNANSWERED = re.compile(
    "unable to contact|connection|timed out|socket|communication|try again|temporarily|could not make sense",
    re.IGNORECASE,
)
UNCONFIGURED = "configuration source"


class Slurm(Scheduler):
    """Slurm, by its commands."""

    name = "slurm"

    def script(self, run: "RunConfig", path: Path, setup: Sequence[str]) -> str:
        """A template of slurm/, filled in."""
        from hpclm.scheduler import template  # with the settings

        return template.render(run, path, setup)

    def check(self, script: str) -> str:
        """The answer of ``sbatch --test-only``."""
        if not shutil.which("sbatch"):
            return ""
        requested = slurm.options_in(script)
        command = [*environment.unset_command(requested), "sbatch", "--test-only"]
        try:
            code, _, message = processes.ask(command, 60.0, text=script)
        except NoAnswerError as error:
            return f"sbatch --test-only: {error}"
        if UNCONFIGURED in message:
            return "Slurm has not checked this script: its commands are installed here, but no cluster is configured"
        if code:
            refusal = refused(message, requested)
            if isinstance(refusal, ConfigError):
                raise refusal
            return str(refusal)
        return " ".join(message.replace("sbatch: ", "").split())

    def submit(self, script: Path, lock: Path) -> str:
        """Submit with sbatch, then ask once whether the job can start."""
        from submitit.core.utils import FailedJobError, FailedSubmissionError
        from submitit.slurm.slurm import SlurmExecutor

        requested = slurm.options_in(files.read_text(script))
        prefix = ["flock", str(lock)] if shutil.which("flock") else []
        command = [*prefix, *environment.unset_command(requested), "sbatch", str(script)]

        class Executor(SlurmExecutor):
            """submitit's executor for an existing script, instead of a pickled function."""

            def _make_submission_file_text(self, command: str, uid: str) -> str:
                return files.read_text(script)

            def _make_submission_command(self, submission_file_path: Path) -> list[str]:
                return command

        folder = files.aside(script.with_name("submitit"))
        folder.mkdir(0o700)
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it then raises
                job = str(Executor(folder)._submit_command("").job_id)
        except (FailedJobError, FailedSubmissionError) as error:
            raise refused(str(error), requested) from None
        except RuntimeError as error:
            raise ConfigError(f"{error} Give --cluster local to train here") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._check_startable(job)
        return job

    def queued(self, scripts: Path, seconds: float) -> list[Queued]:
        """squeue shows the paths of scripts."""
        code, answer, error = slurm.ask(["squeue", "--me", "--noheader", "--array", "--format", QUEUE], seconds)
        if code:
            raise NoAnswerError(f"squeue: {error.strip() or f'exit code {code}'}; nothing was submitted")
        jobs = []
        for line in answer.splitlines():
            fields = line.strip().split("|", 3)
            script = Path(fields[3]) if len(fields) == 4 else Path()
            if SCRIPT.fullmatch(script.name) and script.parent.resolve() == scripts.resolve():
                jobs.append(Queued(fields[0], fields[1], fields[2], script))
        return sorted(jobs, key=lambda job: int(SCRIPT.sub(r"\1", job.script.name)))

    def states(self, ids: Collection[str], users: Collection[int] = (), seconds: float = 10) -> dict[str, JobState]:
        """From squeue."""
        return slurm.states(ids, users, seconds)

    def stop(self, job: JobState, attempt: Mapping[str, Any], seconds: float) -> None:
        """Signal the ranks of a running job, but not its script and mpirun, which exit after them.

        scancel without a signal would kill them some seconds later, whether they have saved or not.
        """
        slurm.update(job.id, requeue=0)
        if job.waits:
            slurm.cancel(job.id)
        elif any(name not in MPI for name in slurm.steps(job.id, seconds)):
            slurm.send(job.id, "TERM")
        elif str(attempt.get("job_id")) != job.id:  # it has just started, and has nothing to save
            slurm.cancel(job.id)
        elif not slurm.signal_process(job.id, str(attempt.get("host")), int(attempt.get("pid", 0)), "TERM"):
            slurm.send(job.id, "USR2", whole=True)  # the ranks are children of the script, which passes this signal on

    def cancel(self, job: str) -> None:
        """scancel; it is not requeued."""
        slurm.update(job, requeue=0)
        slurm.cancel(job)

    def troubles(self, hosts: Sequence[str], seconds: float = 5) -> list[str]:
        """From scontrol, asked once for all."""
        return slurm.troubles(hosts, seconds)

    def _check_startable(self, job: str) -> None:
        """ConfigError if Slurm has accepted a job that it can never start; the job is cancelled then."""
        try:
            shown = slurm.shown("job", job)
        except NoAnswerError:
            return
        reason = shown.get("Reason", "")
        if shown.get("JobState") != "PENDING" or reason in USUAL:
            return
        if not slurm.NEVER.fullmatch(reason):
            say(f"warning: job {job} waits for {reason}", file=sys.stderr)
            return
        values = {name: shown.get(field, "(null)") for field, name in REQUESTS.items()}
        requests = ", ".join(f"{name}={value}" for name, value in values.items() if value != "(null)")
        requests = re.sub(r"nodes=(\d+)-\1\b", r"nodes=\1", requests)
        limits = ""
        with contextlib.suppress(NoAnswerError):
            partition = slurm.shown("partition", shown.get("Partition", ""))
            limited = {name: partition.get(name, "ALL") for name in LIMITS}
            texts = [f"{name}={value}" for name, value in limited.items() if value not in ("ALL", "UNLIMITED")]
            limits = f"; limits of the partition: {', '.join(texts)}" if texts else ""
        slurm.cancel(job)
        raise ConfigError(
            f"Slurm can never start this job ({reason}), so it was cancelled: it asks for {requests}{limits}"
        )


def refused(message: str, requested: slurm.Options) -> HpclmError:
    """The error for sbatch's ``message`` about a job with these options: ConfigError, or HpclmError if the job may be in the
    queue, or not."""
    text = " ".join(re.sub(r"(sbatch|allocation failure): (error: )?", "", message).split())
    text = text or "sbatch failed without a message"
    if UNANSWERED.search(message):
        return HpclmError(f"Slurm did not answer: {text}; repeat the command: it checks the queue before it submits")
    if UNCONFIGURED in message:
        return ConfigError(
            "Slurm's commands are installed here, but no cluster is configured: set SLURM_CONF, or give --cluster local"
        )
    way_out = ""
    if "generic resource" in message:
        way_out = (
            "; if this cluster has no GPUs to ask for, engine.device=cpu; if it names them, job.options.gres=gpu:NAME:N"
        )
    elif "configuration is not available" in message:
        from hpclm.scheduler import template

        way_out = template.too_many_gpus(requested)
    return ConfigError(f"Slurm refuses the job: {text}{way_out}")
