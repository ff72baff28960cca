"""Things that go wrong on purpose; named in settings of a run under test."""

import os
import subprocess
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


def slow(*words):
    """A data source that takes a second to build."""
    time.sleep(1)
    return synthetic(*words)
