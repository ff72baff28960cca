"""``hpclm evaluate RUN --tasks ... --follow``: score each checkpoint of a run as it is published, until the run has ended."""

import argparse
import logging
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hpclm import extras, files, log
from hpclm.config import ParallelConfig
from hpclm.errors import REQUEUE
from hpclm.launch import jobs, schedulers
from hpclm.node import secrets
from hpclm.node.job import Job
from hpclm.node.preemption import WARNINGS, Preemption
from hpclm.rundir import folder, lock, metrics_file, runs
from hpclm.rundir.lease import Lease
from hpclm.terminal import say

logger = logging.getLogger(__name__)
POLL = 10.0  # seconds between looks for new checkpoints
PATIENCE = 5.0  # seconds a scheduler may take
OVER = ("done", "stopped", "exited", "failed", "ended")
"""Statuses in which nothing trains the run, and nothing is going to."""


def main(args: argparse.Namespace) -> int:
    """Follow the run; the exit code is 85 after a signal: the same command continues."""
    from hpclm.inference import run_settings, task_names

    config = run_settings.settings(args.run, args.settings)
    task_names.check(args.tasks.split(","), args.tasks_path)

    with extras.needed_for("evaluation on tasks"):
        from hpclm.inference.follow import Follower, Interrupted
        from hpclm.inference.harness import Tasks
    runs.check_own(args.run, "scored")
    log.setup(0, redact=secrets.Redactor())
    tasks = Tasks(args.tasks.split(","), args.tasks_path, args.samples, args.shots)
    queue = jobs.queue(PATIENCE)
    job = schedulers.current_job(config.job.cluster)
    with lock.held(args.run, metrics_file.SCORES_LOCK, job), Preemption() as preemption:
        follower = Follower(args.run, config, tasks, args.batch or 16)

        def interrupted() -> bool:
            return any(preemption.seconds(number.name) for number in WARNINGS)

        try:
            while True:
                [status] = queue.statuses([runs.read(args.run)])  # before a last look for checkpoints
                follower.score_new(interrupted)
                if status.name in OVER:
                    break
                wait(POLL, interrupted)
        except Interrupted:
            logger.info("interrupted; the same command scores the checkpoints that are left")
            return REQUEUE
        if status.name == "done":
            complete(args.run, job)
    logger.info("%s is %s, and its checkpoints are scored: %s/scores.jsonl", args.run, status.name, args.run)
    if status.name == "done":
        logger.info("hpclm sync %s sends the last scores to the run's sinks", files.typed(args.run))
    return 0


def submit(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Submit a job of one process, with the job settings of the run's last job, that follows the run.

    ``words``: the arguments of ``hpclm evaluate``, without --submit.
    """
    from hpclm import config
    from hpclm.inference import task_names
    from hpclm.launch import setup

    runs.check_own(args.run, "scored")
    task_names.check(args.tasks.split(","), args.tasks_path)
    out = args.run.absolute()
    run = config.load(out / "config.yaml", list(args.settings))
    job = replace(run.job, nodes=1, gpus=1, restarts=0, snapshot=False, template="srun")
    run = replace(run, name=f"{run.name}-scores", job=job, parallel=ParallelConfig())
    scheduler = schedulers.named("slurm" if job.cluster in ("auto", "local", "mpirun", "srun") else job.cluster)
    script = out / "job" / f"evaluate-{time.strftime('%Y%m%d-%H%M%S')}.sbatch"
    text = scheduler.script(
        run, out / "config.yaml", [*setup.lines(run, script), f"set -- evaluate {shlex.join(words)}"]
    )
    folder.make(out)
    files.write_text(script, text.replace("hpclm.train", "hpclm"))
    job_id = scheduler.submit(script, script.with_name("sbatch.lock")).partition(";")[0]
    say(
        f"submitted job {job_id}, which scores the run's checkpoints; its log: {files.shown(out)}/logs/job-{job_id}.log"
    )
    return 0


def wait(seconds: float, interrupted: Callable[[], bool]) -> None:
    """Wait, but not after a signal; Interrupted then."""
    from hpclm.inference.follow import Interrupted

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if interrupted():
            raise Interrupted
        time.sleep(min(0.2, seconds))


def complete(out: Path, job: Job) -> None:
    """Copy the scores that a run has not copied before it was done to its metrics.jsonl."""
    with Lease(out, job=job):
        metrics_file.copy_scores(out)
