"""A run's logs: read and follow them, and how the last attempt ended according to them."""

import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from hpclm import files
from hpclm.node import processes
from hpclm.rundir.rows import tail

BLOCK = 1 << 18
LONGEST = 1 << 20  # bytes of a line; a file need not have lines
PAUSE = 0.2  # seconds between reads of a log that has not grown
ASK = 2.0  # seconds between checks whether the run is over


def matching(lines: Iterable[bytes], pattern: str | None) -> Iterator[bytes]:
    """Lines that ``pattern`` is found in; all without one."""
    wanted = re.compile(pattern or "")
    return (line for line in lines if pattern is None or wanted.search(line.decode(errors="replace").rstrip("\r\n")))


def whole(path: Path) -> Iterator[bytes]:
    """Every line of a file; very long ones in pieces."""
    with files.reader(path) as file:
        yield from iter(lambda: file.readline(LONGEST), b"")


def last(path: Path, count: int, pattern: str | None = None) -> list[bytes]:
    """The last ``count`` lines of a file that match."""
    with files.reader(path) as file:
        return _last(file, file.seek(0, os.SEEK_END), count, pattern)


def follow(path: Path, count: int, pattern: str | None, over: Callable[[], bool]) -> Iterator[bytes]:
    """The last ``count`` lines, then every new line, until ``over`` is true and nothing was written since.

    Like ``tail -F``: a file that is replaced or truncated is read from its beginning, and a missing one is waited for.
    """
    file: BinaryIO | None = None
    rest, asked, ending = b"", time.monotonic(), False
    try:
        with suppress(OSError):
            file = files.reader(path)
            end = _whole_lines(file)
            yield from _last(file, end, count, pattern)
            file.seek(end)
        while True:
            if file is None:
                with suppress(OSError):
                    file = files.reader(path)
            part = file.read(BLOCK) if file else b""
            if part:
                lines, newline, rest = (rest + part).rpartition(b"\n")
                yield from matching([line + b"\n" for line in lines.split(b"\n")] if newline else [], pattern)
                if len(rest) > LONGEST:
                    yield from matching([rest], pattern)
                    rest = b""
            elif file and _replaced(file, path):
                file.close()
                file, rest = None, b""
            elif ending:
                yield from matching([rest] if rest else [], pattern)
                return
            elif time.monotonic() - asked > ASK:
                ending, asked = over(), time.monotonic()  # what was written meanwhile is read once more
            else:
                if rest and pattern is None:  # a line that is still being written
                    yield rest
                    rest = b""
                pause(PAUSE)
    finally:
        if file:
            file.close()


def pause(seconds: float) -> None:
    """Wait; BrokenPipeError as soon as standard output is closed."""
    try:
        watched = select.poll()
        watched.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError, AttributeError):
        time.sleep(seconds)
        return
    if watched.poll(seconds * 1000):
        raise BrokenPipeError


def _whole_lines(file: BinaryIO) -> int:
    """Where the last whole line of a file ends."""
    size = file.seek(0, os.SEEK_END)
    begin = max(0, size - BLOCK)
    file.seek(begin)
    return begin + file.read(size - begin).rfind(b"\n") + 1


def _replaced(file: BinaryIO, path: Path) -> bool:
    """Whether ``path`` is another file now, or shorter than what was read of it."""
    try:
        now, held = path.stat(), os.fstat(file.fileno())
    except OSError:
        return False  # still the one to read, until another takes its name
    return (now.st_dev, now.st_ino) != (held.st_dev, held.st_ino) or now.st_size < file.tell()


def _last(file: BinaryIO, end: int, count: int, pattern: str | None) -> list[bytes]:
    """The last ``count`` matching lines before byte ``end``."""
    found: list[bytes] = []
    lines = matching(_backwards(file, end), pattern)
    while len(found) < count and (line := next(lines, None)) is not None:
        found.append(line)
    return found[::-1]


def _backwards(file: BinaryIO, end: int) -> Iterator[bytes]:
    """The lines before byte ``end``, the last one first."""
    if not end:
        return
    file.seek(end - 1)
    place, rest = end - (file.read(1) == b"\n"), b""
    while place:
        size = min(BLOCK, place)
        place -= size
        file.seek(place)
        rest, *lines = (file.read(size) + rest).split(b"\n")
        yield from (line + b"\n" for line in reversed(lines))
        if len(rest) > LONGEST:
            yield rest
            rest = b""
    yield rest + b"\n"


SHORT = 1 << 11  # bytes at the end of a log that nearly always say it
TAIL = 1 << 15  # bytes at the end of a log that are searched

# Lines of a run's or a job's log that tell how an attempt ended; the last such line counts.
ENDS = (
    ("done", re.compile(r"\b(done at step \d+.*?samples)")),
    ("stopped", re.compile(r"\b(stopped at step \d+ as (?:\w+ says|hpclm stop asked))")),
    ("exited", re.compile(r"\b(\w+: (?:saved at step \d+|nothing saved)(?:, exiting| and leaving))")),
    ("failed", re.compile(r"\b(DUE TO (?:NODE FAILURE|NODE_FAIL).*?)(?: \*\*\*|$)")),
    ("ended", re.compile(r"\b(CANCELLED AT \S+ DUE TO .*?|CANCELLED AT \S+)(?: \*\*\*|$)")),
    (
        "ended",
        re.compile(
            r"^srun: error: (\S+: tasks? \S+: (?:Segmentation fault|Bus error|Illegal instruction|Floating point exception|Aborted).*)$"
        ),
    ),
    ("failed", re.compile(r"^[-\d]* ?[\d:,]* E (.*)$")),
    ("failed", re.compile(r"^error: (.*)$")),
)
STEPS = re.compile(r" I step \d+/?\d*  loss ")
# srun's own words, and the script's, about what the line before told; and where in a script something went wrong.
NOISE = re.compile(
    r"(?:srun|mpirun) ended with|start \d+ of job \d+ on |srun: (?:Job step|Terminating|launch/slurm: )"
    r"|srun: error: \S+: tasks? \S+: (?:Exited|Terminated|Killed)|slurmstepd: error: \*\*\* "
)
PLACE = re.compile(r"^(?:bash|\S*/slurm_script): line \d+: ")
FAULT = re.compile(r"error|not found|cannot|can't|could not|no such|no module|denied|fail|fatal|fault", re.IGNORECASE)
CRASHES = {
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
    "Aborted": signal.SIGABRT,
}
TERMINATED = re.compile(r"(?:srun|mpirun) ended with exit code 143$")
TRACE = "Traceback (most recent call last):"
BEGINS = re.compile(r" run directory .*((?:resumes|goes on) from step \d+|a new run)$|^start \d+ of job \d+ on ")


def last_words(log: Path | str) -> tuple[str, str]:
    """How the last attempt ended: its state, and the message in ``log``; empty if the log does not tell."""
    return _ending(tail(log, SHORT).splitlines()) or _ending(tail(log, TAIL).splitlines()) or ("", "")


def last_fault(log: Path | str) -> str:
    """What is probably why a job failed before training, from the end of its log."""
    return fault(tail(log, SHORT))


def fault(printed: str) -> str:
    """The last line that tells of a fault, otherwise the last one that is not about the end of processes; empty without one."""
    lines = [line.strip() for line in printed.splitlines() if line.strip() and not NOISE.match(line)]
    faults = [line for line in lines if FAULT.search(line) or any(crash in line for crash in CRASHES)]
    return _crash_named(PLACE.sub("", (faults or lines or [""])[-1]))


def _crash_named(text: str) -> str:
    """``text`` with what shells and srun call a crash under the name of its signal."""
    for crash, number in CRASHES.items():
        text = re.sub(rf"{crash}( \(core dumped\))?", processes.killed_by(number), text)
    return text


def terminated(log: Path) -> bool:
    """Whether a job's log ends with the message that TERM ended what the script had started."""
    said = [line for line in tail(log, SHORT).splitlines() if TERMINATED.match(line) or BEGINS.search(line)]
    return bool(said) and TERMINATED.match(said[-1]) is not None


def _ending(lines: Sequence[str]) -> tuple[str, str] | None:
    """How the last attempt ended; None if earlier lines may tell."""
    cancelled = None
    for number in range(len(lines) - 1, -1, -1):
        line = lines[number]
        if STEPS.search(line) or BEGINS.search(line):
            return cancelled or ("", "")  # lines before a step did not end the attempt
        for kind, pattern in ENDS:
            found = pattern.search(line)
            if found:
                words = _crash_named(found[1].strip()) if kind == "ended" else found[1].strip()
                if kind == "ended" and "DUE TO" not in words:  # srun cancels the other ranks of one that has failed
                    cancelled = (kind, words)
                    break
                traced = (text for text in lines[number + 1 :] if text.strip() and not text.startswith(" "))
                return kind, words.replace(TRACE, next(traced, TRACE)) if words.endswith(TRACE) else words
    return cancelled
