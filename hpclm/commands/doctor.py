"""``hpclm doctor``, or ``hpclm env``: what each process has, what is wrong with it, and what to do."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from hpclm import terminal
from hpclm.config import ClusterConfig
from hpclm.diagnostics import diagnosis, inventory
from hpclm.diagnostics.report import gib
from hpclm.distributed import bootstrap
from hpclm.distributed.rendezvous import LINGER, connect
from hpclm.errors import ConfigError, HpclmError
from hpclm.node.processes import wait_until
from hpclm.terminal import say

RENDEZVOUS = 20  # seconds within which the processes must find each other
ANSWER = 30.0  # seconds that a process may take to report
PIPE = 4000  # bytes that are written to a pipe atomically


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

    found = inventory.collect()
    try:
        world = bootstrap.detect(alone=False)
    except ConfigError:  # already in what was found
        world = bootstrap.World("single", 0, 1)
    if world.size == 1:
        return conclude([found], args.json, args.ranks)
    try:
        return together(world, found, args)
    except (HpclmError, ImportError) as failed:
        error = failed if isinstance(failed, HpclmError) else HpclmError(f"PyTorch cannot be loaded: {failed}")
        # each process prints its own, in one write, so that lines do not mix
        text = json.dumps(found) if args.json else "  ".join(row(found))
        os.write(1, text.encode()[: None if args.json else PIPE] + b"\n")
        if not world.rank:
            raise HpclmError(f"the processes cannot find each other: {error}") from None
        return error.exit_code


def together(world: bootstrap.World, found: dict[str, Any], args: argparse.Namespace) -> int:
    """Gather in the store what all processes found; rank 0 shows it.

    Without collectives: if they do not work, doctor must still show why.
    """
    met = connect(world, ClusterConfig(start_seconds=RENDEZVOUS))
    store = met.store
    found["network"]["chosen"] = found["network"]["chosen"] if found["network"]["told"] else met.interface
    store.set(f"hpclm/doctor/{world.rank}", found)
    if world.rank:
        code = store.wait("hpclm/doctor", 2 * ANSWER)
        if code is None:
            raise HpclmError("rank 0 is gone")
        store.set(f"hpclm/doctor/read/{world.rank}", True)
        return int(code)
    everyone = [found]
    for info in met.ranks[1:]:
        answer = store.wait(f"hpclm/doctor/{info.rank}", ANSWER)
        if answer is None:
            raise HpclmError(f"{info} does not report what it has")
        everyone.append(answer)
    code = conclude(everyone, args.json, args.ranks)
    sys.stdout.flush()
    store.set("hpclm/doctor", code)
    keys = [f"hpclm/doctor/read/{info.rank}" for info in met.ranks[1:]]
    wait_until(lambda: store.get_all(keys), LINGER)  # the store ends with this process
    return code


def conclude(everyone: list[dict[str, Any]], as_json: bool, ranks_only: bool) -> int:
    """Print what was found; 1 if something would stop a run."""
    problems, hints = diagnosis.of(everyone)
    if as_json:
        listed = everyone if len(everyone) > 1 else everyone[0]
        print(json.dumps({"ok": not problems, "problems": problems, "hints": hints, "found": listed}, indent=1))
        return bool(problems)
    if not ranks_only:
        for title, lines in sections(everyone[0]):
            say(title)
            for name, text in lines:
                say(f"  {name:<14}{text}")
    if len(everyone) > 1 or ranks_only:
        say("\n".join(terminal.columns([HEAD, *map(row, everyone)])))
    for problem in problems:
        say(f"problem: {problem}")
    for hint in hints:
        say(f"hint: {hint}")
    if not problems and not hints:
        print("no problems found")
    return bool(problems)


HEAD = ("rank", "host", "local", "launcher", "device", "cores", "threads", "python", "torch", "interface", "pid")


def row(found: dict[str, Any]) -> list[str]:
    """One process in the columns of the table."""
    world, torch, machine = found["launcher"], found["torch"], found["machine"]
    gpus = torch.get("gpus") or []
    visible = found["variables"]["libraries"].get("CUDA_VISIBLE_DEVICES")
    device = f"{len(gpus)} x {gpus[0]['name']}" if gpus else "CPU"
    return [
        f"{world.get('rank', '?')}/{world.get('size', '?')}",
        found["host"]["name"],
        f"{world.get('local_rank', '?')}/{world.get('local_size', '?')}",
        world.get("launcher", "?"),
        device + (f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""),
        machine["allowed"].split(" ")[1] + (" bound" if machine["bound"] else ""),
        str(machine["threads"]),
        found["software"]["python"],
        torch.get("version") or "none",
        found["network"]["chosen"] or "-",
        str(found["host"]["pid"]),
    ]


Lines = list[tuple[str, str]]


def sections(found: dict[str, Any]) -> Iterator[tuple[str, Lines]]:
    """What one process found, for people: titles, with names and values."""
    host, software, machine, network = (found[part] for part in ("host", "software", "machine", "network"))
    world, slurm, mpi, variables = (found[part] for part in ("launcher", "slurm", "mpi", "variables"))
    launcher = [("launcher", world.get("error") or world["launcher"])]
    if "error" not in world:
        local = f"{world['local_rank']} of {world['local_size']} on this host"
        launcher.append(("rank", f"{world['rank']} of {world['size']}; {local}"))
    place = ("host", f"{host['name']}, {host['system']}, pid {host['pid']}")
    yield "process", [place, *launcher, *variables["launcher"].items()]

    missing = ", ".join(name for name, version in software.items() if version is None)
    installed = [(name, version) for name, version in software.items() if version]
    yield "software", [*installed, ("not installed", missing or "-")]
    apex = [("apex", diagnosis.apex(found))] if software["apex"] else []
    yield "pytorch", [*pytorch(found), *apex]

    free = {name: gib((machine[name] or {}).get("free")) for name in ("shm", "folder", "home")}
    locked = machine["locked_memory"]
    values = {
        "cores": f"{machine['allowed']} ({machine['physical']} physical) of {machine['cores']}",
        "bound": "by the launcher" if machine["bound"] else "no",
        "threads": f"{machine['threads']} per process",
        "NUMA nodes": "; ".join(machine["numa"]) or "-",
        "memory free": gib(machine["memory_free"]),
        "/dev/shm free": free["shm"],
        "open files": str(machine["open_files"] or "unlimited"),
        "locked memory": "unlimited" if locked is None else gib(locked),
        "disk free": f"{free['folder']} here, {free['home']} at home",
    }
    yield "machine", list(values.items())
    infiniband = ("InfiniBand", ", ".join(machine["infiniband"]) or "none")
    chosen = ("to rank 0", str(network["chosen"] or "unknown: no launcher names its host"))
    yield "network", [*network["interfaces"].items(), infiniband, chosen]
    answers = {
        "sbatch": slurm["sbatch"],
        "controller": slurm["controller"],
        **{n: mpi[n] for n in ("mpirun", "mpi4py")},
    }
    yield "launchers", [(name, answered(found) if found else "not installed") for name, found in answers.items()]
    yield "settings", [("site file", found["site"] or "none"), *variables["libraries"].items()]


def answered(result: dict[str, Any]) -> str:
    """What a library or a program answered."""
    if "error" in result:
        return str(result["error"])
    if "says" in result:
        return f"{result['says']} ({result['path']})"
    return ", ".join(str(value) for value in result.values())


def pytorch(found: dict[str, Any]) -> Lines:
    """What PyTorch reports of itself and of the GPUs."""
    torch, driver = found["torch"], found["machine"]["driver"] or "none"
    if "error" in torch:
        return [("torch", f"cannot be loaded: {torch['error']}")]
    backends = ", ".join(torch["backends"]) or "no"
    cuda = f"{torch['cuda'] or 'not built in'}, driver {driver}, NCCL {torch['nccl'] or 'none'}"
    gpus = [
        (f"cuda:{i}", f"{gpu['name']}, {gib(gpu['memory'])}, {gpu['capability']}, {gpu['uuid']}")
        for i, gpu in enumerate(torch["gpus"])
    ]
    return [("torch", f"{torch['version']}, {backends} backends, {torch['threads']} threads"), ("CUDA", cuda), *gpus]
