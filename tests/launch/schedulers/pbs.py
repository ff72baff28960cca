"""PBS as a scheduler of one's own, in one file: job.cluster=tests.launch.schedulers.pbs:Pbs. Its jobs are requeued, and resume."""

import json
import shlex
from pathlib import Path

from hpclm.base.errors import ConfigError
from hpclm.launch.schedulers import JobScript, Scheduler
from hpclm.node import processes
from hpclm.node.job import Job, OwnJob

STATES = {"Q": "PENDING", "H": "PENDING", "W": "PENDING", "R": "RUNNING", "S": "SUSPENDED", "E": "COMPLETING"}
SCRIPT = """#!/bin/bash
#PBS -N hpclm
#PBS -r y
exec >> {log}/job-$PBS_JOBID.log 2>&1
{setup}
export PBS_RUN_COUNT=$(qstat -f -F json "$PBS_JOBID" | sed -n 's/.*"run_count": *\\([0-9]*\\).*/\\1/p')
exec {command}
"""


class Pbs(Scheduler):
    def script(self, run, path, setup, command):
        log = path.parent.absolute() / "logs"
        lines = [f"mkdir -p {shlex.quote(str(log))}", *setup]
        return JobScript(SCRIPT.format(log=shlex.quote(str(log)), setup="\n".join(lines), command=shlex.join(command)))

    def check(self, script):
        return ""

    def submit(self, script, path, lock):
        code, answer, error = processes.ask(["qsub", str(path.absolute())], 60.0, keep=[lock])
        if code:
            raise ConfigError(f"qsub: {error.strip()}")
        return answer.strip()

    def queued(self, scripts, seconds):
        jobs = [(job, row["job_state"], Path(row["Submit_arguments"])) for job, row in self._jobs(seconds).items()]
        mine = [(job, state, path) for job, state, path in jobs if path.parent.resolve() == Path(scripts).resolve()]
        return [Job(job, STATES[state], script=str(path)) for job, state, path in mine if state in STATES]

    def states(self, ids, users=(), seconds=10):
        known = {job: row for job, row in self._jobs(seconds).items() if job in ids}
        return {
            job: Job(job, STATES.get(row["job_state"], "COMPLETED"), nodelist=row["exec_host"])
            for job, row in known.items()
        }

    def stop(self, job, attempt, seconds):
        processes.ask(["qdel", job.id], seconds)

    def cancel(self, job):
        processes.ask(["qdel", "-W", "force", job], 10.0)

    def troubles(self, hosts, seconds=5):
        return []

    def own_job(self, env):
        if "PBS_JOBID" not in env:
            return None
        hosts = tuple(dict.fromkeys(Path(env["PBS_NODEFILE"]).read_text().split()))
        restart = int(env.get("PBS_RUN_COUNT") or 1) - 1
        return OwnJob("PBS", env["PBS_JOBID"], restart, env.get("PBS_ARRAY_INDEX", ""), hosts)

    def requeue(self, job, without=()):
        return (
            not without and processes.ask(["qrerun", job.id], 10.0)[0] == 0
        )  # the nodes of a job are in its select statement

    def _jobs(self, seconds):
        code, answer, error = processes.ask(["qstat", "-f", "-F", "json"], seconds)
        if code:
            raise processes.NoAnswerError(f"qstat: {error.strip()}")
        return json.loads(answer)["Jobs"]
