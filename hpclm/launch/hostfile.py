"""Hosts and slots to run on, in DeepSpeed's syntax: a hostfile, and the parts of it to include or exclude."""

import re
from pathlib import Path

from hpclm.base import files
from hpclm.base.errors import ConfigError, unread
from hpclm.base.registry import hint

Resources = dict[str, list[int]]
"""Slots (GPU numbers) of each host, in the order of the hostfile."""

LINE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]*)\s+slots=([1-9]\d{0,3})(\s.*)?")
SLOTS = re.compile(r"^[^#]*\sslots=")
FORM = "NAME[:SLOT[,SLOT...]][@NAME...], such as node1@node2:4,5"


def load(path: str | Path) -> Resources:
    """All slots of the hostfile at ``path``; ConfigError names the line that is wrong."""
    file = files.readable(path, "hostfile")
    try:
        return parse(files.read_text(file), str(path))
    except OSError as error:
        raise unread(error, f"hostfile {path}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"hostfile {path} is not text") from None


def parse(text: str, name: str = "hostfile") -> Resources:
    """``text``: a line "HOST slots=N" for each host; empty lines and lines that begin with # are skipped."""
    hosts = Resources()
    names = set[str]()
    problems = []
    for number, line in enumerate(map(str.strip, text.removeprefix("\ufeff").splitlines()), start=1):
        match = LINE.fullmatch(line)
        if match and SLOTS.search(match[3] or ""):
            problems.append(f"{name} line {number}: {line!r} has slots= twice")
        elif match and match[1].lower() not in names:
            hosts[match[1]] = list(range(int(match[2])))
            names.add(match[1].lower())
        elif match:
            problems.append(f"{name} line {number}: host {match[1]} is listed twice")
        elif line and not line.startswith("#"):
            problems.append(f'{name} line {number}: {line!r} is not "HOST slots=N", such as: node1 slots=8')
    if not hosts and not problems:
        problems = [f'{name} names no host; it needs a line "HOST slots=N" for each']
    if problems:
        raise ConfigError(problems)
    return hosts


def select(hosts: Resources, include: str = "", exclude: str = "") -> Resources:
    """The part of ``hosts`` that ``include`` names, or all except ``exclude``; all if both are empty.

    ConfigError if both are given, for a host or slot that is not in the hostfile, and if nothing is left.
    """
    if include and exclude:
        raise ConfigError(f"include={include} and exclude={exclude} cannot be combined; give one of them")
    if not include and not exclude:
        return hosts
    option = f"include={include}" if include else f"exclude={exclude}"
    named = _named(include or exclude, option)
    problems = []
    for host, slots in named.items():
        if host not in hosts:
            problems.append(f"{option}: host {host!r} is not in the hostfile.{hint(host, list(hosts))}")
        elif not set(slots) <= set(hosts[host]):
            missing = min(set(slots) - set(hosts[host]))
            last = len(hosts[host]) - 1
            problems.append(f"{option}: host {host} has no slot {missing}; its slots are 0 to {last}")
    if problems:
        raise ConfigError(problems)
    if include:
        chosen = {host: named[host] or slots for host, slots in hosts.items() if host in named}
    else:
        out = {host: slots or hosts[host] for host, slots in named.items()}
        chosen = {host: [slot for slot in slots if slot not in out.get(host, [])] for host, slots in hosts.items()}
    chosen = {host: slots for host, slots in chosen.items() if slots}
    if not chosen:
        raise ConfigError(f"{option} leaves no slot to run on")
    return chosen


def _named(text: str, option: str) -> Resources:
    """The slots of each host that ``text`` names, sorted and without duplicates. An empty list means all slots."""
    named: dict[str, set[int]] = {}
    for word in map(str.strip, text.split("@")):
        match = re.fullmatch(r"([^:]+)(:\d{1,4}(\s*,\s*\d{1,4})*)?", word)
        if not match:
            raise ConfigError(f"{option}: {word!r} is not {FORM}")
        named.setdefault(match[1], set()).update(map(int, re.findall(r"\d+", match[2] or "")))
    return {host: sorted(slots) for host, slots in named.items()}


def limit(hosts: Resources, nodes: int, gpus: int) -> Resources:
    """The first ``nodes`` hosts with the first ``gpus`` slots of each; ConfigError if there are fewer."""
    if nodes > len(hosts):
        raise ConfigError(f"job.nodes={nodes}, but the hostfile gives {len(hosts)}: {', '.join(hosts)}")
    chosen = dict(list(hosts.items())[:nodes])
    few = [f"{host} ({len(slots)})" for host, slots in chosen.items() if len(slots) < gpus]
    if few:
        raise ConfigError(f"job.gpus={gpus}, but these hosts have fewer slots to run on: {', '.join(few)}")
    return {host: slots[:gpus] for host, slots in chosen.items()}
