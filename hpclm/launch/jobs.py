"""Which scheduler knows the jobs of a run, and how runs stand according to them."""

from collections.abc import Sequence

from hpclm.launch.schedulers import Scheduler, named, of_job
from hpclm.rundir.runs import Run, is_job
from hpclm.rundir.status import Queue, RunStatus


def jobs_by_scheduler(run: Run) -> dict[Scheduler, list[str]]:
    """The IDs of a run's jobs, oldest first, by the scheduler that knows them: that of its submission; Slurm, for one by hand."""
    submitted = {str(submission["job_id"]): submission for submission in run.submissions if is_job(submission)}
    jobs = dict[Scheduler, list[str]]()
    for job in run.jobs:
        scheduler = named("slurm")
        if job in submitted:
            scheduler = of_job(submitted[job]["cluster"], submitted[job].get("slurm_cluster") or "", run.owner)
        jobs.setdefault(scheduler, []).append(job)
    return jobs


def queue(seconds: float) -> Queue:
    """The status of runs, again and again; a scheduler has ``seconds`` to answer."""
    return Queue(jobs_by_scheduler, seconds)


def query(runs: Sequence[Run], seconds: float) -> list[RunStatus]:
    """The status of runs. Each scheduler is asked once for all of them, and has ``seconds`` to answer."""
    return queue(seconds).statuses(runs)
