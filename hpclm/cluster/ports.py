"""Ports to listen on: below those that the system hands out to any outgoing connection, so that none is taken by chance."""

import hashlib
import random
import socket
from contextlib import suppress

from hpclm.errors import HpclmError

RANGE = range(10_240, 32_000)  # Linux hands out 32768 and up
CANDIDATES = 32


def candidates(launch: str) -> list[int]:
    """Ports to try in turn, the same on every host for one ``launch``, and others for another."""
    seed = int.from_bytes(hashlib.blake2b(launch.encode(), digest_size=8).digest(), "big")
    return random.Random(seed).sample(RANGE, CANDIDATES)


def listen(ports: list[int]) -> socket.socket:
    """A listening socket on the first of ``ports`` that nobody has; HpclmError when all are taken."""
    for port in ports:
        try:
            listener = socket.socket(socket.AF_INET6)
        except OSError:  # a kernel without IPv6, whatever Python was compiled with
            listener = socket.socket(socket.AF_INET)
        try:
            if listener.family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(("", port))
            listener.listen(4096)
            return listener
        except OSError:
            listener.close()
    raise HpclmError(f"no port to listen on: {', '.join(map(str, ports))} are all taken on {socket.gethostname()}")


def connect(host: str, port: int, seconds: float) -> socket.socket | None:
    """A connection, or None where nobody answers within ``seconds``."""
    with suppress(OSError):
        return alive(socket.create_connection((host, port), timeout=seconds))
    return None


def alive(connection: socket.socket) -> socket.socket:
    """``connection``, made to notice within about 15 seconds that the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 15_000)):
        if hasattr(socket, option):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection
