"""Restarts of a job: why Slurm restarted it, and requeueing a job whose script can no longer do so."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from hpclm import files
from hpclm.distributed import bootstrap
from hpclm.errors import REQUEUE, HpclmError
from hpclm.node import processes, slurm
from hpclm.node.processes import NoAnswerError

Env = Mapping[str, str]
RESTARTED = "HPCLM_RESTARTED"
"""Variable in which torchrun's agent says why it restarted the ranks."""
SECONDS = 5.0  # that each of Slurm's commands may take
TAIL = 1 << 16  # bytes at the end of a job's log that are searched
START = re.compile(r"start (\d+) of job \d+ on |.* I run directory .*((?:resumes|goes on) from step \d+|a new run)$")
CANCELLED = re.compile(r".*\*\*\* ((?:JOB|STEP) \S+ ON \S+ (?:CANCELLED AT \S+ DUE TO|FAILED) .*?)(?:, SEE .*)? \*\*\*")
KILLED = re.compile(r".*?(the job's script was killed \(JobLaunchFailure\))")
ENDED = re.compile(r"((?:srun|mpirun) ended with exit code (\d+))$")
REQUEUED = "DUE TO JOB REQUEUE"
FAULTY = re.compile(r"DOWN|DRAIN|FAIL|NOT_RESPONDING|REBOOT|POWER", re.IGNORECASE)


def reasons(hosts: Sequence[str] = (), env: Env = os.environ) -> list[str]:
    """Why the last start of this job ended, according to sacct, the job's log, and the state of the ``hosts`` it ran on.

    That its own script put the job back into the queue is no reason.
    """
    job = str(bootstrap.job(env).get("job_id", ""))
    logged, by_script = _logged(job, env)
    accounted = [text for state, text in _accounted(job, env) if not (by_script and state == "REQUEUED")]
    return [*accounted, *logged, *troubles(hosts, env=env)]


def inside_the_job(env: Env = os.environ) -> str:
    """Why torchrun's agent restarted the ranks; empty if it did not."""
    return env.get(RESTARTED, "")


def trouble(host: str, seconds: float = SECONDS, env: Env = os.environ) -> str:
    """A node's problem according to Slurm: ``node2 is DOWN (Not responding [root@...])``; empty if it has none."""
    return next(iter(troubles([host], seconds, env)), "")


def troubles(hosts: Sequence[str], seconds: float = SECONDS, env: Env = os.environ) -> list[str]:
    """The problems of those nodes that have one; Slurm is asked once for all of them."""
    nodes, found = ",".join(host.partition(".")[0] for host in hosts), []
    answer = _answer(["scontrol", "show", "node", "--oneliner", nodes], seconds, env) if hosts else ""
    for line in answer.splitlines():
        node, state = re.search(r"\bNodeName=(\S+)", line), re.search(r"\bState=(\S+)", line)
        if node and state and FAULTY.search(state[1]):
            reason = re.search(r"\bReason=(.*)", line)
            found.append(f"{node[1]} is {state[1]}" + (f" ({reason[1].strip()})" if reason else ""))
    return found


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


def _accounted(job: str, env: Env) -> Iterator[tuple[str, str]]:
    """The last start's state, and what sacct says of it."""
    fields = "State,ExitCode,NodeList,End"
    answer = _answer(
        ["sacct", "--duplicates", "--allocations", "-n", "-P", "-j", job, f"--format={fields}"], SECONDS, env
    )
    rows = [line.split("|") for line in answer.splitlines()]
    over = [row for row in rows if len(row) == 4 and row[0] not in ("PENDING", "RUNNING")]
    for state, code, nodes, end in over[-1:]:
        yield state, f"sacct says {state}, exit code {code}, on {nodes}, ended {end}"


def _logged(job: str, env: Env) -> tuple[list[str], bool]:
    """What Slurm and the job's script wrote to the job's log between its last two starts, and whether the script then put
    the job back into the queue."""
    try:
        path = slurm.job_log(job, SECONDS, env)
        with files.reader(path or "") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read(TAIL).decode(errors="replace").splitlines()
    except (OSError, NoAnswerError):
        return [], False
    starts = [number for number, line in enumerate(lines) if START.match(line)]
    now = str(int(bootstrap.job(env).get("restart", 0)) + 1)
    if starts and (found := START.match(lines[starts[-1]])) and found[1] == now:  # of the present start
        lines, starts = lines[: starts[-1]], starts[:-1]
    lines = lines[starts[-1] + 1 if starts else 0 :]
    cancelled = [(number, match[1]) for number, line in enumerate(lines) if (match := CANCELLED.match(line))]
    killed = [match[1] for line in lines if (match := KILLED.match(line))]
    ended = [(number, match) for number, line in enumerate(lines) if (match := ENDED.match(line))]
    # its own requeue kills the script, after srun has ended; anybody else's ends srun
    by_script = bool(ended and cancelled and ended[-1][0] < cancelled[-1][0] and cancelled[-1][1].endswith(REQUEUED))
    if by_script:
        cancelled = [each for each in cancelled if not each[1].endswith(REQUEUED)]
    code = int(ended[-1][1][2]) if ended else 0
    how = f": a process was {processes.killed_by(code - 128)}" if 128 < code < 160 else ""
    texts = [text for _, text in cancelled[-1:]] + killed[-1:] + [f"{match[1]}{how}" for _, match in ended[-1:]]
    return texts, by_script


def _answer(words: list[str], seconds: float, env: Env) -> str:
    try:
        code, output, _ = slurm.ask(words, seconds, env)
    except NoAnswerError:
        return ""
    return output if code == 0 else ""
