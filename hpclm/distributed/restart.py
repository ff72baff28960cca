"""Restarts of a job: why Slurm restarted it, and requeueing a job whose script can no longer do so."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpclm import files, scheduler
from hpclm.distributed import bootstrap
from hpclm.errors import REQUEUE, HpclmError
from hpclm.node import processes, slurm
from hpclm.node.processes import NoAnswerError

Env = Mapping[str, str]
RESTARTED = "HPCLM_RESTARTED"
"""Variable that says why torchrun has restarted the ranks."""
CAUSE = 500  # characters of it that are kept
SECONDS = 5.0  # that each of Slurm's commands may take
TAIL = 1 << 16  # bytes at the end of a job's log that are searched
START = re.compile(r"start (\d+) of job \d+ on ")
EVENT = re.compile(
    r".*\*\*\* (?P<cancelled>(JOB|STEP) \S+ ON \S+ (CANCELLED AT \S+ DUE TO|FAILED) .*?)(, SEE .*)? \*\*\*"
    r"|.*?(?P<killed>the job's script was killed \(JobLaunchFailure\))"
    r"|(?P<ended>(srun|mpirun) ended with exit code (?P<code>\d+))$"
)


def reasons(hosts: Sequence[str] = (), env: Env = os.environ) -> list[str]:
    """Why the last start of this job ended, according to the job's log and the state of the ``hosts`` it ran on."""
    events: dict[str, str] = {}
    for event in filter(None, map(EVENT.match, _last_start(env))):
        kind = next(name for name in ("cancelled", "killed", "ended") if event[name])
        if "ended" in events and event[kind].endswith("DUE TO JOB REQUEUE"):
            continue  # by its own script, once srun had ended: no reason
        code = int(event["code"] or 0)
        events[kind] = event[kind] + (f": a process was {processes.killed_by(code - 128)}" if 128 < code < 160 else "")
    return [*events.values(), *scheduler.named("slurm").troubles(hosts, SECONDS)]


def note(code: int, cause: str = "", env: Env = os.environ) -> None:
    """Leave this rank's exit code for torchrun, and the cause, in the file that it names; the first note counts."""
    path = Path(env.get("TORCHELASTIC_ERROR_FILE") or os.devnull)
    if code and not path.exists():
        lines = cause.strip().splitlines() or [f"a rank ended with exit code {code}"]
        cause = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1].strip()}"
        cause = "".join(c if c.isprintable() else " " for c in cause[:CAUSE])
        with suppress(OSError):
            files.write_text(path, json.dumps({"message": cause, "timestamp": int(time.time()), "exit_code": code}))


def inside_the_job(env: Env = os.environ) -> str:
    """Why torchrun restarted the ranks; empty if it did not."""
    return env.get(RESTARTED, "")


def abandoned(env: Env = os.environ) -> bool:
    """Whether this job's script was killed, after which Slurm would end the job although it may be requeued.

    If so, the job is requeued, as its script would have done.
    """
    shown = _this_start(env)
    if "Reason=JobLaunchFailure" not in shown or "Requeue=1" not in shown:
        return False
    try:
        return slurm.requeue(env["SLURM_JOB_ID"], env)
    except HpclmError:
        return False


def report(code: int, parent: int, env: Env = os.environ) -> None:
    """End the step, or requeue the job, if this rank's slurmstepd (process ``parent``) is dead: srun would wait forever."""
    if os.getppid() == parent or "SLURM_STEP_ID" not in env or "JobState=RUNNING" not in _this_start(env):
        return
    job = env["SLURM_JOB_ID"]
    try:
        slurm.requeue(job, env) if code == REQUEUE else slurm.cancel(f"{job}.{env['SLURM_STEP_ID']}", env)
    except HpclmError:
        return  # hpclm cancel still can


def _this_start(env: Env) -> str:
    """What Slurm knows about this job; empty if it has restarted it meanwhile."""
    job = bootstrap.job(env)
    shown = _answer(["scontrol", "show", "job", "--oneliner", env["SLURM_JOB_ID"]], SECONDS, env) if job else ""
    return shown if re.search(rf"\bRestarts={job.get('restart')}\b", shown) else ""


def _last_start(env: Env) -> list[str]:
    """The lines of the job's log between its last two starts."""
    job = str(bootstrap.job(env).get("job_id", ""))
    try:
        path = slurm.shown("job", job, SECONDS, env).get("StdOut")
        with files.reader(path or "") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read(TAIL).decode(errors="replace").splitlines()
    except (OSError, NoAnswerError):
        return []
    starts = [(number, match[1]) for number, line in enumerate(lines) if (match := START.match(line))]
    if starts and starts[-1][1] == str(int(bootstrap.job(env).get("restart", 0)) + 1):  # the present start
        lines = lines[: starts.pop()[0]]
    return lines[starts[-1][0] + 1 if starts else 0 :]


def _answer(command: list[str], seconds: float, env: Env) -> str:
    try:
        code, output, _ = slurm.ask(command, seconds, env)
    except NoAnswerError:
        return ""
    return output if code == 0 else ""
