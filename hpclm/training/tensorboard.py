"""TensorBoard's event files."""

import io
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path

from hpclm import files
from hpclm.side_path import is_at

NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\.")


class EventFile:
    """Scalars in a folder; use it in one thread. An error of the disk is raised by ``flush``, after which a new file is begun.

    TensorBoard's own writer has a thread that dies of such an error.
    """

    def __init__(self, folder: Path, start: int):
        """``start``: the step that the run resumes from; TensorBoard hides what earlier files have of later ones."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        self._records = RecordWriter(buffer := io.BytesIO())
        self._buffer, self._folder, self._number = buffer, folder, 0
        self._path, self._handle = folder, -1
        begin = SessionLog(status=SessionLog.START)
        self._first = Event(wall_time=time.time(), step=start + 1, session_log=begin)

    def add(self, tag: str, value: float, step: int) -> None:
        """A scalar, for the next ``flush``."""
        summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=value)])
        self._records.write(self._event(wall_time=time.time(), step=step, summary=summary).SerializeToString())

    def flush(self) -> None:
        """Write what was added; OSError if that fails, and what was added is lost."""
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
        """Close the file; what was added since the last ``flush`` is lost."""
        self._discard()
        handle, self._handle = self._handle, -1
        with suppress(OSError):
            if handle >= 0:
                os.close(handle)

    def _discard(self) -> None:
        self._buffer.seek(0)
        self._buffer.truncate()

    def _begin(self) -> None:
        """Begin a file, which comes after the earlier ones in the order of names."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._number += 1
        # TensorBoard reads files by their names: two attempts may begin in one second, and clocks may go back
        earlier = [int(match[1]) for file in self._folder.iterdir() if (match := NAME.match(file.name))]
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
        self._first = None  # only the first file of an attempt hides anything

    def _write(self, content: bytes) -> None:
        """Append all of ``content``, or nothing: TensorBoard reads no further than an incomplete record."""
        size = os.fstat(self._handle).st_size
        try:
            written = 0
            while written < len(content):
                written += os.write(self._handle, content[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._handle, size)
            raise
