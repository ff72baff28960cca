"""Ports and network interfaces: where rank 0 listens, and which interface leads to the other nodes."""

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

from hpclm.errors import ConfigError, HpclmError

PORTS = range(10_240, 32_000)
"""Below the ephemeral range (Linux: 32768 and up), from which any outgoing connection may take a port."""
CANDIDATES = 32
DISCARD = 9
"""A port on which usually nothing listens."""
# with a short queue, connections were reset when 128 ranks came at once
BACKLOG = 4096
SIOCGIFADDR = 0x8915


def candidates(seed: str) -> list[int]:
    """Ports to try one after another: the same on every host for the same ``seed``."""
    number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "big")
    # drawn from what all ranks know, so that they agree on the ports without talking to each other
    return random.Random(number).sample(PORTS, CANDIDATES)


def listen(ports: Sequence[int], address: str = "") -> socket.socket:
    """A socket that listens on the first free one of ``ports``; HpclmError if all are in use.

    ``address``: empty for all interfaces. Always IPv4: PyTorch looks up the name of every peer of an IPv6 socket, one after another.
    """
    for port in ports:
        with suppress(OSError):
            # bound before it is announced, so that no other process can take the port in between
            return socket.create_server((address, port), family=socket.AF_INET, backlog=BACKLOG)
    raise HpclmError(f"no free port on {socket.gethostname()}: {', '.join(map(str, ports))} are all in use")


def resolved(host: str) -> str:
    """The IPv4 address of ``host``; empty if it has none here."""
    with suppress(OSError):
        return socket.gethostbyname(host)
    return ""


def answers(host: str, port: int, seconds: float) -> bool | None:
    """Whether a server accepts a connection; None if the machine does not even refuse it within ``seconds``."""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except OSError as error:
        return False if isinstance(error, ConnectionRefusedError) else None
    return True


def first_to_answer(hosts: Sequence[str], port: int, seconds: float) -> str:
    """The first of ``hosts`` on which a server accepts a connection; empty if none does within ``seconds``."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if host := next((host for host in hosts if answers(host, port, seconds=2.0)), ""):
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
    """Whether this machine has no IPv4 address but loopback's."""
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
    """This machine's addresses for other machines, that of the interface ``first`` first, and its name."""
    outward = {name: address for name, address in addresses().items() if not address.startswith("127.")}
    return [outward[name] for name in sorted(outward, key=lambda name: name != first)] + [socket.gethostname()]


def address_towards(host: str) -> str:
    """This machine's address on the route to ``host``; nothing is sent. Empty without a route."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # a datagram socket's connect() only looks up the route
        probe.connect((host, DISCARD))
        return str(probe.getsockname()[0])
    return ""


def interface_of(address: str) -> str | None:
    """The interface with the IPv4 ``address``, or None."""
    return next((name for name, interface_address in addresses().items() if interface_address == address), None)


def check_interface(chosen: str | None, env: Mapping[str, str] = os.environ) -> None:
    """ConfigError if this machine lacks the interface ``chosen`` by cluster.interface, or what gloo's own variable names instead."""
    names, variable = [name for _, name in socket.if_nameindex()], env.get("GLOO_SOCKET_IFNAME")
    setting = f"GLOO_SOCKET_IFNAME={variable}" if variable else f"cluster.interface={chosen}"
    if (variable or chosen) and any(name not in names for name in (variable or chosen or "").split(",")):
        way_out = " (it may be left over from another machine: unset it, or set cluster.interface)" if variable else ""
        raise ConfigError(f"{setting}: {socket.gethostname()} has only {', '.join(names)}{way_out}")


def use_interface(chosen: str | None, outward: str | None, env: MutableMapping[str, str] = os.environ) -> None:
    """Set the interface that gloo and NCCL use; ConfigError if this machine lacks it.

    ``chosen`` (by the user) is for both; ``outward`` (leads to the other nodes) for gloo only: NCCL finds the fastest
    itself, and reads /etc/nccl.conf.
    """
    check_interface(chosen, env)
    if chosen or outward:
        env.setdefault("GLOO_SOCKET_IFNAME", str(chosen or outward))
    if chosen:
        env.setdefault("NCCL_SOCKET_IFNAME", f"={chosen}")  # without "=" it is a prefix: eth1 would match eth10


def record_collectives(logs: Path, env: MutableMapping[str, str] = os.environ) -> None:
    """Switch NCCL's flight recorder on, unless the user chose otherwise: if a collective times out, PyTorch writes the last
    ones of each process to ``logs``. Its default is a predictable name in /tmp."""
    # TORCH_NCCL_ASYNC_ERROR_HANDLING keeps its default, 3: PyTorch's watchdog reports an NCCL error, sleeps for four times
    # TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC (60 s; ProcessGroupNCCL.cpp, Watchdog::runLoop) and aborts the process. By then
    # hpclm's watchdog has named a lost rank. With 0, an error that no lost rank explains would hang until hang_minutes.
    env.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    env.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(logs / "nccl-timeout-rank_"))
    env.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def hide_lookup_warnings(env: MutableMapping[str, str] = os.environ) -> None:
    """Have PyTorch, when it is imported, log errors only, unless the user chose a level.

    Its store warns of every host whose address has no name, as where compute nodes have no DNS; nothing needs the name.
    """
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
