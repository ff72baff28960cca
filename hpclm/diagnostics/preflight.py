"""Checks before a run of several processes starts, so that a bad node costs seconds and not a night.

Every process reports what it has; each node looks for what earlier attempts left, and checks the run directory; all processes
do an all-reduce together, and nodes in pairs. The result is kept as preflight.json.
"""

import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpclm import files
from hpclm.config import RunConfig
from hpclm.diagnostics import probes, report, stale, verdict
from hpclm.diagnostics.report import Report
from hpclm.diagnostics.verdict import Pair
from hpclm.errors import ConfigError, HpclmError
from hpclm.node import facts, processes
from hpclm.rundir import code

if TYPE_CHECKING:
    import torch

    from hpclm.distributed.context import DistributedContext

log = logging.getLogger(__name__)
ROOM = 256 << 20  # bytes that a run directory must have free if the size of a checkpoint is unknown


def check(
    context: "DistributedContext",
    device: "torch.device",
    config: RunConfig,
    out: str | Path,
    env: Mapping[str, str] = os.environ,
    room: int = ROOM,
) -> Report | None:
    """The report if all is well; otherwise HpclmError, the same on every rank, with the problems and the bad nodes;
    ConfigError if the nodes run different code.

    Call it on every rank once the process group is up, while rank 0 holds the lock of the run directory ``out``: other
    training processes that have it open are then left over, and are terminated. ``room``: bytes that a checkpoint may take.
    None if ``cluster.preflight=off``.
    """
    if not config.cluster.preflight:
        return None
    out, began = Path(out), time.monotonic()
    node, me = facts.node_name(context.launcher, env), context.ranks[context.rank]
    present = context.all_gather({"node": node})
    nodes = verdict.nodes_of(present)
    check_code(context, config, node)
    is_first_of_node = nodes[node][0] == context.rank
    pids = [info.pid for info in context.ranks if info.machine == me.machine]
    cleaned = clean(out, pids, env) if is_first_of_node else {}

    context.barrier()
    ranks = context.all_gather(facts.of_process(context.launcher, device, env))
    ranks = [each | {"rank": rank, "clock": each["time"] - ranks[0]["time"]} for rank, each in enumerate(ranks)]
    token = context.run_on_main(lambda: _mark(out))
    number = list(nodes).index(node)
    cleaned |= {"disk": probes.look(out, token, number)} if is_first_of_node else {}
    names = [each["node"] for each in present]
    local = {name: found for name, found in zip(names, context.all_gather(cleaned), strict=True) if found}
    total, pairs = measure_links(context, nodes, device)

    def conclude() -> dict[str, Any]:
        looks = {name: found["disk"] for name, found in local.items()}
        until = time.monotonic() + probes.PATIENCE
        for i, look in enumerate(looks.values()):
            patience = until - time.monotonic() if look.get("same") else 0.0  # else it writes to another folder
            look["back"] = "error" not in look and probes.seen(out, probes.marker(token, i), str(i), patience)
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
        with suppress(OSError):  # a folder that cannot be written is already among the problems
            made.write(out)
        return asdict(made)

    made = Report(**context.run_on_main(conclude))
    if is_first_of_node:
        probes.unmark(out, token, [number] if number else range(len(nodes)))
        for path in made.removed:
            with suppress(OSError):
                Path(path).unlink()
    if context.rank == 0:
        log_report(made, context.size)

    def refuse() -> None:
        if not made.ok:
            raise HpclmError(refusal(made, out))

    context.run_on_main(refuse)
    return made


def check_code(context: "DistributedContext", config: RunConfig, node: str) -> None:
    """ConfigError on every rank if they do not all run the same code, by its digest in attempts.jsonl."""
    found = code.sources(config)
    digests = [tuple(each) for each in context.all_gather((node, code.digest(found)))]
    if len({digest for _, digest in digests}) == 1:
        return
    contents = context.all_gather(code.contents(found))

    def refuse() -> None:
        raise ConfigError(
            f"{verdict.other_code(digests, contents)}. Install the same code on every node, or submit with job.snapshot=true: "
            "then all nodes run one copy, in the run directory"
        )

    context.run_on_main(refuse)


def _mark(out: Path) -> str:
    token = secrets.token_hex(8)
    with suppress(OSError):  # every node reports itself that it cannot write
        files.write_text(out / probes.marker(token), token)
    return token


def clean(out: Path, ranks: Sequence[int], env: Mapping[str, str]) -> dict[str, Any]:
    """Terminate what earlier attempts left running on this machine, and list the locks they left."""
    found = stale.left_over(out, ranks, env)
    stuck = {process.pid for process in processes.terminate(found, stale.GRACE)}
    return {
        "ended": [stale.described(process) for process in found if process.pid not in stuck],
        "stuck": [stale.described(process) for process in found if process.pid in stuck],
        "locks": [asdict(lock) for lock in stale.locks(env)],
    }


def measure_links(
    context: "DistributedContext", nodes: Mapping[str, Sequence[int]], device: "torch.device"
) -> tuple[float | None, list[Pair]]:
    """GB/s of an all-reduce over all ranks, and of each pair of nodes; slow pairs are measured again, one at a time."""
    if context.size == 1:
        return None, []
    names = list(nodes)
    try:
        speed = probes.all_ranks(device)
    except RuntimeError as error:
        raise HpclmError(
            f"preflight: an all-reduce over all {context.size} ranks does not complete: {str(error).splitlines()[0]}; "
            f"check cluster.interface; NCCL_DEBUG=INFO logs more"
        ) from error
    total = min(context.all_gather(speed))
    found: dict[tuple[int, int], Pair] = {}
    for pairs in verdict.rounds(len(names)):
        found |= _round(context, nodes, pairs, device)
    slow, _ = verdict.judge(list(found.values()))
    for pair in slow:
        both = names.index(pair.nodes[0]), names.index(pair.nodes[1])
        again = _round(context, nodes, [both], device)[both]
        found[both] = max(pair, again, key=lambda each: each.speed)
    return total, list(found.values())


def _round(
    context: "DistributedContext",
    nodes: Mapping[str, Sequence[int]],
    pairs: Sequence[tuple[int, int]],
    device: "torch.device",
) -> dict[tuple[int, int], Pair]:
    """Measure pairs of nodes at the same time.

    On CPUs one process of each node takes part; with GPUs all do, since each GPU may have its own network card.
    """
    names, speed = list(nodes), None
    for first, second in pairs:
        lanes = list(zip(nodes[names[first]], nodes[names[second]], strict=False))
        for lane in lanes[: None if device.type == "cuda" else 1]:
            if context.rank in lane:
                speed = _measured((names[first], names[second]), context.rank, sum(lane) - context.rank, device)
    speeds = context.all_gather(speed)
    found = {}
    for first, second in pairs:
        measured = [speeds[rank] for rank in nodes[names[first]] if speeds[rank] is not None]
        found[first, second] = Pair((names[first], names[second]), min(measured) * len(measured))
    return found


def _measured(names: tuple[str, str], rank: int, partner: int, device: "torch.device") -> float:
    try:
        return probes.pair(rank, partner, device)
    except RuntimeError as error:  # the process group is unusable after this
        raise HpclmError(
            f"preflight: {names[0]} and {names[1]} cannot communicate: {str(error).splitlines()[0]}; exclude one of them: "
            f"hpclm submit --exclude NODE ..."
        ) from error


def log_report(made: Report, size: int) -> None:
    """Log the result: one line if all is well, otherwise the table."""
    if size > 1:
        log.info(made.line())
    for process in made.ended:
        log.warning("terminated a process that an earlier attempt left on %s", process)
    for warning in made.warnings:
        log.warning("preflight: %s", warning)
    if not made.ok:
        for row in made.table().splitlines():
            log.error(row)


def refusal(made: Report, out: Path) -> str:
    """The problems, and what to do."""
    lines = [f"preflight: {problem}" for problem in made.problems]
    if made.bad:
        lines.append(
            f"bad node{'s' * (len(made.bad) > 1)}: {', '.join(made.bad)}; start again without: "
            f"hpclm resume {files.typed(out)} --exclude-bad {files.typed(out)}"
        )
    lines.append(f"the whole table is in {out / report.FILE}; cluster.preflight=off skips these checks")
    return "\n".join(lines)
