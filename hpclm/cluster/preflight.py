"""Checks before a run of several processes begins, so that a bad node costs seconds and not a night.

Every process says what it has; each node looks for what earlier attempts left, and at the run directory; all reduce
together, and nodes by pairs. The outcome is kept as preflight.json.
"""

import logging
import os
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hpclm.cluster.health import disk, facts, links, network, processes, report, stale, verdict
from hpclm.cluster.health.facts import Facts
from hpclm.cluster.health.links import Pair
from hpclm.cluster.health.report import Report
from hpclm.config import RunConfig
from hpclm.errors import HpclmError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

log = logging.getLogger(__name__)
ROOM = 256 << 20  # bytes that a run directory must have free when nobody says how large a checkpoint is


class Team(Protocol):
    """The processes of the run, as far as the checks need them."""

    rank: int
    size: int
    launcher: str

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""

    def first(self, act: "Callable[[], Any]") -> Any:
        """The result of ``act`` on rank 0, on every rank."""

    def barrier(self) -> None:
        """Wait for every rank."""


def check(
    team: Team,
    device: "torch.device",
    config: RunConfig,
    out: str | Path,
    env: Mapping[str, str] = os.environ,
    room: int = ROOM,
) -> Report | None:
    """The outcome where all is well; HpclmError, the same on every rank, that names what is wrong and the bad nodes.

    Call it on every rank once the process group is up, while rank 0 holds the lock of the run directory ``out``:
    training processes that have it open are then left over, and are ended. ``room`` is the bytes a checkpoint may take.
    None when ``cluster.preflight=off``.
    """
    if not config.cluster.preflight:
        return None
    out, began = Path(out), time.monotonic()
    node = facts.node_name(team.launcher, env)
    everyone = team.gather({"node": node, "machine": processes.machine(), "pid": os.getpid()})
    nodes = verdict.nodes_of(everyone)
    leads = nodes[node][0] == team.rank
    here = [each["pid"] for each in everyone if each["machine"] == processes.machine()]
    cleaned = clean(out, here, env) if leads else {}

    team.barrier()
    mine = facts.here(team.launcher, device, env)
    ranks = team.gather(mine)
    ranks = [each | {"rank": rank, "clock": each["time"] - ranks[0]["time"]} for rank, each in enumerate(ranks)]
    token = team.first(lambda: _place(out))
    number = list(nodes).index(node)
    cleaned |= {"disk": disk.look(out, token, number)} if leads else {}
    local = {name: found for name, found in zip(_names(everyone), team.gather(cleaned), strict=True) if found}
    total, pairs = reach(team, nodes, device)

    def conclude() -> dict[str, Any]:
        looks = {name: found["disk"] for name, found in local.items()}
        until = time.monotonic() + disk.PATIENCE
        for i, look in enumerate(
            looks.values()
        ):  # a node that does not see ours is not seen either: do not wait for it
            patience = until - time.monotonic() if look.get("same") else 0.0
            look["back"] = "error" not in look and disk.seen(out, disk.marker(token, i), str(i), patience)
        abandoned = [path for path, age in verdict.unheld(local).items() if age > stale.ABANDONED]
        findings = [
            *verdict.agreement(ranks),
            *verdict.devices(ranks),
            *verdict.machines(ranks),
            *verdict.disks(str(out), looks, room),
            *verdict.remains(local, abandoned),
            *verdict.links(pairs),
        ]
        made = Report(
            time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            ok=not any(finding.serious for finding in findings),
            seconds=round(time.monotonic() - began, 3),
            problems=[finding.text for finding in findings if finding.serious],
            warnings=[finding.text for finding in findings if not finding.serious],
            bad=sorted({name for finding in findings for name in finding.bad}),
            ended=[f"{name}: {process}" for name, found in local.items() for process in found["ended"]],
            removed=abandoned,
            ranks=ranks,
            pairs=[asdict(pair) for pair in pairs],
            all_reduce=total,
            disks=looks,
        )
        with suppress(OSError):  # that the folder cannot be written is among the problems
            made.write(out)
        return asdict(made)

    made = Report(**team.first(conclude))
    if leads:
        disk.unmark(out, token, [number] if number else range(len(nodes)))
        for path in made.removed:
            with suppress(OSError):
                Path(path).unlink()
    if team.rank == 0:
        tell(made, team.size)

    def refuse() -> None:
        if not made.ok:
            raise HpclmError(refusal(made, out))

    team.first(refuse)
    return made


def _names(everyone: Sequence[Facts]) -> list[str]:
    return [each["node"] for each in everyone]


def _place(out: Path) -> str:
    token = secrets.token_hex(8)
    with suppress(OSError):  # every node says for itself that it cannot write
        disk.mark(out, disk.marker(token), token)
    return token


def clean(out: Path, ranks: Sequence[int], env: Mapping[str, str]) -> dict[str, Any]:
    """End what earlier attempts left running on this machine, and see what they left locked."""
    found = stale.left_over(out, ranks, env)
    stuck = processes.end(found, stale.GRACE)
    return {
        "ended": [stale.described(process) for process in found if process not in stuck],
        "stuck": [stale.described(process) for process in stuck],
        "locks": [asdict(lock) for lock in stale.locks(env)],
    }


def reach(team: Team, nodes: Mapping[str, Sequence[int]], device: "torch.device") -> tuple[float | None, list[Pair]]:
    """GB/s of an all-reduce over all ranks, and of each pair of nodes; slow pairs are measured again, alone."""
    if team.size == 1:
        return None, []
    names = list(nodes)
    try:
        speed = network.total(device)
    except RuntimeError as error:
        raise HpclmError(
            f"preflight: an all-reduce over all {team.size} ranks does not come to an end: {str(error).splitlines()[0]}; "
            f"is cluster.interface right? NCCL_DEBUG=INFO tells more"
        ) from error
    total = min(team.gather(speed))
    found: dict[tuple[int, int], Pair] = {}
    for pairs in links.rounds(len(names)):
        found |= _round(team, nodes, pairs, device)
    slow, _ = links.judge(list(found.values()))
    for pair in slow:
        both = names.index(pair.nodes[0]), names.index(pair.nodes[1])
        again = _round(team, nodes, [both], device)[both]
        found[both] = max(pair, again, key=lambda each: each.speed)
    return total, list(found.values())


def _round(
    team: Team, nodes: Mapping[str, Sequence[int]], pairs: Sequence[tuple[int, int]], device: "torch.device"
) -> dict[tuple[int, int], Pair]:
    """Measure pairs of nodes at the same time: by one process each on CPUs, by one for each GPU, which may have its own
    network card."""
    names, speed = list(nodes), None
    for first, second in pairs:
        lanes = list(zip(nodes[names[first]], nodes[names[second]], strict=False))
        for lane in lanes[: None if device.type == "cuda" else 1]:
            if team.rank in lane:
                speed = _measured((names[first], names[second]), team.rank, sum(lane) - team.rank, device)
    told = team.gather(speed)
    found = {}
    for first, second in pairs:
        own = [told[rank] for rank in nodes[names[first]] if told[rank] is not None]
        found[first, second] = Pair((names[first], names[second]), min(own) * len(own))
    return found


def _measured(names: tuple[str, str], mine: int, partner: int, device: "torch.device") -> float:
    try:
        return network.measure(mine, partner, device)
    except RuntimeError as error:  # the process group is of no use after this
        raise HpclmError(
            f"preflight: {names[0]} and {names[1]} do not reach each other: {str(error).splitlines()[0]}; leave one of them "
            f"out: hpclm submit --exclude NODE ..."
        ) from error


def tell(made: Report, size: int) -> None:
    """Log the outcome: a line when all is well, the table when it is not."""
    if size > 1:
        log.info(made.line())
    for process in made.ended:
        log.warning("ended a process that an earlier attempt had left on %s", process)
    for warning in made.warnings:
        log.warning("preflight: %s", warning)
    if not made.ok:
        for row in made.table().splitlines():
            log.error(row)


def refusal(made: Report, out: Path) -> str:
    """The problems, and the way out."""
    lines = [f"preflight: {problem}" for problem in made.problems]
    if made.bad:
        lines.append(
            f"bad node{'s' * (len(made.bad) > 1)}: {', '.join(made.bad)}; start again without: "
            f"hpclm resume {shlex.quote(str(out))} --exclude-bad {shlex.quote(str(out))}"
        )
    lines.append(f"{out / report.FILE} has the whole table; cluster.preflight=off starts without these checks")
    return "\n".join(lines)
