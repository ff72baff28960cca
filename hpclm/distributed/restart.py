"""Restarts of a job: what torchrun is told of a rank's end, and requeueing a job whose script can no longer do so."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpclm import files
from hpclm.distributed import bootstrap
from hpclm.errors import REQUEUE, HpclmError
from hpclm.node import slurm
from hpclm.node.processes import NoAnswerError

Env = Mapping[str, str]
RESTARTED = "HPCLM_RESTARTED"
"""Variable that says why torchrun has restarted the ranks."""
CAUSE = 500  # characters of it that are kept
SECONDS = 5.0  # that each of Slurm's commands may take

WITHOUT = """trap '' TERM
scontrol requeue "$1" || exit
for _ in 1 2 3; do scontrol update jobid="$1" excnodelist="$2" && exit; sleep 1; done; exit 1"""


def note(code: int, cause: str = "", env: Env = os.environ) -> None:
    """Leave this rank's exit code for torchrun, and the cause, in the file that it names; the first note counts."""
    path = Path(env.get("TORCHELASTIC_ERROR_FILE") or os.devnull)
    if code and not path.exists():
        lines = cause.strip().splitlines() or [f"a rank ended with exit code {code}"]
        cause = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1].strip()}"
        cause = "".join(c if c.isprintable() else " " for c in cause[:CAUSE])
        with suppress(OSError):
            now = time.time()
            content = {"message": cause, "timestamp": int(now), "time": now, "exit_code": code}
            files.write_text(path, json.dumps(content))


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
        return slurm.requeue(_name(env), env)
    except HpclmError:
        return False


def requeue_without(nodes: Sequence[str], env: Env = os.environ) -> bool:
    """Requeue this job, and have Slurm exclude ``nodes`` from its next start; whether it was asked to.

    Slurm changes the nodes of pending jobs only, so this comes after the request to requeue, which ends this step: the commands
    outlive its SIGTERM.
    """
    shown = _this_start(env)
    if "JobState=RUNNING" not in shown or "Requeue=1" not in shown:
        return False
    before = re.findall(r"\bExcNodeList=([^\s(]+)", shown)
    excluded = ",".join([*before, *nodes])
    try:
        code, _, _ = slurm.ask(["sh", "-c", WITHOUT, "sh", _name(env), excluded], 4 * SECONDS, env)
    except NoAnswerError:
        return False
    return code == 0


def report(code: int, parent: int, env: Env = os.environ) -> None:
    """End the step, or requeue the job, if this rank's slurmstepd (process ``parent``) is dead: srun would wait forever."""
    if os.getppid() == parent or "SLURM_STEP_ID" not in env or "JobState=RUNNING" not in _this_start(env):
        return
    job = _name(env)
    try:
        slurm.requeue(job, env) if code == REQUEUE else slurm.cancel(f"{job}.{env['SLURM_STEP_ID']}", env)
    except HpclmError:
        return  # hpclm cancel still can


def _name(env: Env) -> str:
    """What Slurm's commands call this job, and nothing but it: 12, or 9_3 for a task of the array 9, whose number is that of all."""
    return str(bootstrap.job(env)["job_id"])


def _this_start(env: Env) -> str:
    """What Slurm knows about this job; empty if it has restarted it meanwhile."""
    job = bootstrap.job(env)
    shown = _answer(["scontrol", "show", "job", "--oneliner", _name(env)], SECONDS, env) if job else ""
    # a rank that outlives a requeue sees the next start's state, on which it must not act
    return shown if re.search(rf"\bRestarts={job.get('restart')}\b", shown) else ""


def _answer(command: list[str], seconds: float, env: Env) -> str:
    try:
        code, output, _ = slurm.ask(command, seconds, env)
    except NoAnswerError:
        return ""
    return output if code == 0 else ""
