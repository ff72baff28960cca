"""Network interfaces of this host, and the choice of the one that traffic between nodes takes."""

import fcntl
import os
import socket
import struct
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

SIOCGIFADDR = 0x8915
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def addresses() -> dict[str, str]:
    """Interface -> its IPv4 address, for those that have one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def of(address: str) -> str | None:
    """The interface that has ``address`` (IPv4, or IPv4 written as IPv6); None when there is none."""
    wanted = address.removeprefix("::ffff:")
    return next((name for name, own in addresses().items() if own == wanted), None)


def choose(chosen: str | None, reaching: str | None, env: MutableMapping[str, str] = os.environ) -> str:
    """Tell gloo which interface to use: what the user ``chosen``, or ``reaching``, which leads to the other nodes.

    NCCL is told what the user chose, and else finds the fastest by itself. Gives what is in use in words.
    """
    if chosen or reaching:
        env.setdefault("GLOO_SOCKET_IFNAME", str(chosen or reaching))
    if chosen:  # else NCCL looks for the fastest by itself, and reads /etc/nccl.conf
        env.setdefault("NCCL_SOCKET_IFNAME", f"={chosen}")  # without "=" it would be a prefix: eth1 is eth10, too
    return described(env)


def described(env: Mapping[str, str] = os.environ) -> str:
    """The interfaces that gloo and NCCL are told to use, in words."""
    told = {env.get(variable) for variable in VARIABLES} - {None}
    return ", ".join(sorted(str(name) for name in told)) or "the libraries' choice"
