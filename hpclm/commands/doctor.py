"""``hpclm doctor``, or ``hpclm env``: what each process has, what is wrong with it, and what to do."""

import argparse
import json
import logging
import os
import sys
from typing import Any

from hpclm import terminal
from hpclm.config import ClusterConfig
from hpclm.diagnostics import diagnosis, inventory
from hpclm.distributed import bootstrap
from hpclm.distributed.rendezvous import LINGER, connect
from hpclm.errors import ConfigError, HpclmError
from hpclm.node.processes import wait_until
from hpclm.terminal import say

RENDEZVOUS = 20  # seconds within which the processes must find each other
ANSWER = 30.0  # seconds that a process may take to report
PIPE = 4000  # bytes that are written to a pipe atomically
HEAD = ("rank", "host", "local", "launcher", "device", "threads", "python", "torch", "interface", "pid")
Facts = dict[str, dict[str, Any]]


def main(argv: list[str]) -> int:
    """``hpclm doctor``."""
    parser = terminal.ArgumentParser(
        prog="hpclm doctor",
        description="Show what this process has: versions, devices, network, limits, launcher; and what is wrong. "
        "Under srun, mpirun or torchrun, a table shows a line for each process.",
        epilog="exit codes: 0 nothing would stop a run · 1 something would, or the processes cannot find each other",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON, an object for each process")
    parser.add_argument("--ranks", action="store_true", help="print only the table of processes")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR)

    own = inventory.collect()
    try:
        world = bootstrap.detect(alone=False)
    except ConfigError:  # already among the facts
        world = bootstrap.World("single", 0, 1)
    if world.size == 1:
        return conclude([own], args)
    try:
        return together(world, own, args)
    except (HpclmError, ImportError) as error:
        # each process prints its own, in one write, so that lines do not mix
        text = json.dumps(own) if args.json else "  ".join(row(own))
        os.write(1, text.encode()[: None if args.json else PIPE] + b"\n")
        if not world.rank:
            reason = f"PyTorch cannot be loaded: {error}" if isinstance(error, ImportError) else error
            raise HpclmError(f"the processes cannot find each other: {reason}") from None
        return 1


def together(world: bootstrap.World, own: Facts, args: argparse.Namespace) -> int:
    """Gather the facts of all processes in the store; rank 0 shows them.

    Without collectives: if they do not work, doctor must still show why.
    """
    met = connect(world, ClusterConfig(start_seconds=RENDEZVOUS))
    store = met.store
    own["network"]["to rank 0"] = met.interface
    store.set(f"hpclm/doctor/{world.rank}", own)
    if world.rank:
        code = store.wait("hpclm/doctor", 2 * ANSWER)
        if code is None:
            raise HpclmError("rank 0 is gone")
        store.set(f"hpclm/doctor/read/{world.rank}", True)
        return int(code)
    everyone = [own]
    for info in met.ranks[1:]:
        answer = store.wait(f"hpclm/doctor/{info.rank}", ANSWER)
        if answer is None:
            raise HpclmError(f"{info} does not report what it has")
        everyone.append(answer)
    code = conclude(everyone, args)
    sys.stdout.flush()
    store.set("hpclm/doctor", code)
    keys = [f"hpclm/doctor/read/{info.rank}" for info in met.ranks[1:]]
    wait_until(lambda: store.get_all(keys), LINGER)  # the store ends with this process
    return code


def conclude(everyone: list[Facts], args: argparse.Namespace) -> int:
    """Print the facts; 1 if something would stop a run."""
    problems, hints = diagnosis.diagnose(everyone)
    if args.json:
        facts = everyone if len(everyone) > 1 else everyone[0]
        print(json.dumps({"ok": not problems, "problems": problems, "hints": hints, "found": facts}, indent=1))
        return bool(problems)
    if not args.ranks:
        for title, values in everyone[0].items():
            say(title)
            for name, value in values.items():
                say(f"  {name:<24}{shown(value)}")
    if len(everyone) > 1 or args.ranks:
        say("\n".join(terminal.columns([HEAD, *map(row, everyone)])))
    for kind, texts in (("problem", problems), ("hint", hints)):
        for text in texts:
            say(f"{kind}: {text}")
    if not problems and not hints:
        print("no problems found")
    return bool(problems)


def row(facts: Facts) -> list[str]:
    """One process in the columns of the table."""
    process, torch, machine = facts["process"], facts["torch"], facts["machine"]
    gpus, visible = torch.get("gpus") or [], facts["variables"].get("CUDA_VISIBLE_DEVICES")
    device = f"{len(gpus)} x {gpus[0]['name']}" if gpus else "CPU"
    return [
        f"{process.get('rank', '?')}/{process.get('size', '?')}",
        process["host"],
        f"{process.get('local_rank', '?')}/{process.get('local_size', '?')}",
        process.get("launcher", "?"),
        device + (f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""),
        f"{machine['threads']}{' bound' * machine['bound']}",
        facts["software"]["python"],
        torch.get("version") or "none",
        facts["network"]["to rank 0"] or "-",
        str(process["pid"]),
    ]


def shown(value: Any) -> str:
    """A value for people: bytes in GiB, lists and objects in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(part)}" for name, part in value.items())
    if isinstance(value, list):
        return "; ".join(map(shown, value)) or "none"
    if isinstance(value, int) and value >= 1 << 24:
        return f"{value / (1 << 30):.1f} GiB"
    return "none" if value is None else str(value).replace("\n", "; ")
