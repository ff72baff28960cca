"""Ports and network interfaces: the port that rank 0 listens on, and the interface that leads to the other nodes."""

import fcntl
import hashlib
import os
import random
import socket
import struct
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpclm.base.errors import ConfigError, HpclmError

PORTS = range(10_240, 32_000)
"""Below the ephemeral range (Linux: 32768 and up): any outgoing connection may take a port there."""
CANDIDATES = 32  # ports to try
DISCARD = 9  # a port on which normally nothing listens
BACKLOG = 4096  # with a short queue, connections were reset when 128 ranks connected at once
SIOCGIFADDR = 0x8915


def candidates(seed: str) -> list[int]:
    """Ports to try one after another. Every rank knows the ``seed``, so all get the same ports without communication."""
    number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "big")
    return random.Random(number).sample(PORTS, CANDIDATES)


def listen(ports: Sequence[int], address: str = "") -> socket.socket:
    """A socket that listens on the first free one of ``ports``; HpclmError if all are in use.

    ``address``: empty for all interfaces. Always IPv4: PyTorch looks up the name of every peer of an IPv6 socket, one after another.
    """
    for port in ports:
        with suppress(OSError):
            # bound before the port is announced, so that no other process can take it in between
            return socket.create_server((address, port), family=socket.AF_INET, backlog=BACKLOG)
    raise HpclmError(f"no free port on {socket.gethostname()}: {', '.join(map(str, ports))} are all in use")


def resolved(host: str) -> str:
    """The IPv4 address of ``host``; empty if it has none here."""
    with suppress(OSError):
        return socket.gethostbyname(host)
    return ""


def answers(host: str, port: int, seconds: float) -> bool | None:
    """Whether a server accepts a connection; None if the machine neither accepts nor refuses it within ``seconds``."""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except OSError as error:
        if isinstance(error, ConnectionRefusedError):
            return False
        return None
    return True


def first_to_answer(hosts: Sequence[str], port: int, seconds: float) -> str:
    """The first of ``hosts`` on which a server accepts a connection; empty if none does within ``seconds``."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for host in hosts:
            if answers(host, port, seconds=2.0):
                return host
        time.sleep(0.5)
    return ""


def addresses() -> dict[str, str]:
    """Interface -> IPv4 address, for interfaces that have one."""
    by_interface = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                by_interface[name] = socket.inet_ntoa(answer[20:24])
    return by_interface


def without_ipv4() -> bool:
    """Whether this machine has no IPv4 address other than loopback's."""
    return all(address.startswith("127.") for address in addresses().values())


def own_address(host: str) -> str:
    """The address of ``host``, a name of this machine, for other machines; empty if only loopback is known."""
    with suppress(OSError):
        local = set(addresses().values())
        for *_, (address, *_) in socket.getaddrinfo(host, None, socket.AF_INET):
            if address in local and not address.startswith("127."):
                return str(address)
    return ""


def own_addresses(first: str | None) -> list[str]:
    """Addresses of this machine for other machines: that of the interface ``first``, the others, and last the host name."""
    outward = {name: address for name, address in addresses().items() if not address.startswith("127.")}
    return [outward[name] for name in sorted(outward, key=lambda name: name != first)] + [socket.gethostname()]


def address_towards(host: str) -> str:
    """This machine's address on the route to ``host``; nothing is sent. Empty without a route."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, DISCARD))  # for a datagram socket, this only looks up the route
        return str(probe.getsockname()[0])
    return ""


def interface_of(address: str) -> str | None:
    """The interface with the IPv4 ``address``, or None."""
    return next((name for name, interface_address in addresses().items() if interface_address == address), None)


def check_interface(chosen: str | None, env: Mapping[str, str] = os.environ) -> None:
    """ConfigError if this machine lacks the interface that GLOO_SOCKET_IFNAME or else cluster.interface, ``chosen``, names."""
    names = [name for _, name in socket.if_nameindex()]
    variable = env.get("GLOO_SOCKET_IFNAME")
    if variable:
        used = variable
        setting = f"GLOO_SOCKET_IFNAME={variable}"
        way_out = " (it may be left over from another machine: unset it, or set cluster.interface)"
    else:
        used = chosen or ""
        setting = f"cluster.interface={chosen}"
        way_out = ""
    if used and any(name not in names for name in used.split(",")):
        raise ConfigError(f"{setting}: {socket.gethostname()} has only {', '.join(names)}{way_out}")


def use_interface(chosen: str | None, outward: str | None, env: MutableMapping[str, str] = os.environ) -> None:
    """Set the interface that gloo and NCCL use; ConfigError if this machine lacks it.

    ``chosen`` by the user counts for both. ``outward`` leads to the other nodes, and counts for gloo only: NCCL finds the fastest interface
    itself, and reads /etc/nccl.conf.
    """
    check_interface(chosen, env)
    if chosen or outward:
        env.setdefault("GLOO_SOCKET_IFNAME", str(chosen or outward))
    if chosen:
        env.setdefault("NCCL_SOCKET_IFNAME", f"={chosen}")  # without "=" it is a prefix: eth1 would match eth10


def record_collectives(logs: Path, env: MutableMapping[str, str] = os.environ) -> None:
    """Switch NCCL's flight recorder on, unless the user chose otherwise.

    If a collective times out, PyTorch writes the last collectives of each process to ``logs``. Its default, a predictable name in /tmp, is
    unsafe.
    """
    # TORCH_NCCL_ASYNC_ERROR_HANDLING keeps its default, 3: PyTorch's watchdog reports an NCCL error, sleeps for four times
    # TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC (60 s; ProcessGroupNCCL.cpp, Watchdog::runLoop) and aborts the process. By then
    # hpclm's watchdog has named a lost rank. With 0, an error that no lost rank explains would hang until hang_minutes.
    env.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    env.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(logs / "nccl-timeout-rank_"))
    env.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def hide_lookup_warnings(env: MutableMapping[str, str] = os.environ) -> None:
    """Have PyTorch log errors only, unless the user chose a level; call it before PyTorch is imported.

    PyTorch's store warns about every address without a host name, as on nodes without DNS, but nothing needs the names.
    """
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
