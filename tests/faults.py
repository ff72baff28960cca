"""Things that go wrong on purpose; named in settings of a run under test."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hpclm.data.synthetic import synthetic


def exploding(*words):
    """A data source that raises on rank 2, in the middle of training."""
    source = synthetic(*words)
    samples = source.samples

    def wrapped(part, count):
        found = samples(part, count)
        if part == "train" and count and os.environ.get("HPCLM_RANK") == "2":
            read, number = found.read, iter(range(10**9))

            def explode(index, row):
                if next(number) > 20:
                    raise RuntimeError("boom in the data")
                read(index, row)

            object.__setattr__(found, "read", explode)
        return found

    object.__setattr__(source, "samples", wrapped)
    return source


def with_children(*words):
    """A data source that leaves processes behind: a plain child, and one that has a session of its own."""
    mark = os.environ["TEST_MARK"]
    for command in (["sleep", mark], ["setsid", "sleep", mark]):
        subprocess.Popen(command)
    return synthetic(*words)


def forking(*words):
    """A data source whose rank 1 leaves a fork of itself behind, which never ends by itself, and a child of that."""
    if os.environ["HPCLM_RANK"] == "1" and os.fork() == 0:
        subprocess.Popen(["sleep", os.environ["TEST_MARK"]])
        while True:
            time.sleep(60)
    return synthetic(*words)


def leaving(*words):
    """A data source that ends rank 1 as if all were well."""
    if os.environ["HPCLM_RANK"] == "1":
        sys.exit(0)
    return synthetic(*words)


def warning_once(*words):
    """A data source that warns rank 1 in the middle of the first evaluation, and kills it in the next attempt's third step."""
    source = synthetic(*words)
    samples = source.samples
    warned, died = (Path(os.environ[name]) for name in ("TEST_MARK", "TEST_DIES"))

    def wrapped(part, count):
        found = samples(part, count)
        read, number = found.read, iter(range(10**9))

        def fail(index, row):
            rank, reads = os.environ.get("HPCLM_RANK"), next(number)
            if rank == "1" and part == "valid" and reads == 4 and not warned.exists():
                warned.touch()
                os.kill(os.getpid(), signal.SIGTERM)
            elif rank == "1" and part == "train" and reads == 20 and warned.exists() and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            read(index, row)

        found.read = fail
        return found

    source.samples = wrapped
    return source
