"""Find, print and follow the logs of a run, which may be large, replaced or without line breaks."""

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from hpclm.base import files, terminal
from hpclm.base.errors import ConfigError
from hpclm.rundir import runs
from hpclm.rundir.runs import RunFacts
from hpclm.rundir.state import State, StateOf

MAX_LINE_BYTES = 1 << 20  # longer lines are read in pieces: a file need not have line breaks
MAX_SEARCHED_BYTES = 1 << 28  # bytes at the end of a log that are searched for its last lines
PAUSE = 0.2  # seconds between reads of a log that has not grown
LOOK = 0.5  # seconds between checks for a log that does not exist yet
ASK = 2.0  # seconds between checks whether the run is over


def matching(lines: Iterable[bytes], pattern: str | None) -> Iterator[bytes]:
    """The lines that the regular expression ``pattern`` matches somewhere; all lines without a pattern."""
    if pattern is None:
        return iter(lines)
    regex = re.compile(pattern)
    return (line for line in lines if regex.search(line.decode(errors="replace").rstrip("\r\n")))


def whole(path: Path) -> Iterator[bytes]:
    """Every line of a file; very long lines come in pieces."""
    with files.reader(path) as file:
        yield from _lines(file)


def last(path: Path, count: int, pattern: str | None = None) -> list[bytes]:
    """The last ``count`` lines of a file that match."""
    with files.reader(path) as file:
        return [line.removesuffix(b"\n") + b"\n" for line in _last(file, count, pattern)]


def follow(path: Path, count: int, pattern: str | None, over: Callable[[], bool]) -> Iterator[bytes]:
    """The last ``count`` lines, then every new line, until ``over()`` is true and nothing was written since.

    Like ``tail -F``, it waits for a missing file, and reads a file that is replaced or truncated from its beginning.
    """
    file: BinaryIO | None = None
    rest = b""
    asked = time.monotonic()
    ending = False
    try:
        with suppress(OSError):
            file = files.reader(path)
            lines = _last(file, count, pattern)
            if lines and not lines[-1].endswith(b"\n"):
                rest = lines.pop()
            yield from lines
        while True:
            if file is None:
                with suppress(OSError):
                    file = files.reader(path)
            part = file.readline(MAX_LINE_BYTES) if file else b""
            if part:
                rest += part
                if rest.endswith(b"\n") or len(rest) >= MAX_LINE_BYTES:
                    yield from matching([rest], pattern)
                    rest = b""
            elif file and _replaced(file, path):
                file.close()
                file = None
                rest = b""
            elif ending:
                if rest:
                    yield from matching([rest], pattern)
                return
            elif time.monotonic() - asked > ASK:
                ending = over()  # then read once more, for lines written before the run ended
                asked = time.monotonic()
            else:
                time.sleep(PAUSE)
    finally:
        if file:
            file.close()


def _lines(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.readline(MAX_LINE_BYTES), b"")


def _last(file: BinaryIO, count: int, pattern: str | None) -> deque[bytes]:
    """The last ``count`` lines that match; ``file`` is read to its end."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_SEARCHED_BYTES))
    return deque(matching(_lines(file), pattern), maxlen=count)


def _replaced(file: BinaryIO, path: Path) -> bool:
    """Whether ``path`` is another file now, or shorter than the part that was read."""
    try:
        now = path.stat()
        held = os.fstat(file.fileno())
    except OSError:
        return False  # nothing has taken its name
    return not os.path.samestat(now, held) or now.st_size < file.tell()


def find_log(out: Path, rank: int | None, job: bool, state_of: StateOf, wait: bool) -> Path:
    """The log of the run, of a ``rank``, or of the ``job``; if ``wait``, as soon as it exists. ConfigError if it never will."""
    noted = ""
    while not (path := _existing(runs.read_run(out), rank, job)):
        status = state_of(out)
        if not (wait and _goes_on(status)):
            raise _missing(status, rank, job)
        text = f"waiting for the log; {status.name}: {status.where()}".removesuffix(": ")
        if text != noted:
            _note(text)
        noted = text
        time.sleep(LOOK)
    return path


def _existing(run: RunFacts, rank: int | None, job: bool) -> Path | None:
    """The requested log, if it exists; the job's log if training has not started and no rank was given."""
    path = run.out / _name(rank)
    if not job and files.is_file(path):
        return path
    of_job = run.job_log() if rank is None else None
    if of_job and not job:
        _note(f"training has not started; this is the job's log, {of_job}:")
    return of_job


def _name(rank: int | None) -> str:
    """The path of a rank's log in a run directory; the run's log for None and rank 0."""
    return f"logs/rank-{rank:05d}.log" if rank else "log.txt"


def _missing(status: State, rank: int | None, job: bool) -> ConfigError:
    """The error for a log that does not exist."""
    out = status.run.out
    of_job = [Path(submission["log"]) for submission in status.run.submissions[-1:] if submission.get("log")]
    logs = list(of_job)
    missing = "log of a job"
    if not job:
        logs.insert(0, out / _name(rank))
        missing = "log yet"
    for log in logs:
        if log.exists() and not files.is_file(log):
            special = "is a pipe, a device or another special file, which cannot be printed again"
            return ConfigError(f"{files.shown(log)} {special}")
    if rank:
        missing = _name(rank)
        kept = sorted(path.name for path in (out / "logs").glob("rank-[0-9][0-9][0-9][0-9][0-9].log"))
        if kept:
            missing += f"; ranks with a log: 0 to {int(kept[-1][5:10])}"
    where = f" ({status.where()})" if status.where() else ""
    text = f"{files.shown(out)} has no {missing}; it is {status.name}{where}"
    if status.live and of_job:
        text += f"; the job will print to {of_job[0]}"
    return ConfigError(text)


def over(out: Path, state_of: StateOf) -> Callable[[], bool]:
    """A function that returns whether the run seems to be over; if so, it also prints how the run ended."""

    def is_over() -> bool:
        status = state_of(out)
        how = status.how()
        if status.run.over:  # even if Slurm has not removed the job yet
            how = status.run.end["ending"]
        elif _goes_on(status):
            return False
        _note(f"{files.shown(out)} is over: {how}")
        return True

    return is_over


def _goes_on(status: State) -> bool:
    """Whether the run may write more."""
    return bool(status.live or status.name == "unknown" or status.asked)


def _note(text: str) -> None:
    """Print ``text``, which is not part of the log, on standard error."""
    sys.stdout.flush()
    terminal.say(f"hpclm logs: {text}", file=sys.stderr)
