"""Slurm as a scheduler. A separate process submits jobs through submitit. Slurm's commands do everything else."""

import contextlib
import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpclm.base.errors import ConfigError, ExitCode, HpclmError
from hpclm.base.terminal import say
from hpclm.launch.schedulers import JobScript, Scheduler
from hpclm.launch.schedulers import slurm_commands as slurm
from hpclm.node import environment, processes, python
from hpclm.node import slurm as variables
from hpclm.node.job import Job, OwnJob
from hpclm.node.processes import NoAnswerError
from hpclm.rundir import rows

if TYPE_CHECKING:
    from hpclm.config import RunConfig

QUEUE = "%i|%T|%r|%o"
SCRIPT = re.compile(r"/(script-\d+)(\.sbatch|/\.submission_file_\w+\.sh)")
"""The path of a job's script in its folder, or of submitit's copy of the script."""
SUBMISSION = 600.0  # seconds that sbatch may take while slurmctld is busy
MPI = ("orted", "prted", "prterun", "hydra_bstrap_proxy", "hydra_pmi_proxy")
"""Names of the steps that mpirun starts for its own daemons."""
SCRIPT_KILLED = "JobLaunchFailure"
"""The reason that Slurm shows once a job's script was killed. The job's processes may continue for a while."""
USUAL = {"", "None", "Priority", "Resources", "Dependency", "BeginTime", "JobHeldUser", "JobHeldAdmin"}
"""Reasons for waiting that need no warning."""
OF_ITS_OWN_JOB = 5.0  # seconds for each command that a process runs about its own job
ENDED = re.compile(r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ (?:DUE TO ([A-Z ]+?) )?\*\*\*")
"""The line that slurmstepd writes into a job's log when Slurm ends the job."""
WITHOUT = """trap '' TERM USR1 USR2
scontrol requeue "$1" || exit
for _ in 1 2 3; do scontrol update jobid="$1" excnodelist="$2" && exit; sleep 1; done; exit 1"""
WAYS_OUT = {
    "configuration source": "Slurm's commands are installed here, but no cluster is configured: set SLURM_CONF, or give "
    "--cluster local",
    "generic resource": "if this cluster has no GPUs to ask for, engine.device=cpu; if it names them, job.options.gres=gpu:NAME:N",
    "configuration is not available": "no node has all that was requested: --gpus counts those of each node; ask for fewer, "
    "for fewer cores of each (job.cpus_per_task) or less memory (job.mem)",
}
"""A part of sbatch's message -> the way out of the refusal."""


class Slurm(Scheduler):
    """Slurm, for one or several of its clusters."""

    name = "slurm"

    def __init__(self, clusters: str | None = None) -> None:
        """``clusters``: the clusters to ask, "a" or "a,b"; empty: this machine's cluster; None: as Slurm's variables say."""
        self._clusters = clusters

    @property
    def clusters(self) -> str:
        """The names of the clusters to ask, separated by commas."""
        return slurm.clusters() if self._clusters is None else self._clusters

    @property
    def env(self) -> dict[str, str]:
        """The environment for Slurm's commands."""
        return slurm.env_for(self.clusters)

    def on(self, cluster: str) -> "Slurm":
        """Slurm for ``cluster``; this object if it is for ``cluster`` already."""
        return self if cluster == self.clusters else _on(cluster)

    def for_script(self, script: str) -> "Slurm":
        """Slurm for the clusters that the script's --clusters names, or else Slurm's variables."""
        return self.on(slurm.clusters(slurm.options_in(script)))

    def script(self, run: "RunConfig", path: Path, setup: Sequence[str], command: Sequence[str]) -> JobScript:
        """The script that submitit writes."""
        from hpclm.launch.schedulers import slurm_script  # loads the settings

        return slurm_script.render(run, path, setup, command)

    def check(self, script: str) -> str:
        """The answer of ``sbatch --test-only``."""
        if not shutil.which("sbatch"):
            return ""
        env = environment.of_a_job(slurm.options_in(script))
        try:
            code, _, message = processes.ask(["sbatch", "--test-only"], 60.0, env, script)
        except NoAnswerError as error:
            return f"sbatch --test-only: {error}"
        if code:
            refusal = refused(message)
            if isinstance(refusal, ConfigError) and "no cluster is configured" not in str(refusal):
                raise refusal
            return f"this script was not checked: {refusal}"
        return " ".join(message.replace("sbatch: ", "").split())

    def submit(self, script: JobScript, path: Path, lock: int) -> str:
        """Run ``main`` in a separate process; then warn if the job waits for something unusual."""
        if not shutil.which("sbatch"):
            raise ConfigError("sbatch is not installed here; give --cluster local to train here")
        env = environment.of_a_job(slurm.options_in(script.text))
        target = self.for_script(script.text)
        command = python.command("hpclm.launch.schedulers.slurm", str(path))
        code, answer, message = processes.ask(command, SUBMISSION, env, json.dumps(script.parameters), [lock])
        if code:
            raise refused(message)
        job = target._job_of(path, answer.strip())
        cluster = target.clusters
        if not re.fullmatch(r"[\w-]*", cluster) or cluster == "all":
            queued = target.queued(path.parent, SUBMISSION)
            cluster = next((queued_job.cluster for queued_job in queued if queued_job.id == job), cluster)
        shown = slurm.shown(job, env=target.on(cluster).env)
        reason = shown.get("Reason", "")
        if shown.get("JobState") == "PENDING" and reason not in USUAL:
            say(
                f"warning: job {job} waits for {reason}; if that does not pass by itself, cancel it and request less",
                file=sys.stderr,
            )
        return f"{job};{cluster}" if cluster else job

    def _job_of(self, script: Path, answer: str) -> str:
        """The ID of the job of ``script``. ``answer``: the ID that submitit found.

        submitit may find a wrong ID in a line that the cluster adds, such as "your last job 12 took 3 hours".
        """
        if _submitted(slurm.shown(answer, env=self.env).get("Command", ""), script.parent) != script:
            with contextlib.suppress(NoAnswerError):
                return next((job.id for job in self.queued(script.parent, 60.0) if job.script == str(script)), answer)
        return answer

    def queued(self, scripts: Path, seconds: float) -> list[Job]:
        """The jobs that squeue lists with scripts in the folder ``scripts``."""
        command = ["squeue", "--me", "--noheader", "--array", "--format", QUEUE]
        code, answer, error = slurm.ask(command, seconds, self.env)
        if code:
            raise NoAnswerError(f"squeue: {error.strip() or f'exit code {code}'}; nothing was submitted")
        jobs = list[tuple[int, Job]]()
        for cluster, line in slurm.by_cluster(answer):
            job, state, reason, path = (*line.strip().split("|", 3), "", "", "")[:4]
            script = _submitted(path, scripts)
            if script:
                number = int(script.stem.removeprefix("script-"))
                found = Job(job, state, reason=reason, script=str(script), cluster=cluster or self.clusters)
                jobs.append((number, found))
        return [job for _, job in sorted(jobs, key=lambda numbered: numbered[0])]

    def states(self, ids: Collection[str], users: Collection[int] = (), seconds: float = 10) -> dict[str, Job]:
        """The jobs with these ``ids`` that squeue shows."""
        return slurm.states(ids, users, seconds, self.env)

    def stop(self, job: Job, attempt: Mapping[str, Any], seconds: float) -> None:
        """Signal the ranks of a running job, but not its script and mpirun, which exit after the ranks.

        scancel without a signal would kill the ranks some seconds later, even before they have saved.
        """
        slurm.update(job.id, self.env, requeue=0)
        host = str(attempt.get("host"))
        pid = int(attempt.get("pid", 0))
        if job.waits:
            slurm.cancel(job.id, self.env)
        elif any(name not in MPI for name in slurm.steps(job.id, seconds, self.env)):
            slurm.send(job.id, "TERM", env=self.env)
        elif str(attempt.get("job_id")) != job.id:  # it has just started, and has nothing to save
            slurm.cancel(job.id, self.env)
        elif not slurm.signal_process(job.id, host, pid, "TERM", env=self.env):
            # the ranks are children of the script, which forwards this signal to them
            slurm.send(job.id, "USR2", whole=True, env=self.env)

    def cancel(self, job: str) -> None:
        """Call scancel, and prevent a requeue."""
        slurm.update(job, self.env, requeue=0)
        slurm.cancel(job, self.env)

    def troubles(self, hosts: Sequence[str], seconds: float = 5) -> list[str]:
        """The problems that scontrol shows, in one call for all nodes."""
        return slurm.troubles(hosts, seconds, self.env)

    def own_job(self, env: Mapping[str, str]) -> OwnJob | None:
        """The job that Slurm's variables describe."""
        return variables.own_job(env)

    def requeue(self, job: OwnJob, without: Sequence[str] = ()) -> bool:
        """Call scontrol requeue, which Slurm may refuse (--no-requeue).

        Slurm changes only the nodes of pending jobs, so nodes are excluded after the requeue. The requeue ends this step, so a
        shell that ignores the step's signals runs both commands.
        """
        shown = slurm.show(job.id, OF_ITS_OWN_JOB, self.env)
        # a job that is being cancelled no longer runs; Requeue=0: started with --no-requeue
        runs = shown.get("JobState") == "RUNNING" or shown.get("Reason") == SCRIPT_KILLED
        if not runs or not _is_this_start(shown, job) or shown.get("Requeue") != "1":
            return False
        if not without:
            return slurm.requeue(job.id, self.env)
        before = shown.get("ExcNodeList", "").partition("(")[0]
        excluded = ",".join([*filter(None, [before]), *without])
        code, _, _ = slurm.ask(["sh", "-c", WITHOUT, "sh", job.id, excluded], 4 * OF_ITS_OWN_JOB, self.env)
        return code == 0

    def abandoned(self, job: OwnJob) -> str:
        """A text if the job's script, which would have requeued the job, was killed."""
        shown = self._this_start(job)
        if shown.get("Reason") == SCRIPT_KILLED and shown.get("Requeue") == "1":
            return f"the job's script was killed ({SCRIPT_KILLED})"
        return ""

    def ending(self, job: OwnJob, warned: float) -> str:
        """The reason in slurmstepd's last line of the job's log, or the time limit if little time is left."""
        shown = slurm.shown(job.id, OF_ITS_OWN_JOB, self.env)
        _, _, of_this_start = rows.tail(shown.get("StdErr", "")).rpartition(f"start {job.restart + 1} of ")
        said = ENDED.search(of_this_start)
        if said:
            return f"Slurm ends it: {(said[1] or 'cancelled').lower()}"
        with contextlib.suppress(ValueError):  # without a limit
            if time.mktime(time.strptime(shown.get("EndTime", ""), "%Y-%m-%dT%H:%M:%S")) < time.time() + warned:
                return "the job's time limit"
        return ""

    def end_step(self, job: OwnJob, code: int) -> None:
        """End the step, or requeue the job: the slurmstepd of this process is dead, so srun would wait forever."""
        step = os.environ.get(variables.STEP)
        if step is None or self._this_start(job).get("JobState") != "RUNNING":
            return
        if code == ExitCode.REQUEUE:
            slurm.requeue(job.id, self.env)
        else:
            slurm.cancel(f"{job.id}.{step}", self.env)

    def _this_start(self, job: OwnJob) -> dict[str, str]:
        """The fields that scontrol shows of a job; {} without an answer, or if Slurm has restarted it meanwhile."""
        shown = slurm.shown(job.id, OF_ITS_OWN_JOB, self.env)
        return shown if _is_this_start(shown, job) else {}


def _is_this_start(shown: Mapping[str, str], job: OwnJob) -> bool:
    """Whether scontrol shows the start that this process belongs to.

    A rank that outlives a requeue sees the state of the next start, and must not act on it.
    """
    return shown.get("Restarts") == str(job.restart)


@cache
def _on(clusters: str) -> Slurm:
    """Slurm for these clusters, always the same object."""
    return Slurm(clusters)


def _submitted(path: str, scripts: Path) -> Path | None:
    """The job script in the folder ``scripts`` that Slurm shows as ``path``; None if ``path`` is in another folder."""
    match = SCRIPT.search(path)
    if not match or match.end() != len(path) or Path(path[: match.start()]).resolve() != scripts.resolve():
        return None
    return scripts / f"{match[1]}.sbatch"


def refused(message: str) -> HpclmError:
    """The error for sbatch's ``message``: ConfigError for a refusal, HpclmError if the job may be in the queue."""
    lines = re.sub(r"(sbatch|allocation failure): (error: )?", "", message).splitlines()
    text = "; ".join(" ".join(line.split()) for line in lines if line.strip())
    text = text or "sbatch failed without a message"
    if slurm.UNANSWERED.search(message):
        return HpclmError(
            f"Slurm did not answer: {text}; repeat the command, which checks the queue before it submits, or train on this machine with --cluster local"
        )
    ways_out = [way_out for part, way_out in WAYS_OUT.items() if part in message]
    return ConfigError("; ".join([f"Slurm refuses the job: {text}", *ways_out]))


def main(script: Path) -> int:
    """Submit the job with the parameters on standard input, and print its ID."""
    from hpclm.launch.schedulers import slurm_script

    parameters = json.load(sys.stdin)
    folder = script.with_suffix("")  # submitit writes a script there, and the queue shows its path
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints errors before it raises them
            sys.stdout.write(slurm_script.submit(parameters, folder))
    except Exception as error:
        sys.stderr.write(str(error))
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
