"""What Slurm is asked and told, through its own commands; every call is bounded, and its answer may be garbage.

squeue and scontrol only: sacct needs a database that many clusters lack.
"""

import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, cast

from hpclm.cluster.process import OURS
from hpclm.errors import HpclmError

Env = Mapping[str, str]
FORMAT = "%i|%T|%M|%L|%S|%D|%N|%r"
MOST = 1 << 24  # bytes of an answer; what goes on longer is no answer
WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
RUNNING = frozenset({"RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT", "COMPLETING"})


class Silent(HpclmError):
    """Slurm is not here, does not answer in time, or its answer cannot be read."""


@dataclass(frozen=True)
class State:
    """A job as squeue shows it."""

    id: str
    """Number; of an array's task 12_3."""
    name: str
    """PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, CANCELLED, TIMEOUT, …"""
    elapsed: str
    """How long it runs, as Slurm writes it: D-HH:MM:SS."""
    left: str
    """Time until its limit, written the same way."""
    start: str
    """When it began, or is expected to: YYYY-MM-DDTHH:MM:SS, or N/A."""
    nodes: int
    nodelist: str
    reason: str
    """Why it waits, or how it ended."""

    @property
    def live(self) -> bool:
        """Whether it waits or runs."""
        return self.name in WAITING or self.name in RUNNING

    @property
    def waits(self) -> bool:
        """Whether it has no nodes yet."""
        return self.name in WAITING


def here(env: Env = os.environ) -> bool:
    """Whether Slurm's commands are installed."""
    return shutil.which("squeue", path=env.get("PATH")) is not None


def states(
    ids: Collection[str], users: Collection[int] = (), seconds: float = 10, env: Env = os.environ
) -> dict[str, State]:
    """Jobs among ``ids`` that Slurm still knows, also those that ended some minutes ago. Silent when it cannot be asked.

    ``users``: owners of the jobs, so that a large cluster need not list all it has.
    """
    if not ids:
        return {}
    only = ["-u", ",".join(map(str, users))] if users and len(ids) > 1 else ["-j", ",".join(sorted(ids))]
    code, answer, error = ask(["squeue", "-h", "-r", "-a", "-t", "all", "-o", FORMAT, *only], seconds, env)
    if code and "Invalid job id" in error:
        return {}
    if code:
        raise Silent(f"squeue: {_last_line(error) or f'exit code {code}'}")
    lines = answer.splitlines()
    found = [state for line in lines if (state := _state(line))]
    if lines and not found:
        raise Silent(f"squeue answered what cannot be read: {lines[0][:60]!r}")
    return {state.id: state for state in found if state.id in ids or state.id.partition("_")[0] in ids}


def steps(job: str, seconds: float = 10, env: Env = os.environ) -> list[str]:
    """Names of the steps that srun started in a job and that still run."""
    code, answer, error = ask(["squeue", "-h", "-s", "-j", job, "-o", "%i|%j"], seconds, env)
    if code:
        raise Silent(f"squeue: {_last_line(error) or f'exit code {code}'}")
    found = [line.strip().partition("|") for line in answer.splitlines()]
    return [name for step, _, name in found if re.fullmatch(r".*\.\d+", step)]


def job_log(job: str, seconds: float = 10, env: Env = os.environ) -> str | None:
    """Path of the file a job prints to, as Slurm knows it; None for one it has forgotten."""
    code, answer, _ = ask(["scontrol", "show", "job", job], seconds, env)
    found = re.search(r"^\s*StdOut=(.+)$", answer, re.MULTILINE)
    return found[1].strip() if found and not code else None


def update(job: str, env: Env = os.environ, **fields: str | int) -> bool:
    """Change a job: ``update("12", requeue=0)``; whether it could be changed."""
    words = [f"{name}={value}" for name, value in fields.items()]
    return persist(["scontrol", "update", f"jobid={job}", *words], env) == ""


def requeue(job: str, env: Env = os.environ) -> bool:
    """Put a running job back into the queue; whether it will be there, by this call or by Slurm's own doing."""
    wrong = persist(["scontrol", "requeue", job], env)
    return wrong == "" or "pending execution" in wrong


def send(job: str, name: str, whole: bool = False, env: Env = os.environ) -> bool:
    """Send the signal ``name`` to a job's steps, or to the ``whole`` job with its script; whether there was one to send it to."""
    return _gone_or(persist(["scancel", *(["--full"] if whole else []), "-s", name, job], env))


def signal_process(job: str, node: str, pid: int, name: str, seconds: float = 10, env: Env = os.environ) -> bool:
    """Send the signal ``name`` to one process of hpclm inside a running job, through a step beside its others."""
    step = [
        "srun",
        f"--jobid={job}",
        f"--nodelist={node}",
        "--overlap",
        "-N1",
        "-n1",
        "--mem=0",
        "--gres=none",
        "--quiet",
    ]
    act = f"tr '\\0' '\\n' < /proc/{int(pid)}/cmdline | grep -Eqx '{OURS}' && kill -s {name} {int(pid)}"
    outside = {key: value for key, value in env.items() if not re.match("SLURM_(?!CONF$|CLUSTERS$)|SRUN_", key)}
    try:
        return ask([*step, "--chdir=/", "/bin/sh", "-c", act], seconds, outside)[0] == 0
    except Silent:
        return False


def cancel(job: str, env: Env = os.environ) -> bool:
    """Take a job out of the queue: TERM to what runs, KILL some seconds later; whether there was one."""
    return _gone_or(persist(["scancel", job], env))


def persist(words: list[str], env: Env = os.environ, tries: int = 3, seconds: float = 10, pause: float = 1) -> str:
    """Give Slurm an order, again when it does not answer; what it objects, or "". Silent when it never answers."""
    for left in reversed(range(tries)):
        try:
            code, _, error = ask(words, seconds, env)
        except Silent:
            if not left:
                raise
        else:
            passing = re.search(
                "Unable to contact|timed out|temporarily|Connection refused|try again", error, re.IGNORECASE
            )
            if not (code and passing):
                return "" if not code else _last_line(error) or f"exit code {code}"
            if not left:
                raise Silent(f"{words[0]}: {_last_line(error)}")
        time.sleep(pause)
    raise AssertionError("unreachable")


def ask(words: list[str], seconds: float, env: Env = os.environ) -> tuple[int, str, str]:
    """Exit code, output and errors of a command that must end within ``seconds``; Silent when it does not, or is not there."""
    # SQUEUE_PARTITION, SCANCEL_INTERACTIVE and their like are for a person's own commands and would change these
    clean = {name: value for name, value in env.items() if not re.match("(SQUEUE|SCANCEL|SCONTROL)_", name)}
    clean |= {"SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
    until = time.monotonic() + seconds
    try:
        program = shutil.which(words[0], path=env.get("PATH")) or words[0]
        process = subprocess.Popen(
            [program, *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean,
            start_new_session=True,  # so that what it started in turn ends with it
        )
    except OSError as error:
        raise Silent(f"{words[0]}: {error.strerror}; is Slurm installed here?") from None
    try:
        output, errors = _read(process, until)
        return process.wait(max(0, until - time.monotonic())), output, errors
    except (TimeoutError, subprocess.TimeoutExpired):
        raise Silent(f"{words[0]} did not answer within {seconds:g} s") from None
    finally:
        for pipe in (process.stdout, process.stderr):
            cast(IO[bytes], pipe).close()
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)


def _read(process: subprocess.Popen[bytes], until: float) -> tuple[str, str]:
    """All a process prints; TimeoutError when it has not ended ``until`` then, or prints without end."""
    texts = {cast(IO[bytes], process.stdout): bytearray(), cast(IO[bytes], process.stderr): bytearray()}
    with selectors.DefaultSelector() as waiting:
        for pipe in texts:
            waiting.register(pipe, selectors.EVENT_READ)
        while waiting.get_map():
            ready = waiting.select(max(0, until - time.monotonic()))
            if not ready or time.monotonic() > until:
                raise TimeoutError
            for key, _ in ready:
                pipe = cast(IO[bytes], key.fileobj)
                part = os.read(pipe.fileno(), 1 << 16)
                texts[pipe] += part
                if not part:
                    waiting.unregister(pipe)
                if len(texts[pipe]) > MOST:
                    raise TimeoutError
    output, errors = (text.decode(errors="replace") for text in texts.values())
    return output, errors


def _state(line: str) -> State | None:
    parts = line.strip().split("|", 7)
    if len(parts) != 8 or not re.fullmatch(r"\d+(_\d+|\+\d+)?", parts[0]) or not re.fullmatch("[A-Z_]+", parts[1]):
        return None
    job, name, elapsed, left, start, nodes, nodelist, reason = parts
    return State(job, name, elapsed, left, start, int(nodes) if nodes.isdecimal() else 0, nodelist, reason)


def _gone_or(wrong: str) -> bool:
    """True when nothing was objected, False when the job is over already; HpclmError for any other objection."""
    if re.search("Invalid job id|already (completing|completed)|Job/step already", wrong, re.IGNORECASE):
        return False
    if wrong:
        raise HpclmError(f"Slurm refused: {wrong}")
    return True


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
