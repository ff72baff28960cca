"""A command ends within two seconds of Ctrl-C, TERM or HUP, even in a long call of a library that lets no handler of Python run.

Python runs its handlers between two of its own instructions, so a call into Rust or C++ that trains a tokenizer for an hour delays them by an
hour. The interpreter reports a signal at once, though (``signal.set_wakeup_fd``), and a thread that reads the report ends the process if
the handler has not run by then. Only what releases the GIL can be ended this way; the libraries that hpclm calls for long do.
"""

import os
import re
import shutil
import signal
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from hpclm.errors import shell_code
from hpclm.files import here

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DELAY = 1.0  # seconds in which the handler may run
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of the sender


@contextmanager
def prompt_exit() -> Iterator[None]:
    """In the block INT raises KeyboardInterrupt and TERM and HUP SystemExit with 128 + signal, so that it can clean up.

    If the main thread is in a call that delays that by more than ``DELAY``, the process ends without it, with the same exit code, and the
    files that it was writing are removed. Signals that have handlers already, and other threads than the main one, are left as they are.
    """
    numbers = [number for number in SIGNALS if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)]
    if not numbers or threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = SignalWatch()
    before = {number: signal.signal(number, watch.leave) for number in numbers}
    wakeup = signal.set_wakeup_fd(watch.reports.fileno(), warn_on_full_buffer=False)
    with suppress(RuntimeError):  # no more threads for this user: signals wait for the end of a call
        watch.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            if signal.getsignal(number) == watch.leave:
                signal.signal(number, handler)
        watch.end()


class SignalWatch(threading.Thread):
    """Ends this process if a signal comes and ``leave``, its handler, does not run soon."""

    def __init__(self) -> None:
        super().__init__(name="hpclm-signals", daemon=True)
        self.reports, self._received = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.reports.setblocking(False)
        # a forked child reports its signals here, too
        self._received.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._handled, self._over = threading.Event(), False

    def leave(self, number: int, _: FrameType | None) -> None:
        """Handle a signal."""
        self._handled.set()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(shell_code(-number))

    def run(self) -> None:
        """Wait for signals until ``end``."""
        while number := self._next():
            if signal.getsignal(number) == self.leave and not self._handled.wait(DELAY):
                _end(number)
            while self._next(socket.MSG_DONTWAIT):  # the handler runs once for several signals
                continue
            self._handled.clear()
            if self._over:
                return

    def end(self) -> None:
        """End the thread."""
        self._over = True
        with suppress(OSError):
            self.reports.setblocking(True)
            self.reports.send(b"\0")
        if self.is_alive():
            self.join()
        self.reports.close()
        self._received.close()

    def _next(self, flags: int = 0) -> int:
        """The number of the next signal of this process; 0 if there is none."""
        with suppress(BlockingIOError):
            while True:
                number, ancillary, *_ = self._received.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS.size), flags)
                if any(CREDENTIALS.unpack(sender)[0] == os.getpid() for *_, sender in ancillary):
                    return number[0]
        return 0


def _end(number: int) -> None:
    """End this process because of a signal, without the files that it has not finished."""
    remove_unfinished()
    if number == signal.SIGINT:
        with suppress(OSError):
            os.write(2, b"interrupted\n")
    os._exit(shell_code(-number))


def remove_unfinished() -> None:
    """Remove the temporary files and folders of this process, which is about to end."""
    for path in _unfinished():
        with suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _unfinished() -> set[Path]:
    """The temporary files and folders of this process that are open (``files.aside``), and its ``temporary_folder``."""
    mark = f"{here()}-{os.getpid()}-"
    paths = set(Path(tempfile.gettempdir()).glob(f"hpclm-*{mark}*"))
    with suppress(OSError):
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if match := re.match(rf".*\.tmp-{re.escape(mark)}[^/]*", os.readlink(link)):  # noqa: PTH115 - it may be a pipe
                    paths.add(Path(match[0]))
    return paths
