"""The state of runs for all commands, from the runs' records, their processes on this machine, and their schedulers."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpclm.launch.schedulers import Scheduler, of_job, scheduler_named
from hpclm.node.job import Job
from hpclm.node.processes import NoAnswerError
from hpclm.rundir import runs as folders
from hpclm.rundir.runs import RunFacts, is_job
from hpclm.rundir.state import State, state_of

ASK = 60.0  # seconds between a command's questions to a scheduler, which many people may ask


class States:
    """Returns the state of runs at each call, and asks schedulers only every ASK seconds, or when there are new jobs."""

    def __init__(self, seconds: float):
        """``seconds``: the time for a scheduler to answer."""
        self.seconds = seconds
        self._silent = ""
        """Why a scheduler did not answer; "" if all did."""
        self._answers = dict[Scheduler, dict[str, Job]]()
        self._asked = -ASK
        self._known = set[str]()

    def __call__(self, out: Path) -> State:
        """The state of the run in ``out``."""
        return self.of([folders.read_run(out)])[0]

    def of(self, runs: Sequence[RunFacts]) -> list[State]:
        """The states of several runs. Each scheduler is asked once for all of them, at most once a minute."""
        jobs = {run.out: jobs_by_scheduler(run) for run in runs}
        ids = {job for each in jobs.values() for mine in each.values() for job in mine}
        if time.monotonic() - self._asked >= ASK or not ids <= self._known:
            self._asked = time.monotonic()
            self._known = ids
            self._ask(jobs.values(), sorted({run.owner for run in runs if jobs[run.out]}))
        return [self._state(run, jobs[run.out]) for run in runs]

    def _ask(self, jobs: Iterable[dict[Scheduler, list[str]]], owners: list[int]) -> None:
        asked = dict[Scheduler, set[str]]()
        for each in jobs:
            for scheduler, mine in each.items():
                asked.setdefault(scheduler, set()).update(mine)
        try:
            self._answers = {scheduler: scheduler.states(ids, owners, self.seconds) for scheduler, ids in asked.items()}
            self._silent = ""
        except NoAnswerError as silent:
            self._answers = {}
            self._silent = str(silent)

    def _state(self, run: RunFacts, jobs: dict[Scheduler, list[str]]) -> State:
        if jobs and self._silent:
            return state_of(run, None, self._silent)
        answers = ((job, self._answers.get(scheduler, {}).get(job)) for scheduler, mine in jobs.items() for job in mine)
        return state_of(run, {job: answer for job, answer in answers if answer})


def jobs_by_scheduler(run: RunFacts) -> dict[Scheduler, list[str]]:
    """Scheduler -> IDs of a run's jobs, oldest first. A job that hpclm did not submit is Slurm's."""
    submitted = {str(submission["job_id"]): submission for submission in run.submissions if is_job(submission)}
    jobs = dict[Scheduler, list[str]]()
    for job in run.jobs:
        scheduler = scheduler_named("slurm")
        if job in submitted:
            scheduler = of_job(submitted[job]["cluster"], submitted[job].get("slurm_cluster") or "", run.owner)
        jobs.setdefault(scheduler, []).append(job)
    return jobs


def state(out: Path, seconds: float = 5.0) -> State:
    """The state of the run in ``out``; its scheduler has ``seconds`` to answer."""
    return States(seconds)(out)
