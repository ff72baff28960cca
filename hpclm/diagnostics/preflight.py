"""Checks before a run of several processes starts, so that a bad node costs seconds and not a night.

Every process reports what it has; each node terminates what earlier attempts left, and checks the run directory; all processes
do an all-reduce together, and each node sends messages to the next. The result is kept as preflight.json.
"""

import logging
import os
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpclm import files
from hpclm.diagnostics import probes, report, stale, verdict
from hpclm.diagnostics.report import Report
from hpclm.diagnostics.verdict import Link
from hpclm.errors import ConfigError, HpclmError
from hpclm.node import facts, processes
from hpclm.rundir import code

if TYPE_CHECKING:
    import torch

    from hpclm.distributed.context import DistributedContext

log = logging.getLogger(__name__)
ROUNDS = 10  # messages over each link at most, until none seems slow; the fastest one counts
ROOM = 256 << 20  # bytes that a run directory must have free if the size of a checkpoint is unknown


def check(
    context: "DistributedContext",
    device: "torch.device",
    modules: Collection[str],
    out: Path,
    env: Mapping[str, str] = os.environ,
    room: int = ROOM,
) -> Report:
    """The report if all is well; otherwise HpclmError, the same on every rank, with the problems and the bad nodes;
    ConfigError if the nodes run different code.

    Call it on every rank once the process group is up, while rank 0 holds the lock of the run directory ``out``: other
    training processes that have it open are then left over, and are terminated. ``modules``: the user's that the run loads;
    ``room``: bytes that a checkpoint may take.
    """
    began = time.monotonic()
    node, me = facts.node_name(context.launcher, env), context.ranks[context.rank]
    present = context.all_gather({"node": node})
    nodes = verdict.nodes_of(present)
    check_code(context, modules, node)
    is_first_of_node = nodes[node][0] == context.rank
    pids = [info.pid for info in context.ranks if info.machine == me.machine]
    cleaned = clean(out, pids, env) if is_first_of_node else {}

    context.barrier()
    ranks = context.all_gather(facts.of_process(context.launcher, device, env))
    ranks = [each | {"rank": rank, "clock": each["time"] - ranks[0]["time"]} for rank, each in enumerate(ranks)]
    token = context.run_on_main(lambda: _mark(out))
    cleaned |= {"disk": probes.look(out, token)} if is_first_of_node else {}
    names = [each["node"] for each in present]
    local = {name: found for name, found in zip(names, context.all_gather(cleaned), strict=True) if found}
    if context.rank == 0:
        with suppress(OSError):
            (out / probes.marker(token)).unlink()
    links = measure_links(context, nodes, device)

    def conclude() -> dict[str, Any]:
        looks = {name: found["disk"] for name, found in local.items()}
        findings = [
            *verdict.agreement(ranks),
            *verdict.devices(ranks),
            *verdict.machines(ranks),
            *verdict.disks(str(out), looks, room),
            *verdict.remains(local),
            *verdict.links(links),
        ]
        made = Report(
            time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            ok=not any(finding.serious for finding in findings),
            seconds=round(time.monotonic() - began, 3),
            problems=[finding.text for finding in findings if finding.serious],
            warnings=[finding.text for finding in findings if not finding.serious],
            bad=sorted({name for finding in findings for name in finding.bad}),
            ended=[f"{name}: {process}" for name, found in local.items() for process in found["ended"]],
            ranks=ranks,
            links=[asdict(link) for link in links],
            disks=looks,
        )
        with suppress(OSError):  # a folder that cannot be written is already among the problems
            made.write(out)
        return asdict(made)

    made = Report(**context.run_on_main(conclude))
    if context.rank == 0:
        log_report(made, context.size)

    def refuse() -> None:
        if not made.ok:
            raise HpclmError(refusal(made, out))

    context.run_on_main(refuse)
    return made


def check_code(context: "DistributedContext", modules: Collection[str], node: str) -> None:
    """ConfigError on every rank if they do not all run the same code, by its digest in attempts.jsonl."""
    found = code.sources(modules)
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
    """Terminate what earlier attempts left running on this machine."""
    found = stale.left_over(out, ranks, env)
    stuck = {process.pid for process in processes.terminate(found, stale.GRACE)}
    return {
        "ended": [stale.described(process) for process in found if process.pid not in stuck],
        "stuck": [stale.described(process) for process in found if process.pid in stuck],
    }


def measure_links(
    context: "DistributedContext", nodes: Mapping[str, Sequence[int]], device: "torch.device"
) -> list[Link]:
    """Do an all-reduce over all ranks; then each node sends to the next one, and the last to the first.

    On CPUs one process of each node takes part; with GPUs as many as every node has, since each GPU may have its own
    network card.
    """
    if context.size == 1:
        return []
    try:
        probes.all_reduce(context.size, device)
    except RuntimeError as error:
        raise HpclmError(
            f"preflight: an all-reduce over all {context.size} ranks fails: {str(error).splitlines()[0]}; "
            f"check cluster.interface; NCCL_DEBUG=INFO logs more"
        ) from error
    if len(nodes) == 1:
        return []
    lanes = list(zip(*nodes.values(), strict=False))[: None if device.type == "cuda" else 1]
    speed, links = 0.0, []
    for _ in range(ROUNDS):
        reason = ""
        for lane in lanes:
            if context.rank in lane:
                try:
                    speed = max(speed, _receive(list(nodes), lane, lane.index(context.rank), device))
                except RuntimeError as failed:
                    reason = str(failed).splitlines()[0]
        links = _links(nodes, lanes, context.all_gather((speed, reason)))
        if any(link.error for link in links) or not verdict.links(links):
            break
    return links


def _receive(names: Sequence[str], lane: Sequence[int], here: int, device: "torch.device") -> float:
    """GB/s to the rank at position ``here`` of ``lane``, which has one rank of each node, from the one before it."""
    after = (here + 1) % len(lane)
    try:
        return probes.receive(lane[here - 1], lane[after], device)
    except RuntimeError as error:
        if device.type == "cuda":
            raise
        around = " or ".join(
            dict.fromkeys((names[here - 1], names[after]))
        )  # gloo, which gathers results, is unusable now
        raise HpclmError(
            f"preflight: {names[here]} cannot exchange messages with {around}: {str(error).splitlines()[0]}; exclude one of "
            "them: hpclm submit --exclude NODE ..."
        ) from error


def _links(
    nodes: Mapping[str, Sequence[int]], lanes: Sequence[Sequence[int]], results: Sequence[tuple[float, str]]
) -> list[Link]:
    """The links to each node from the one before it; ``results``: GB/s and error of each rank."""
    names, links = list(nodes), []
    for number, name in enumerate(names):
        speeds, errors = zip(*(results[lane[number]] for lane in lanes), strict=True)
        error = next(filter(None, errors), "")
        links.append(Link((names[number - 1], name), 0.0 if error else min(speeds) * len(lanes), error))
    return links


def log_report(made: Report, size: int) -> None:
    """Log the result in one line, and the warnings."""
    if size > 1:
        log.info(made.line())
    for process in made.ended:
        log.warning("terminated a process that an earlier attempt left on %s", process)
    for warning in made.warnings:
        log.warning("preflight: %s", warning)


def refusal(made: Report, out: Path) -> str:
    """The problems, and what to do."""
    lines = [f"preflight: {problem}" for problem in made.problems]
    if made.bad:
        lines.append(
            f"bad node{'s' * (len(made.bad) > 1)}: {', '.join(made.bad)}; start again without: "
            f"hpclm resume {files.typed(out)} --exclude-bad {files.typed(out)}"
        )
    lines.append(f"what each process has is in {out / report.FILE}; cluster.preflight=off skips these checks")
    return "\n".join(lines)
