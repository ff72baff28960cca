"""Submit a run to Slurm exactly once: if this process is killed at any point, the next one finds out and continues.

The script is written under a new number before sbatch is called, and the queue shows its path. So a job whose
submission was not recorded is found by its script, and a script without a job was never submitted.
"""

import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpclm import files
from hpclm.config import RunConfig
from hpclm.config.compose import dumped
from hpclm.errors import ConfigError, LockedError
from hpclm.launch.options import set_in
from hpclm.launch.sbatch import check_startable
from hpclm.node import slurm
from hpclm.node.processes import NoAnswerError
from hpclm.rundir import code, config_history, folder, submissions
from hpclm.rundir.lock import Lock, refuse_if_held
from hpclm.rundir.submissions import Submission

QUEUE = "%i|%T|%r|%o"
_SCRIPT = re.compile(r"script-(\d+)\.sbatch")


@dataclass(frozen=True)
class Queued:
    """A pending or running job of the run."""

    job_id: str
    state: str
    reason: str
    script: Path

    def __str__(self) -> str:
        return f"job {self.job_id} ({self.state.lower()}{f': {self.reason}' * (self.reason != 'None')})"


def send(
    config: RunConfig, text: str, command: Sequence[str], again: bool = False, back_to: int | None = None
) -> tuple[Submission, bool]:
    """Submit the script ``text``, which trains ``config`` in its run directory; the job, and whether it is new.

    It is not new if the same submission was interrupted earlier, after Slurm had accepted it. LockedError if a job of
    the run is in the queue, unless ``again``. ``back_to``: the step of the checkpoint to continue from.
    """
    out = Path(config.out)
    folder.make(out)
    with files.locked(out / "job" / "lock"):
        scripts = _scripts(out)
        for name in ("config.yaml", "job/submitit", f"job/script-{max(scripts, default=0) + 1}.sbatch"):
            files.sweep(out / name)  # left by a killed process
        recorded = {Path(each.script).name for each in submissions.read(out) if each.script}
        found = queued(out) if scripts else []
        lost = [job for job in found if job.script.name not in recorded]
        for job in lost:
            submissions.append(out, _submission(config, job.job_id, job.script, command))
        if lost and not again and _same(out, config, lost[-1].script, text):
            return submissions.read(out)[-1], False
        if found and not again:
            raise LockedError(
                f"{', '.join(map(str, found))} of this run directory, {out}, is in the queue; hpclm logs -f follows it, "
                "hpclm cancel ends it, and --again submits another"
            )
        if not found:
            refuse_if_held(out)
        if config.job.snapshot:
            code.keep(out, config)
        script = out / "job" / f"script-{max(scripts, default=0) + 1}.sbatch"
        from hpclm.launch import queue

        with _prepared(config, back_to):
            files.write_text(script, text)
            try:
                job_id = queue.submit(script, set_in(text), out / "job" / "sbatch.lock")
                check_startable(job_id)
            except ConfigError:
                script.unlink()  # there certainly is no job
                raise
        submissions.append(out, _submission(config, job_id, script, command))
        return submissions.read(out)[-1], True


@contextmanager
def _prepared(config: RunConfig, back_to: int | None) -> Iterator[None]:
    """During the block, the run directory has the settings, and the step to roll back to, of the attempt that is being
    started; a ConfigError restores what was there before."""
    out = Path(config.out)
    replaced, asked = config_history.replace(out, dumped(config)), submissions.rollback(out)
    if back_to is not None:
        submissions.roll_back(out, back_to)
    try:
        yield
    except ConfigError:
        config_history.restore(out, replaced)
        if back_to is not None:
            submissions.withdraw_rollback(out) if asked is None else submissions.roll_back(out, asked)
        raise


@contextmanager
def held(config: RunConfig, back_to: int | None = None) -> Iterator[None]:
    """Lock the run directory for a local launch during the block, with its settings written.

    ``back_to``: as in ``send``. LockedError if another launch or run is using it; nothing has changed then.
    """
    out = Path(config.out)
    folder.make(out)
    with Lock(out, "job/launch"):
        refuse_if_held(out)
        with _prepared(config, back_to):
            yield


def queued(out: Path, seconds: float = 60) -> list[Queued]:
    """Pending and running jobs of the run directory ``out``; NoAnswerError if Slurm does not answer within ``seconds``."""
    with files.locked(out / "job" / "sbatch.lock"):  # an sbatch whose caller was killed may still be running
        pass
    code, answer, error = slurm.ask(["squeue", "--me", "--noheader", "--array", "--format", QUEUE], seconds=seconds)
    if code:
        raise NoAnswerError(f"squeue: {error.strip() or f'exit code {code}'}; nothing was submitted")
    ours = (out / "job").resolve()
    found = []
    for line in answer.splitlines():
        parts = line.strip().split("|", 3)
        script = Path(parts[3]) if len(parts) == 4 else Path()
        if _SCRIPT.fullmatch(script.name) and script.parent.resolve() == ours:
            found.append(Queued(parts[0], parts[1], parts[2], script))
    return sorted(found, key=lambda job: _number(job.script))


def _scripts(out: Path) -> list[int]:
    return [_number(path) for path in (out / "job").glob("script-*.sbatch") if _SCRIPT.fullmatch(path.name)]


def _number(script: Path) -> int:
    found = _SCRIPT.fullmatch(script.name)
    return int(found[1]) if found else 0


def _same(out: Path, config: RunConfig, script: Path, text: str) -> bool:
    """Whether ``script`` and its settings are the present ones."""
    try:
        return files.read_text(script) == text and files.read_text(out / "config.yaml") == dumped(config)
    except (OSError, UnicodeDecodeError):
        return False


def _submission(config: RunConfig, job_id: str, script: Path, command: Sequence[str]) -> Submission:
    return Submission(
        cluster="slurm",
        job_id=job_id,
        host=socket.gethostname(),
        nodes=config.job.nodes,
        tasks_per_node=config.job.gpus,
        log=str(Path(config.out) / "logs" / f"job-{job_id}.log"),
        script=str(script),
        command=list(command),
        folder=str(Path.cwd()),
    )
