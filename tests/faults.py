"""Things that go wrong on purpose; named in settings of a run under test."""

import os
import subprocess
import sys
import time

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
