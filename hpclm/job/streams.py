"""What the processes of a run print, on its way to the terminal and to the job's log."""

import os
import pty
import select
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path

CHUNK = 1 << 16
PATIENCE = 1.0  # seconds that a message waits for a terminal that takes nothing (Ctrl-S); the log has it


class Lines:
    """Bytes in, whole lines out; what a progress line showed before it was written over is left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines that ``data`` completes, each with its newline."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            yield _last(line) + b"\n"
        self._rest = self._rest[max(self._rest.rfind(b"\r", 0, -1), 0) :]

    def flush(self) -> Iterator[bytes]:
        """The last line, when it has no newline."""
        line, self._rest = _last(self._rest), b""
        if line.strip():
            yield line + b"\n"


def _last(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Terminal:
    """Where a person reads along; a progress line is never torn by another line."""

    def __init__(self, handle: int):
        self.handle, self.lost = handle, False
        self._lock, self._unfinished = threading.Lock(), False

    def write(self, data: bytes) -> None:
        """Print bytes as they come."""
        with self._lock:
            self._write(data)

    def line(self, data: bytes, patience: float = -1) -> None:
        """Print a line of its own; gives up after ``patience`` seconds (-1: never)."""
        if self._lock.acquire(timeout=patience):
            try:
                if patience < 0 or select.select([], [self.handle], [], patience)[1]:
                    self._write(b"\n" * self._unfinished + data)
            except OSError:
                self.lost = True
            finally:
                self._lock.release()

    def _write(self, data: bytes) -> None:
        """A reader that has gone (head, a closed window) must not end a run."""
        while data and not self.lost:
            try:
                written = os.write(self.handle, data)
            except OSError:
                self.lost = True
                return
            self._unfinished, data = not data[:written].endswith(b"\n"), data[written:]


class JobLog:
    """The job's log file: whole lines, appended; without a path, nothing."""

    def __init__(self, path: Path | None):
        self._handle = None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, line: bytes) -> None:
        """Append a line. A full disk must not end a run that has nothing else to do with it."""
        if self._handle is not None:
            with suppress(OSError):
                os.write(self._handle, line)


class Streams:
    """The outputs of all processes: the first one's as it is, the others' lines with their name before them."""

    def __init__(self, log: Path | None):
        self.log = JobLog(log)
        self.out, self.err = (Terminal(file.fileno()) for file in (sys.stdout, sys.stderr))
        self._threads: list[threading.Thread] = []
        self._waiting: list[tuple[int, Callable[[bytes], None], Callable[[], None]]] = []

    def say(self, text: str, level: str = "I") -> None:
        """A line of the launcher's own, in the log and on standard error."""
        now = time.localtime()
        for line in text.splitlines():
            self.log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S', now)} {level} {line}\n".encode())
            self.err.line(f"{time.strftime('%H:%M:%S', now)} {level} {line}\n".encode(), PATIENCE)

    def first(self) -> tuple[int, int]:
        """Standard output and error for the process that people read along: terminals where ours are."""
        return self._plain(self.out), self._plain(self.err)

    def other(self, name: str) -> tuple[int, int]:
        """Both for another process: one pipe."""
        lines, mark = Lines(), f"[{name}] ".encode()

        def put(line: bytes) -> None:
            self.log.write(mark + line)
            self.err.line(mark + line)

        source, sink = os.pipe()
        self._waiting.append(
            (source, lambda data: _each(put, lines.feed(data)), lambda: _each(put, lines.flush())),
        )
        return sink, sink

    def _plain(self, terminal: Terminal) -> int:
        lines, (source, sink) = Lines(), _channel(terminal.handle)

        def put(data: bytes) -> None:
            _resize(terminal.handle, source)
            terminal.write(data)
            _each(self.log.write, lines.feed(data))

        self._waiting.append((source, put, lambda: _each(self.log.write, lines.flush())))
        return sink

    def begin(self) -> None:
        """Start to read, once every process that shall have an output has been started."""
        for source, put, done in self._waiting:
            self._threads.append(threading.Thread(target=_relay, args=(source, put, done), daemon=True))
            self._threads[-1].start()

    def finish(self, seconds: float = 2.0) -> None:
        """Wait until what was printed is written; all writers are gone, so it is only as long as a terminal is slow."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


def _each(put: Callable[[bytes], None], lines: Iterator[bytes]) -> None:
    for line in lines:
        put(line)


def _relay(source: int, put: Callable[[bytes], None], done: Callable[[], None]) -> None:
    with suppress(OSError):  # a pseudo-terminal whose last writer is gone answers EIO
        while data := os.read(source, CHUNK):
            put(data)
    done()


def _channel(like: int) -> tuple[int, int]:
    """A pipe, or where ``like`` is a terminal a pseudo-terminal, so that what shows progress on one does."""
    if os.isatty(like):
        with suppress(OSError):  # no /dev/pts in some containers
            source, sink = pty.openpty()
            mode = termios.tcgetattr(sink)
            mode[1] &= ~termios.OPOST  # the real terminal translates newlines
            mode[3] &= ~termios.ECHO
            termios.tcsetattr(sink, termios.TCSANOW, mode)
            _resize(like, source)
            return source, sink
    return os.pipe()


def _resize(like: int, source: int) -> None:
    """Give a pseudo-terminal the size of the real one."""
    with suppress(OSError):
        size = ioctl(like, termios.TIOCGWINSZ, b"\0" * 8)
        if size != ioctl(source, termios.TIOCGWINSZ, b"\0" * 8):
            ioctl(source, termios.TIOCSWINSZ, size)
