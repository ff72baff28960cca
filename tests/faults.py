"""Things that go wrong on purpose; named in settings of a run under test."""

import ctypes
import hashlib
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from hpclm.base.registry import load
from hpclm.config.data import SOURCES
from hpclm.data.synthetic import synthetic
from hpclm.distributed import context
from hpclm.model.gpt import Block


def watched(source, before, part="train", rank="1", after=None):
    """``source``, with ``before(number)`` called before each sample of a part is read on a rank, ``after(row)`` after it."""
    samples = source.samples

    def opened(asked, count):
        found = samples(asked, count)
        mine = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK", "1")
        if asked == part and count and rank in (None, mine):
            read, numbers = found.read, iter(range(10**9))

            def read_watched(index, row):
                before(next(numbers))
                read(index, row)
                if after:
                    after(row)

            object.__setattr__(found, "read", read_watched)
        return found

    object.__setattr__(source, "samples", opened)
    return source


def exploding(*words):
    """A data source that raises on rank 2, in the middle of training."""

    def explode(number):
        if number > 20:
            raise RuntimeError("boom in the data")

    return watched(synthetic(*words), explode, rank="2")


def leaving(*words):
    """A data source that ends rank 1 as if all were well."""
    if os.environ["RANK"] == "1":
        sys.exit(0)
    return synthetic(*words)


def never_disconnecting(*words):
    """A data source whose rank 1 stops, or dies, when its work is done; the other then waits for it a second, not a minute."""
    context.DISCONNECT, finish = 1.0, context.DistributedContext.finish

    def end(self):
        if self.rank == 1:
            self.watchdog.leave()
            os.kill(os.getpid(), getattr(signal, os.environ["TEST_SIGNAL"]))
        finish(self)

    context.DistributedContext.finish = end
    return synthetic(*words)


def warning_once(*words):
    """A data source that warns rank 1 in the middle of the first evaluation, and kills it in the next attempt's third step."""
    warned, died = (Path(os.environ[name]) for name in ("TEST_MARK", "TEST_DIES"))

    def warn(number):
        if number == 4 and not warned.exists():
            warned.touch()
            os.kill(os.getpid(), signal.SIGTERM)

    def die(number):
        if number == 20 and warned.exists() and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return watched(watched(synthetic(*words), warn, "valid"), die)


def stuck(*words):
    """A data source whose rank 1 never comes back from reading the 41st sample."""

    def wait(number):
        while number == 40:
            time.sleep(0.1)

    return watched(synthetic(*words), wait)


def holding(*words):
    """A data source whose rank 1 holds the interpreter's lock for ever when it reads the 41st sample."""
    return watched(synthetic(*words), lambda number: number == 40 and ctypes.PyDLL(None).sleep(1000))


def slow(*words):
    """A data source whose rank 1 takes long to read a sample: TEST_PAUSE seconds."""
    return watched(synthetic(*words), lambda number: time.sleep(float(os.environ["TEST_PAUSE"])))


class SlowBlock(Block):
    """A block that takes TEST_PAUSE seconds for each micro-batch."""

    def forward(self, x, layout):
        time.sleep(float(os.environ["TEST_PAUSE"]))
        return super().forward(x, layout)


class WarnedBlock(SlowBlock):
    """A SlowBlock of which the TEST_WARN-th call warns rank 1."""

    calls = 0

    def forward(self, x, layout):
        WarnedBlock.calls += 1
        if WarnedBlock.calls == int(os.environ["TEST_WARN"]) and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(x, layout)


def late(*words):
    """A data source that takes TEST_PAUSE seconds to be built, on rank 0 (which builds first) and the others."""
    time.sleep(float(os.environ["TEST_PAUSE"]))
    return synthetic(*words)


def killing(*words):
    """A data source that kills rank 1 of a Slurm job in its third step, at every start."""

    def kill(number):
        if number == 20 and os.environ.get("SLURM_PROCID") == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    return watched(synthetic(*words), kill)


def recording(*words):
    """A dataset; every process notes which training samples it has read, in order, in a file of TEST_READS."""
    notes = Path(os.environ["TEST_READS"]) / f"{os.environ.get('RANK', '0')}.txt"

    def note(row):
        with notes.open("a") as file:
            print(hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest(), file=file)

    return watched(load(SOURCES["indexed"])(*words), lambda number: None, rank=None, after=note)


def filling(*words):
    """A data source that fills the disk of the file TEST_FILL but for TEST_LEAVES bytes in step 7, and frees it in step 19."""
    filler = Path(os.environ["TEST_FILL"])

    def fill(number):
        if number == 6 * 8:
            disk = os.statvfs(filler.parent)
            with suppress(OSError):  # a save that is on its way may take a part first
                filler.write_bytes(bytes(disk.f_bavail * disk.f_bsize - int(os.environ["TEST_LEAVES"])))
        elif number == 18 * 8:
            filler.unlink()

    return watched(synthetic(*words), fill)
