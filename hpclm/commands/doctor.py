"""``hpclm doctor``, or ``hpclm env``: what each process has, what is wrong with it, and what to do."""

import argparse
import json
import logging
import sys
from typing import Any

from hpclm import terminal
from hpclm.config import ClusterConfig
from hpclm.diagnostics import facts, verdict
from hpclm.diagnostics.facts import Facts
from hpclm.distributed import bootstrap
from hpclm.distributed.rendezvous import LINGER, connect
from hpclm.errors import ConfigError, HpclmError
from hpclm.node.processes import wait_until
from hpclm.terminal import say

RENDEZVOUS = 20  # seconds within which the processes must find each other
ANSWER = 60.0  # seconds that a process may take to report
HEAD = ("rank", "host", "local", "launcher", "device", "threads", "python", "torch", "interface", "pid")


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

    try:
        world, wrong = bootstrap.detect(alone=False), {}
    except ConfigError as error:
        world, wrong = bootstrap.World("single", 0, 1), {"wrong": str(error)}
    own = wrong | facts.everything(world)
    if world.size == 1:
        return conclude([own], args)
    try:
        return together(world, own, args)
    except (HpclmError, ImportError) as error:
        say(json.dumps(own) if args.json else "  ".join(row(own)), flush=True)  # each process its own
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
    own["interface"] = met.interface
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
    findings = [*verdict.processes(everyone), *verdict.agreement(everyone), *verdict.memory(everyone)]
    problems = [finding.text for finding in findings if finding.serious]
    hints = [finding.text for finding in findings if not finding.serious]
    if args.json:
        found = everyone if len(everyone) > 1 else everyone[0]
        print(json.dumps({"ok": not problems, "problems": problems, "hints": hints, "found": found}, indent=1))
        return bool(problems)
    if not args.ranks:
        for name, value in everyone[0].items():
            if isinstance(value, dict) and name in ("collect_env", "network", "variables"):
                say("\n".join([name, *(f"  {inner:<24}{shown(part)}" for inner, part in value.items())]))
            else:
                say(f"{name:<26}{shown(value)}")
    if len(everyone) > 1 or args.ranks:
        say("\n".join(terminal.columns([HEAD, *map(row, everyone)])))
    say(
        "\n".join([*(f"problem: {text}" for text in problems), *(f"hint: {text}" for text in hints)])
        or "no problems found"
    )
    return bool(problems)


def row(own: Facts) -> list[str]:
    """One process in the columns of the table."""
    gpus, visible = own.get("gpus"), own["visible"]
    device = f"{gpus} x {own['device_name']}" if gpus else "CPU"
    return [
        f"{own['rank']}/{own['size']}",
        own["host"],
        f"{own['local_rank']}/{own['local_size']}",
        own["launcher"],
        device + (f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""),
        str(own["threads"]),
        own["python"],
        own["torch"] or "none",
        own["interface"] or "-",
        str(own["pid"]),
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
