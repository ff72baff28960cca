"""Submit a run exactly once, even if this process is killed at any point.

The script is written under a new number before sbatch is called, and the queue shows its path. So the next submission finds an
unrecorded job by its script. A script without a job was never submitted.
"""

import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hpclm.base import files
from hpclm.base.errors import ConfigError, LockedError
from hpclm.checkpoint import resumable
from hpclm.config import RunConfig
from hpclm.config.compose import dumped
from hpclm.config.length import run_length
from hpclm.launch.schedulers import JobScript, Scheduler
from hpclm.node.job import Job
from hpclm.rundir import code, config_history, events, folder, lease, runs
from hpclm.rundir.rows import Row
from hpclm.rundir.runs import is_job
from hpclm.rundir.state import process_here

EXITS = 30.0  # seconds for a launch to exit after its run has ended
LOCK = Path("job", "lock")
"""The lock that is held while a run is submitted, or its launch recorded."""


def send(
    config: RunConfig,
    job_script: JobScript,
    command: Sequence[str],
    scheduler: Scheduler,
    again: bool = False,
    resume_step: int | None = None,
) -> tuple[Row, bool]:
    """Submit ``job_script``, which trains ``config`` in its run directory. Returns the recorded submission, and whether it is new.

    The submission is not new if an earlier call was killed between submitting and recording it. LockedError if a job of the run is
    in the queue, unless ``again``. ``resume_step``: the step of the checkpoint to continue from.
    """
    out = Path(config.out)
    text = job_script.text
    with _made(out), files.locked(out / LOCK) as lock:
        scripts = _scripts(out)
        for name in ("config.yaml", "job/submitit", f"job/script-{max(scripts, default=0) + 1}.sbatch"):
            files.sweep(out / name)  # a killed process may have left temporary files
        before = events.of_kind(events.read_or_refuse(out), "submitted")
        recorded = {Path(submission["script"]).name for submission in before if submission.get("script")}
        queued_jobs = _queued(out, _that_may_know(scheduler, text, before)) if scripts else []
        lost = [job for job in queued_jobs if Path(job.script).name not in recorded]
        for job in lost:
            _submitted(config, job.id, job.cluster, job.script, command)
        if lost and not again and _same(out, config, Path(lost[-1].script), text):
            return events.of_kind(events.read_events(out), "submitted")[-1], False
        if queued_jobs and not again:
            raise LockedError(
                f"{', '.join(map(str, queued_jobs))} of this run directory, {out}, is in the queue; hpclm logs -f follows it, "
                "hpclm cancel ends it, and --again submits another"
            )
        if not queued_jobs:
            refuse_in_use(out)
        if config.job.snapshot:
            code.keep(out, code.sources(config.modules()))
        script = out / "job" / f"script-{max(scripts, default=0) + 1}.sbatch"
        with _prepared(config, resume_step):
            files.write_text(script, text)
            try:
                job_id, _, cluster = scheduler.submit(job_script, script, lock).partition(";")
            except ConfigError:
                script.unlink()  # no job has been submitted
                raise
        _submitted(config, job_id, cluster, str(script), command)
        return events.of_kind(events.read_events(out), "submitted")[-1], True


@contextmanager
def _made(out: Path) -> Iterator[None]:
    """Make the run directory. If it is new, and the block raises ConfigError, remove it."""
    is_new = not out.exists()
    folder.make(out)
    try:
        yield
    except ConfigError:
        if is_new:
            shutil.rmtree(out, ignore_errors=True)
        raise


@contextmanager
def _prepared(config: RunConfig, resume_step: int | None) -> Iterator[None]:
    """Write the settings of an attempt, and the step to go back to, into the run directory before the block.

    If the block raises ConfigError, restore the former settings and step.
    """
    out = Path(config.out)
    replaced, _ = config_history.replace(out, dumped(config))
    asked = events.rollback(out)
    if resume_step is not None:
        events.append(out, "roll back", step=resume_step)
    try:
        yield
    except ConfigError:
        config_history.restore(out, replaced)
        if resume_step is not None:
            events.append(out, "roll back", step=asked)
        raise


@contextmanager
def claimed(config: RunConfig, resume_step: int | None = None) -> Iterator[None]:
    """Write the settings of a launch, and keep other launches and submissions out of the run directory during the block.

    ``resume_step``: see ``send``. LockedError, without any change, if a launch or run is using the run directory.
    """
    out = Path(config.out)
    folder.make(out)
    with files.locked(out / LOCK):
        refuse_in_use(out)
        with _prepared(config, resume_step):
            yield


def refuse_in_use(out: Path) -> None:
    """LockedError if a run is using ``out``, or a launch on this machine is still starting its ranks.

    After the end of a run, its launch has EXITS seconds to exit.
    """
    lease.refuse_if_held(out)
    until = time.monotonic() + EXITS
    while True:
        run = runs.read_run(out)
        pid = process_here(run)
        if pid is None:
            return
        if not run.end or time.monotonic() > until:
            raise lease.in_use(out, {"pid": pid, "host": socket.gethostname()})
        time.sleep(0.2)


def queued(out: Path, scheduler: Scheduler, seconds: float) -> list[Job]:
    """Pending and running jobs of the run directory ``out``; NoAnswerError if the scheduler does not answer within ``seconds``."""
    with files.locked(out / LOCK):  # waits for a submission that continues although its caller was killed
        return _queued(out, [scheduler], seconds)


def _queued(out: Path, schedulers: Iterable[Scheduler], seconds: float = 60) -> list[Job]:
    return [job for scheduler in schedulers for job in scheduler.queued(out / "job", seconds)]


def last_script(out: Path) -> str:
    """The text of the last script of the run directory ``out``; empty without a script."""
    with suppress(OSError, ValueError):
        return files.read_text(out / "job" / f"script-{max(_scripts(out), default=0)}.sbatch")
    return ""


def _that_may_know(scheduler: Scheduler, text: str, before: Iterable[Row]) -> list[Scheduler]:
    """``scheduler`` on the clusters of the script ``text`` and of the submissions ``before``."""
    if not isinstance(scheduler, Scheduler):  # the user's class with the same methods
        return [scheduler]
    earlier = [scheduler.on(submission.get("slurm_cluster") or "") for submission in before if is_job(submission)]
    return list(dict.fromkeys([*earlier, scheduler.for_script(text)]))


def _scripts(out: Path) -> list[int]:
    """The numbers of the job scripts in the run directory ``out``."""
    names = [path.stem.removeprefix("script-") for path in (out / "job").glob("script-*.sbatch")]
    return [int(number) for number in names if number.isdecimal()]


def _same(out: Path, config: RunConfig, script: Path, text: str) -> bool:
    """Whether the file ``script`` contains ``text``, and config.yaml the settings ``config``."""
    try:
        return files.read_text(script) == text and files.read_text(out / "config.yaml") == dumped(config)
    except (OSError, UnicodeDecodeError):
        return False


def _submitted(config: RunConfig, job_id: str, cluster: str, script: str, command: Sequence[str]) -> None:
    begin = resumable.progress(Path(config.out))
    events.append(
        Path(config.out),
        "submitted",
        cluster="slurm" if config.job.cluster == "auto" else config.job.cluster,
        job_id=job_id,
        slurm_cluster=cluster,
        host=socket.gethostname(),
        nodes=config.job.nodes,
        tasks_per_node=config.job.gpus,
        log=str(Path(config.out) / "logs" / f"job-{job_id}.log"),
        script=script,
        command=list(command),
        folder=str(Path.cwd()),
        steps=run_length(config, None, begin.position).steps,
    )
