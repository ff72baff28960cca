"""Lines of JSON over a connection: what the processes of a run say to each other beside their collectives."""

import json
import select
import socket
import threading
import time
from contextlib import suppress
from typing import Any

LONGEST = 1 << 22  # bytes of a message; more is no peer of ours


class Wire:
    """One connection; messages are mappings."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self._read = b""
        self._sending = threading.Lock()

    def send(self, **message: Any) -> bool:
        """Send one message; whether the other side was still there."""
        with suppress(OSError), self._sending:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
            return True
        return False

    def post(self, **message: Any) -> bool:
        """Send one short message if that needs no waiting: who has stopped reads nothing, and its buffer may be full."""
        poll = select.poll()
        try:
            poll.register(self.socket, select.POLLOUT)
            return bool(poll.poll(0)) and self.send(**message)
        except (OSError, ValueError):  # it is closed
            return False

    def finish(self) -> None:
        """Say that nothing more will be sent; the other side may still speak."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """The next message; None when the other side is gone, speaks another language, or is silent for ``seconds``."""
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            line, found, rest = self._read.partition(b"\n")
            if found:
                self._read = rest
                return _message(line)
            if not self._more(until):
                return None

    def waiting(self) -> list[dict[str, Any] | None]:
        """Every message that has come, after one read that may be made at once; None at the end: the other side is gone."""
        alive = self._more(None)
        *lines, self._read = self._read.split(b"\n")
        return [_message(line) for line in lines] + ([] if alive else [None])

    def over(self) -> bool:
        """Whether the other side has hung up, as far as is known without waiting."""
        try:
            return self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _more(self, until: float | None) -> bool:
        """Read once, until the moment ``until`` at most; whether something came that may be a peer's."""
        try:
            self.socket.settimeout(None if until is None else max(0.001, until - time.monotonic()))
            read = self.socket.recv(1 << 16)
        except OSError:
            return False
        self._read += read
        return bool(read) and len(self._read) < LONGEST


def _message(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        message = json.loads(line)
        return message if isinstance(message, dict) else None
    return None
