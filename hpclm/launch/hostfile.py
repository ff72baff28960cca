"""The hosts and slots to run on, in DeepSpeed's syntax: a hostfile, and what to include or exclude."""

import re
from pathlib import Path

from hpclm import files
from hpclm.errors import ConfigError
from hpclm.registry import hint

Resources = dict[str, list[int]]
"""Slots (GPU numbers) of each host, in the order of the hostfile."""

FORM = "NAME[:SLOT[,SLOT...]][@NAME...], such as node1@node2:4,5"


def load(path: str | Path) -> Resources:
    """All slots of the hostfile at ``path``; ConfigError names the line that is wrong."""
    file = files.readable(path, "hostfile")
    try:
        return parse(files.read_text(file), str(path))
    except OSError as error:
        raise ConfigError(f"hostfile {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"hostfile {path} is not text") from None


def parse(text: str, name: str = "hostfile") -> Resources:
    """``text``: a line "HOST slots=N" for each host; empty lines and lines that begin with # are skipped."""
    found: Resources = {}
    seen: dict[str, int] = {}
    wrong = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d{1,4})(?:\s.*)?", line)
        if not match:
            wrong.append(f'{name} line {number}: {line!r} is not "HOST slots=N", such as: node1 slots=8')
        elif not re.fullmatch(
            r"[A-Za-z0-9_][A-Za-z0-9._-]*", match[1]
        ):  # commas and colons separate hosts for a launcher
            wrong.append(f"{name} line {number}: {match[1]!r} is not a host name or address")
        elif match[1] in seen:
            wrong.append(f"{name} line {number}: host {match[1]} is already in line {seen[match[1]]}")
        elif int(match[2]) < 1:
            way_out = "leave the host out or put # before it"
            wrong.append(f"{name} line {number}: slots={match[2]} must be at least 1; {way_out}")
        else:
            seen[match[1]], found[match[1]] = number, list(range(int(match[2])))
    if not found and not wrong:
        wrong = [f'{name} names no host; it needs a line "HOST slots=N" for each']
    if wrong:
        raise ConfigError(wrong)
    return found


def select(hosts: Resources, include: str = "", exclude: str = "") -> Resources:
    """The part of ``hosts`` that ``include`` names, or all but what ``exclude`` names; all without either.

    ConfigError for both, for a host or slot that is not in the hostfile, and if nothing is left.
    """
    if include and exclude:
        raise ConfigError(f"include={include} and exclude={exclude} cannot be combined; give one of them")
    if not include and not exclude:
        return hosts
    option, words = ("include", include) if include else ("exclude", exclude)
    named = _named(words, option)
    wrong = []
    for host, slots in named.items():
        if host not in hosts:
            wrong.append(f"{option}={words}: host {host!r} is not in the hostfile.{hint(host, list(hosts))}")
        for slot in slots:
            if slot not in hosts.get(host, slots):
                last = len(hosts[host]) - 1
                wrong.append(f"{option}={words}: host {host} has no slot {slot}; its slots are 0 to {last}")
    if wrong:
        raise ConfigError(wrong)
    if include:
        chosen = {host: named[host] or slots for host, slots in hosts.items() if host in named}
    else:
        out = {host: slots or hosts[host] for host, slots in named.items()}
        chosen = {host: [slot for slot in slots if slot not in out.get(host, [])] for host, slots in hosts.items()}
    chosen = {host: slots for host, slots in chosen.items() if slots}
    if not chosen:
        raise ConfigError(f"{option}={words} leaves no slot to run on")
    return chosen


def _named(words: str, option: str) -> Resources:
    """Slots of each host that ``words`` name, sorted, without duplicates; empty means all."""
    found: dict[str, set[int]] = {}
    for word in words.split("@"):
        host, colon, slots = word.strip().partition(":")
        if not host or not re.fullmatch(r"\d{1,4}(\s*,\s*\d{1,4})*" if colon else "", slots.strip()):
            raise ConfigError(f"{option}={words}: {word.strip()!r} is not {FORM}")
        found.setdefault(host, set()).update(int(slot) for slot in slots.split(",") if colon)
    return {host: sorted(slots) for host, slots in found.items()}


def limit(hosts: Resources, nodes: int, gpus: int) -> Resources:
    """The first ``nodes`` hosts with the first ``gpus`` slots of each; ConfigError if there are fewer."""
    if nodes > len(hosts):
        raise ConfigError(f"job.nodes={nodes}, but the hostfile gives {len(hosts)}: {', '.join(hosts)}")
    chosen = dict(list(hosts.items())[:nodes])
    few = [f"{host} ({len(slots)})" for host, slots in chosen.items() if len(slots) < gpus]
    if few:
        raise ConfigError(f"job.gpus={gpus}, but these hosts have fewer slots to run on: {', '.join(few)}")
    return {host: slots[:gpus] for host, slots in chosen.items()}
