"""How an attempt ended that could not say so in summary.json, from the end of its log: killed, or before training began."""

import re
import signal
from collections.abc import Sequence
from pathlib import Path

from hpclm.node import processes
from hpclm.rundir.rows import tail
from hpclm.rundir.summary import TRACE, one_line

TAIL = 1 << 15  # bytes at the end of a log that are searched
CRASHES = {
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
    "Aborted": signal.SIGABRT,
}
# Lines of a run's or a job's log that tell how an attempt ended; the last such line counts.
ENDS = (
    ("failed", re.compile(r"\b(DUE TO (?:NODE FAILURE|NODE_FAIL).*?)(?: \*\*\*|$)")),
    ("ended", re.compile(r"\b(CANCELLED AT \S+ DUE TO .*?|CANCELLED AT \S+)(?: \*\*\*|$)")),
    ("ended", re.compile(rf"^srun: error: (\S+: tasks? \S+: (?:{'|'.join(CRASHES)}).*)$")),
    ("failed", re.compile(r"^(?:[-\d]* ?[\d:,]* E |error: )(.*)$")),
)
BEGINS = re.compile(r" run directory .*((?:resumes|goes on) from step \d+|a new run)$|^start \d+ of job \d+ on ")
TRAINS = re.compile(rf" I step \d+/?\d*  loss |{BEGINS.pattern}")
# srun's own words, and the script's, about what the line before told; and where in a script something went wrong.
NOISE = re.compile(
    r"(?:srun|mpirun) ended with|start \d+ of job \d+ on |srun: (?:Job step|Terminating|launch/slurm: )"
    r"|srun: error: \S+: tasks? \S+: (?:Exited|Terminated|Killed)|slurmstepd: error: \*\*\* "
)
PLACE = re.compile(r"^(?:bash|\S*/slurm_script): line \d+: ")
FAULT = re.compile(r"error|not found|cannot|can't|could not|no such|no module|denied|fail|fatal|fault", re.IGNORECASE)
TERMINATED = re.compile(r"(?:srun|mpirun) ended with exit code 143$")


def last_ending(log: Path | str) -> tuple[str, str]:
    """How the last attempt ended: its state, and the message in ``log``; empty if the log does not tell."""
    return ending(tail(log, TAIL).splitlines())


def ending(lines: Sequence[str]) -> tuple[str, str]:
    """The same from the last lines of a log."""
    cancelled = ("", "")
    for number in range(len(lines) - 1, -1, -1):
        if TRAINS.search(lines[number]):
            break  # lines before a step did not end the attempt
        for state, pattern in ENDS:
            match = pattern.search(lines[number])
            if not match:
                continue
            text = match[1].strip()
            if state == "failed":
                return state, one_line("\n".join([text, *lines[number + 1 :]])) if text.endswith(TRACE) else text
            if "DUE TO" in text:
                return state, text
            cancelled = (state, _crash_named(text))  # srun cancels the other ranks of one that has failed
            break
    return cancelled


def last_fault(log: Path | str) -> str:
    """What is probably why a job failed before training: the last line of its log that tells of a fault, otherwise the last one
    that is not about the end of processes; empty without one."""
    lines = [line.strip() for line in tail(log, TAIL).splitlines() if line.strip() and not NOISE.match(line)]
    faults = [line for line in lines if FAULT.search(line) or any(crash in line for crash in CRASHES)]
    return _crash_named(PLACE.sub("", (faults or lines or [""])[-1]))


def _crash_named(text: str) -> str:
    """``text`` with what shells and srun call a crash under the name of its signal."""
    for crash, number in CRASHES.items():
        text = re.sub(rf"{crash}( \(core dumped\))?", processes.killed_by(number), text)
    return text


def terminated(log: Path) -> bool:
    """Whether a job's log ends with the message that TERM ended what the script had started."""
    marks = [line for line in tail(log, TAIL).splitlines() if TERMINATED.match(line) or BEGINS.search(line)]
    return bool(marks) and TERMINATED.match(marks[-1]) is not None
