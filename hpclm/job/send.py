"""A run into Slurm's queue, once: whatever this process is killed in the middle of, the next one finds out and goes on.

The script is written under a number of its own before sbatch is called, and its path is what the queue shows of the job. So
a job whose submission was never recorded is found again by its script, and a script without a job is known to be none.
"""

import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpclm import files
from hpclm.cluster import slurm
from hpclm.cluster.lock import Lock, refuse_if_held
from hpclm.config import RunConfig
from hpclm.config.compose import dumped
from hpclm.errors import ConfigError, LockedError
from hpclm.job import folder, ledger
from hpclm.job.ledger import Submission
from hpclm.job.options import options

QUEUE = "%i|%T|%r|%o"
_SCRIPT = re.compile(r"script-(\d+)\.sbatch")


@dataclass(frozen=True)
class Queued:
    """A job of the run that waits or runs."""

    job_id: str
    state: str
    reason: str
    script: Path

    def __str__(self) -> str:
        return f"job {self.job_id} ({self.state.lower()}{f': {self.reason}' * (self.reason != 'None')})"


def send(config: RunConfig, text: str, command: Sequence[str], again: bool = False) -> tuple[Submission, bool]:
    """Submit the script ``text``, which trains ``config`` in its run directory; the job, and whether it is a new one.

    It is not where an earlier submission of the very same was interrupted after Slurm had taken it. LockedError where a
    job of the run is in the queue, unless ``again``.
    """
    out = Path(config.out)
    folder.make(out)
    with files.locked(out / "job" / "lock"):
        scripts = _scripts(out)
        for name in ("config.yaml", "job/submitit", f"job/script-{max(scripts, default=0) + 1}.sbatch"):
            files.sweep(out / name)  # what a killed one has left
        recorded = {Path(each.script).name for each in ledger.read(out) if each.script}
        found = queued(out) if scripts else []
        lost = [job for job in found if job.script.name not in recorded]
        for job in lost:
            ledger.append(out, _submission(config, job.job_id, job.script, command))
        if lost and not again and _same(out, config, lost[-1].script, text):
            return ledger.read(out)[-1], False
        if found and not again:
            raise LockedError(
                f"{', '.join(map(str, found))} of this run directory, {out}, is in the queue; hpclm logs -f follows it, "
                "hpclm cancel ends it, and --again submits another"
            )
        if not found:
            refuse_if_held(out)
        script = out / "job" / f"script-{max(scripts, default=0) + 1}.sbatch"
        files.write_text(out / "config.yaml", dumped(config))
        files.write_text(script, text)
        from hpclm.job import queue

        try:
            job_id = queue.submit(script, options(config, out), out / "job" / "sbatch.lock")
        except ConfigError:
            script.unlink()  # there is no job, for certain
            raise
        ledger.append(out, _submission(config, job_id, script, command))
        return ledger.read(out)[-1], True


@contextmanager
def held(config: RunConfig) -> Iterator[None]:
    """Keep the run directory for a launch from here while the block runs, with the settings written into it.

    LockedError where another launch or run is using it: then nothing in it has changed.
    """
    out = Path(config.out)
    folder.make(out)
    with Lock(out, "job/launch"):
        refuse_if_held(out)
        files.write_text(out / "config.yaml", dumped(config))
        yield


def queued(out: Path, seconds: float = 60) -> list[Queued]:
    """Jobs of the run directory ``out`` that wait or run; slurm.Silent when Slurm does not answer within ``seconds``."""
    with files.locked(out / "job" / "sbatch.lock"):  # an sbatch whose caller was killed may still be at it
        pass
    code, answer, error = slurm.ask(["squeue", "--me", "--noheader", "--array", "--format", QUEUE], seconds=seconds)
    if code:
        raise slurm.Silent(f"squeue: {error.strip() or f'exit code {code}'}; nothing was submitted")
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
    """Whether ``script`` and the settings that were written for it are those that are wanted now."""
    try:
        return script.read_text() == text and (out / "config.yaml").read_text() == dumped(config)
    except OSError:
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
