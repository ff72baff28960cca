"""Faults at a system call of one's choice: strace kills, fails or holds up a process that does some work for a test."""

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests import forks
from tests.runs import PATIENCE

WRITING = (
    "openat,write,pwrite64,fsync,rename,?renameat,?renameat2,mkdir,?mkdirat,unlink,?unlinkat,rmdir,ftruncate,close"
)
HELD = int(PATIENCE * 1e6)  # microseconds for a fault delay_enter: until strace is taken away
READING = "openat,read,pread64,preadv,newfstatat,fstat,getdents64"


def usable():
    """Whether strace is installed and may trace a process here."""
    if not shutil.which("strace"):
        return False
    command = ["strace", "-qq", "-o", os.devnull, "-e", "inject=rmdir:error=EIO", "true"]
    return subprocess.run(command, capture_output=True).returncode == 0


@dataclass(frozen=True)
class Outcome:
    """How the work ended."""

    code: int
    """Of exit; -9: killed."""
    answer: object
    """What the work gave; None where it did not come to its end."""
    calls: list[str]
    """strace's lines."""

    @property
    def injected(self):
        """Whether the fault came, which it does not where the work has fewer calls."""
        return self.code == -9 or any("(INJECTED" in line for line in self.calls)


class Traced:
    """A process that runs ``work(gate, *args)``; the thread that calls ``gate()`` waits there until strace watches it, and
    it alone, so that the n-th call is one for certain. ``threads``: and those that it starts."""

    def __init__(self, work, *args, calls=WRITING, inject=None, threads=False):
        self._pipe = forks.start(_work, work, args)
        self._calls, self._inject, self._threads = calls, inject, threads
        self._strace = self._log = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()
        self._pipe.close()

    def go(self):
        """Let strace watch the thread at its gate, and open the gate."""
        word, self.tid = self._hear()
        assert word == "gate", self.tid
        if self._calls:
            handle, self._log = tempfile.mkstemp(suffix=".strace")
            os.close(handle)
            what = ["-e", f"trace={self._calls}", *(["-e", f"inject={self._inject}"] if self._inject else [])]
            command = ["strace", "-y", *["-f"] * self._threads, "-p", str(self.tid), *what, "-o", self._log]
            self._strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            said = self._strace.stderr.readline()
            assert "attached" in said, said
        self._pipe.send("go")
        return self

    def wait_until_held(self, call, number=1):
        """Wait until it stands before its ``number``-th ``call``, where a fault delay_enter holds it."""
        until = time.monotonic() + PATIENCE
        while sum(line.startswith(f"{call}(") for line in self._lines()) < number:
            assert time.monotonic() < until, self._lines()
            time.sleep(0.01)

    def release(self):
        """Take strace away: what it held goes on."""
        if self._strace and self._strace.poll() is None:
            self._strace.terminate()
        if self._strace:
            self._strace.wait()
            self._strace.stderr.close()

    def end(self, survives=True):
        """Wait for the end, and how it was; ``survives``: an exception of the work is a failure of the test."""
        answer = code = None
        while code is None:
            word, value = self._hear()
            assert word != "failed" or not survives, value
            if word == "failed":
                continue
            answer, code = (value, code) if word == "answer" else (answer, value)
        lines = []
        if self._strace:
            self._strace.wait(PATIENCE)
            lines = self._lines()
            Path(self._log).unlink()
        return Outcome(code, answer, lines)

    def _lines(self):
        lines = Path(self._log).read_text().splitlines()
        return [line.partition(" ")[2].lstrip() for line in lines] if self._threads else lines

    def _hear(self):
        assert self._pipe.poll(PATIENCE), "the work says nothing"
        return self._pipe.recv()


def run(work, *args, **options):
    """Run it to its end."""
    with Traced(work, *args, **options) as traced:
        return traced.go().end()


def points(work, *args, **options):
    """The system calls of the work, which ends well without a fault."""
    outcome = run(work, *args, **options)
    assert outcome.code == 0
    return named(outcome.calls)


def named(lines):
    """Each of the system calls: its name, the how-manieth of this name it is, and strace's line."""
    seen, found = Counter(), []
    for line in lines:
        name = line.partition("(")[0]
        if name.isidentifier():
            seen[name] += 1
            found.append((name, seen[name], line))
    return found


def _work(pipe, work, args):
    def gate():
        pipe.send(("gate", threading.get_native_id()))
        pipe.recv()

    pipe.send(("answer", work(gate, *args)))
