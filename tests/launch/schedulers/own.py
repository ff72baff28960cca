"""A scheduler of one's own, in one file: a job is a script in the background, and the queue a folder of process numbers."""

import os
import shlex
import signal
import subprocess
from pathlib import Path

from hpclm.launch.schedulers import JobScript, Scheduler
from hpclm.node import processes
from hpclm.node.job import Job


class Own(Scheduler):
    def script(self, run, path, setup, command):
        return JobScript("\n".join(["#!/bin/bash", *setup, f"exec {shlex.join(command)}", ""]))

    def check(self, script):
        return "it looks well"

    def submit(self, script, path, lock):
        log = (path.parent.parent / "logs").resolve()
        log.mkdir(exist_ok=True)
        with (log / "own.log").open("w") as output:
            job = subprocess.Popen(["bash", path], stdout=output, stderr=output, start_new_session=True)
        path.with_suffix(".pid").write_text(str(job.pid))
        return str(job.pid)

    def queued(self, scripts, seconds):
        jobs = {path.read_text(): path.with_suffix(".sbatch") for path in Path(scripts).glob("*.pid")}
        return [Job(job, "RUNNING", script=str(jobs[job])) for job in self.states(jobs)]

    def states(self, ids, users=(), seconds=10):
        return {job: Job(job, "RUNNING") for job in ids if processes.started(int(job)) is not None}

    def stop(self, job, attempt, seconds):
        os.kill(int(job.id), signal.SIGTERM)

    def cancel(self, job):
        os.kill(int(job), signal.SIGKILL)

    def troubles(self, hosts, seconds=5):
        return []
