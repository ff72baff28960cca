"""TensorBoard: the scalars of a run under their tags, and the event files."""

import io
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path

from hpclm.base import files, metric_names
from hpclm.base.side_path import SidePath, is_at
from hpclm.checkpoint import Progress
from hpclm.rundir.rows import Row

NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\.")
# BigScience's names for the same scalars, so that their dashboards keep working.
TAGS = {
    "loss": "lm-loss-training/lm loss",
    "lr": "learning-rate/learning-rate",
    "batch_size": "batch-size/batch-size",
    "grad_norm": "grad-norm/grad-norm",
    "loss_scale": "loss-scale/loss-scale",
    "step_seconds": "iteration-time/iteration-time",
    "tokens_per_second": "iteration-time/tokens per second",
    "mfu": "iteration-time/mfu",
    "hfu": "iteration-time/hfu",
    "data_fraction": "iteration-time/fraction waiting for data",
    "forward_seconds": "time/forward-compute-time",
    "backward_seconds": "time/backward-compute-time",
    "forward_backward_seconds": "time/forward-backward-time",
    "optimizer_seconds": "time/optimizer-time",
    "data_seconds": "time/batch-generator-time",
    "validation_loss": "lm-loss-validation/lm loss validation",
    "validation_loss_ema": "lm-loss-validation/lm loss validation ema",
    "validation_perplexity": "lm-loss-validation/lm loss validation ppl",
    "validation_bits_per_byte": "lm-loss-validation/lm loss validation bits per byte",
}
FLUSH_SECONDS = 20.0  # maximum time between two flushes, even if log lines are further apart


class TensorBoard:
    """A run's scalars, by step and by samples. Failures are logged; the scalars that could not be written are lost."""

    def __init__(self, out: Path, begin: Progress):
        """``begin``: the progress that the run resumes from."""
        self.folder = out / "tensorboard"
        self.begin = begin
        self._files: tuple[EventFile, EventFile] | None = None
        self._flushed = time.monotonic()
        self._writing = SidePath(f"TensorBoard's files in {self.folder} cannot be written")
        self._scalars = SidePath("a scalar cannot be written for TensorBoard")

    def start(self) -> None:
        """Open the event files."""
        self._writing.attempt(self._open)

    def _open(self) -> None:
        # samples go to a separate folder: TensorBoard hides values past a step, even of tags that count samples
        by_step = EventFile(self.folder, self.begin.step)
        self._files = by_step, EventFile(self.folder / "samples", self.begin.samples)
        self._write()

    def row(self, row: Row, part: str = "") -> None:
        """Add the scalars of a row of metrics.jsonl. ``part``: the name of the held-out data; empty if there is only one part."""
        suffix = f" {part}" if part else ""
        if suffix and any(tag + suffix in TAGS.values() for tag in TAGS.values()):
            suffix = f" ({part})"  # a part named "ppl" would get the tag of the perplexity
        for key, tag in TAGS.items():
            self.scalar(tag + suffix, row.get(key), row)
        for name, value in metric_names.reported(row).items():
            self.scalar(name, value, row)
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def scalar(self, tag: str, value: float | None, row: Row) -> None:
        """Add a scalar at the step and samples of ``row``, unless ``value`` is None."""
        if self._files and value is not None:
            by_step, by_samples = self._files
            self._scalars.attempt(lambda: by_step.add(tag, value, row["step"]), now=True)
            self._scalars.attempt(lambda: by_samples.add(f"{tag} vs samples", value, row["samples"]), now=True)

    def flush(self) -> None:
        """Write the scalars added so far; they are lost if that fails."""
        self._flushed = time.monotonic()
        if not self._writing.attempt(self._write):
            self._close()

    def _write(self) -> None:
        for file in self._files or ():
            file.flush()

    def close(self) -> None:
        """Flush and close the files."""
        self.flush()
        self._close()

    def _close(self) -> None:
        for file in self._files or ():
            file.close()


class EventFile:
    """A file of scalars in a folder; use it in one thread. ``flush`` raises disk errors; the next ``flush`` then starts a new file.

    TensorBoard's own writer has a thread that ends on such an error.
    """

    def __init__(self, folder: Path, start: int):
        """``start``: the step that the run resumes from; TensorBoard hides later steps of earlier files."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = Event
        self._summary = Summary
        self._buffer = io.BytesIO()
        self._records = RecordWriter(self._buffer)
        self._folder = folder
        self._number = 0
        self._path = folder
        self._handle = -1
        begin = SessionLog(status=SessionLog.START)
        self._first = Event(wall_time=time.time(), step=start + 1, session_log=begin)

    def add(self, tag: str, value: float, step: int) -> None:
        """Add a scalar, for the next ``flush``."""
        summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=value)])
        self._records.write(self._event(wall_time=time.time(), step=step, summary=summary).SerializeToString())

    def flush(self) -> None:
        """Write the scalars added so far; OSError if that fails, and they are lost."""
        scalars = self._buffer.getvalue()
        self._discard()
        try:
            if self._handle >= 0 and not is_at(self._handle, self._path):
                raise FileNotFoundError(2, "was removed or replaced", str(self._path))
            if self._handle < 0:
                self._begin()
            self._write(scalars)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; scalars added since the last ``flush`` are lost."""
        self._discard()
        if self._handle >= 0:
            with suppress(OSError):
                os.close(self._handle)
            self._handle = -1

    def _discard(self) -> None:
        self._buffer.seek(0)
        self._buffer.truncate()

    def _begin(self) -> None:
        """Start a new file, with a name that sorts after the names of all earlier files."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._number += 1
        # TensorBoard reads files by their names: two attempts may begin in one second, and clocks may go back
        matches = (NAME.match(file.name) for file in self._folder.iterdir())
        earlier = [int(match[1]) for match in matches if match]
        second = max([int(time.time()), *(timestamp + 1 for timestamp in earlier)])
        name = f"events.out.tfevents.{second:010}.{socket.gethostname()}.{os.getpid()}.{self._number}"
        self._path = self._folder / name
        self._handle = files.opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        self._records.write(self._event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        if self._first is not None:
            self._records.write(self._first.SerializeToString())
        head = self._buffer.getvalue()
        self._discard()
        self._write(head)
        self._first = None  # only the first file of an attempt hides later steps

    def _write(self, content: bytes) -> None:
        """Append all of ``content`` or nothing: TensorBoard stops reading at an incomplete record."""
        size = os.fstat(self._handle).st_size
        try:
            written = 0
            while written < len(content):
                written += os.write(self._handle, content[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._handle, size)
            raise
