"""Checks before a run of several processes starts, so that a bad node costs seconds and not a night.

Every process reports its facts, and each node checks the run directory. All processes do an all-reduce, and each node sends messages to
the next. The result is an event of the run.
"""

import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hpclm.base import files
from hpclm.base.errors import ConfigError, HpclmError
from hpclm.base.terminal import many
from hpclm.diagnostics import facts, probes, verdict
from hpclm.diagnostics.verdict import Link
from hpclm.rundir import code, events

if TYPE_CHECKING:
    import torch

    from hpclm.distributed.context import DistributedContext

log = logging.getLogger(__name__)
ROUNDS = 5  # messages over each link; the fastest one counts
ROOM = 256 << 20  # bytes that must be free in a run directory if the size of a checkpoint is unknown


def check_nodes(
    context: "DistributedContext",
    device: "torch.device",
    modules: Collection[str],
    out: Path,
    env: Mapping[str, str] = os.environ,
    room: int = ROOM,
) -> None:
    """HpclmError, the same on every rank, with the problems and the bad nodes; ConfigError if the nodes run different code.

    Call it on every rank once the process group is up. ``modules``: the user's modules that the run loads; ``room``: bytes that a
    checkpoint in the run directory ``out`` may take.
    """
    began = time.monotonic()
    node = context.job.node
    check_code(context, modules, node)
    ranks = context.all_gather(facts.of_process(node, env) | facts.of_device(device))
    nodes = verdict.nodes_of(ranks)
    token = context.run_on_main(lambda: probes.mark(out))
    probed = context.all_gather(
        probes.probe_disk(out, token) if context.rank in {members[0] for members in nodes.values()} else None
    )
    disks = {name: probed[members[0]] for name, members in nodes.items()}
    links = measure_links(context, nodes, device)

    def conclude() -> None:
        probes.unmark(out, token)
        findings = [
            *verdict.agreement(ranks),
            *verdict.devices(ranks),
            *verdict.memory(ranks),
            *verdict.cores(ranks),
            *verdict.disks(str(out), disks, room),
            *verdict.links(links),
        ]
        problems = [finding.text for finding in findings if finding.serious]
        warnings = [finding.text for finding in findings if not finding.serious]
        bad = sorted({name for finding in findings for name in finding.bad})
        seconds = round(time.monotonic() - began, 3)
        report = {
            "ok": not problems,
            "seconds": seconds,
            "problems": problems,
            "warnings": warnings,
            "bad": bad,
            "ranks": [{"rank": rank, **process_facts} for rank, process_facts in enumerate(ranks)],
            "links": [asdict(link) for link in links],
            "disks": disks,
        }
        kept = False
        with suppress(OSError):  # a folder that cannot be written is already among the problems
            events.append(out, "preflight", **report)
            kept = True
        if context.size > 1:
            text = f"{len(ranks)} ranks on {many(len(nodes), 'node')}"
            text += f", {many(len(problems), 'problem')}" if problems else " agree"
            if links:
                text += f"; slowest link {verdict.rate(min(link.speed for link in links))}"
            log.info("preflight: %s; %.1f s", text, seconds)
        for warning in warnings:
            log.warning("preflight: %s", warning)
        if problems:
            raise HpclmError(refusal(problems, bad, out, kept))

    context.run_on_main(conclude)


def check_code(context: "DistributedContext", modules: Collection[str], node: str) -> None:
    """ConfigError on every rank unless all run the same code, compared by digest."""
    sources = code.sources(modules)
    digests = [tuple(pair) for pair in context.all_gather((node, code.digest(sources)))]
    if len({digest for _, digest in digests}) == 1:
        return
    contents = context.all_gather(code.contents(sources))

    def refuse() -> None:
        raise ConfigError(
            f"{verdict.other_code(digests, contents)}. Install the same code on every node, or submit with job.snapshot=true: "
            "then all nodes run one copy, in the run directory"
        )

    context.run_on_main(refuse)


def measure_links(
    context: "DistributedContext", nodes: Mapping[str, Sequence[int]], device: "torch.device"
) -> list[Link]:
    """Do an all-reduce over all ranks; then the first rank of each node sends to the first rank of the next node, and the last node to the first."""
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
    names = list(nodes)
    leaders = [ranks[0] for ranks in nodes.values()]
    speed = 0.0
    reason = ""
    if context.rank in leaders:
        here = leaders.index(context.rank)
        after = (here + 1) % len(leaders)
        try:
            speed = max(probes.receive(leaders[here - 1], leaders[after], device) for _ in range(ROUNDS))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            if device.type == "cpu":  # gloo, which gathers results, is unusable now
                around = " or ".join(dict.fromkeys((names[here - 1], names[after])))
                raise HpclmError(
                    f"preflight: {names[here]} cannot exchange messages with {around}: {reason}; exclude one of them: "
                    "hpclm submit --exclude NODE ..."
                ) from error
    results = context.all_gather((speed, reason))
    return [Link((names[number - 1], names[number]), *results[leader]) for number, leader in enumerate(leaders)]


def refusal(problems: Sequence[str], bad: Sequence[str], out: Path, kept: bool) -> str:
    """The problems, and advice for the ``bad`` nodes. ``kept``: whether the report could be written into ``out``."""
    lines = [f"preflight: {problem}" for problem in problems]
    if bad:
        lines.append(
            f"{'bad node' if len(bad) == 1 else 'bad nodes'}: {', '.join(bad)}; start again without {'it' if len(bad) == 1 else 'them'}: "
            f"hpclm resume {files.typed(out)} --exclude-bad {files.typed(out)}"
        )
    last = "set cluster.preflight=false to skip these checks"
    if kept:
        last = f"the host, device and library versions of each process, and the measurements, are in {out / events.NAME}; {last}"
    lines.append(last)
    return "\n".join(lines)
