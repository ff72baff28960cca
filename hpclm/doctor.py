"""The verb ``hpclm doctor``, or ``hpclm env``: what each process really has, what is wrong with it, and what to do."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from hpclm import cli
from hpclm.cluster import bootstrap
from hpclm.cluster.health import diagnosis, inventory
from hpclm.cluster.health.report import aligned
from hpclm.cluster.rendezvous import meet
from hpclm.cluster.rollcall import Guest
from hpclm.config import ClusterConfig
from hpclm.errors import ConfigError, HpclmError

MEETING = 20  # seconds within which the processes must have found each other
ANSWER = 30.0  # seconds that a process may take to say what it has
PIPE = 4000  # bytes that reach a pipe in one piece


def main(argv: list[str]) -> int:
    """``hpclm doctor``."""
    parser = argparse.ArgumentParser(
        prog="hpclm doctor",
        description="Show what this process really has: versions, devices, network, limits, launcher; and what is wrong. "
        "Under srun, mpirun or torchrun the processes meet, and a table has a line for each.",
        epilog="exit codes: 0 nothing would stop a run · 1 something would, or the processes do not meet",
    )
    parser.add_argument("--json", action="store_true", help="everything, as JSON: an object for each process")
    parser.add_argument("--ranks", action="store_true", help="only the table of processes")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR)

    found = inventory.collect()
    try:
        world = bootstrap.detect(alone=False)
    except ConfigError:  # it is among what was found
        world = bootstrap.World("single", 0, 1)
    if world.size == 1:
        return conclude([found], args.json, args.ranks)
    try:
        return together(world, found, args)
    except HpclmError as error:
        # each for itself, in one piece, so that lines do not mix
        text = json.dumps(found) if args.json else "  ".join(row(found))
        os.write(1, text.encode()[: None if args.json else PIPE] + b"\n")
        if not world.rank:
            raise HpclmError(f"the processes do not meet: {error}") from None
        return error.exit_code


def together(world: bootstrap.World, found: dict[str, Any], args: argparse.Namespace) -> int:
    """Hold the roll call, and gather over its connections what all processes found; rank 0 shows it.

    No collective, and no PyTorch: what is wrong with them shall be seen.
    """
    met = meet(world, ClusterConfig(start_seconds=MEETING))
    found["network"]["chosen"] = found["network"]["chosen"] if found["network"]["told"] else met.interface
    if isinstance(met.end, Guest):
        met.end.wire.send(found=found)
        last = met.end.wire.receive(ANSWER)
        if last is None:
            raise HpclmError("rank 0 is gone")
        return int(last["code"])
    everyone = [found]
    for rank, wire in sorted(met.end.wires.items()):
        heard = wire.receive(ANSWER)
        if heard is None:
            raise HpclmError(f"{met.end.everyone[rank]} does not say what it has")
        everyone.append(heard["found"])
    code = conclude(everyone, args.json, args.ranks)
    sys.stdout.flush()
    for wire in met.end.wires.values():
        wire.send(code=code)
    return code


def conclude(everyone: list[dict[str, Any]], as_json: bool, ranks_only: bool) -> int:
    """Print what was found; 1 when something would stop a run."""
    problems, hints = diagnosis.of(everyone)
    if as_json:
        listed = everyone if len(everyone) > 1 else everyone[0]
        print(json.dumps({"ok": not problems, "problems": problems, "hints": hints, "found": listed}, indent=1))
        return bool(problems)
    if not ranks_only:
        for title, lines in sections(everyone[0]):
            print(title)
            for name, text in lines:
                print(f"  {name:<14}{text}")
    if len(everyone) > 1 or ranks_only:
        print(aligned([HEAD, *map(row, everyone)]))
    for problem in problems:
        print(f"problem: {problem}")
    for hint in hints:
        print(f"hint: {hint}")
    if not problems and not hints:
        print("nothing is missing")
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
    """What one process found, for a reader."""
    software, torch, machine, network = (found[part] for part in ("software", "torch", "machine", "network"))
    world, slurm, mpi = found["launcher"], found["slurm"], found["mpi"]
    variables = found["variables"]
    if "error" in world:
        who = [("launcher", world["error"])]
    else:
        who = [
            ("launcher", world["launcher"]),
            (
                "rank",
                f"{world['rank']} of {world['size']}; {world['local_rank']} of {world['local_size']} on this host",
            ),
        ]
    yield (
        "process",
        [
            ("host", f"{found['host']['name']}, {found['host']['system']}, pid {found['host']['pid']}"),
            *who,
            *variables["launcher"].items(),
        ],
    )
    installed = [(name, str(version)) for name, version in software.items() if version and name != "torch"]
    yield "software", [*installed, ("not installed", ", ".join(n for n, v in software.items() if v is None) or "-")]
    whose = [("apex", diagnosis.apex(found))] if software["apex"] else []
    yield "pytorch", [*answer(torch), *whose, ("kernels", diagnosis.kernels(found))]
    yield (
        "machine",
        [
            ("cores", f"{machine['allowed']} ({machine['physical']} physical) of {machine['cores']}"),
            ("bound", "by the launcher" if machine["bound"] else "no"),
            ("threads", f"{machine['threads']} for a process"),
            ("NUMA nodes", "; ".join(machine["numa"]) or "-"),
            ("memory free", diagnosis.gib(machine["memory_free"])),
            ("/dev/shm free", diagnosis.gib((machine["shm"] or {}).get("free"))),
            ("open files", str(machine["open_files"] or "unlimited")),
            ("locked memory", diagnosis.gib(machine["locked_memory"]) if machine["locked_memory"] else "unlimited"),
            (
                "disk free",
                f"{diagnosis.gib(machine['folder_free'])} here, {diagnosis.gib(machine['home_free'])} at home",
            ),
        ],
    )
    yield (
        "network",
        [
            *network["interfaces"].items(),
            ("InfiniBand", ", ".join(machine["infiniband"]) or "none"),
            ("to rank 0", str(network["chosen"] or "not known: no launcher names its host")),
        ],
    )
    yield (
        "launchers",
        [
            ("sbatch", said(slurm["sbatch"])),
            ("controller", said(slurm["controller"])),
            ("mpirun", said(mpi["mpirun"])),
            ("mpi4py", said(mpi["mpi4py"]) if mpi["mpi4py"] else "not installed"),
        ],
    )
    site = found["site"] or "none"
    yield "settings", [("site file", site), *variables["libraries"].items()]


def said(result: dict[str, Any]) -> str:
    """The answer of a probe in words."""
    if "error" in result:
        return str(result["error"])
    if "says" in result:
        return f"{result['says']} ({result['path']})"
    return ", ".join(str(value) for value in result.values())


def answer(torch: dict[str, Any]) -> Lines:
    """What PyTorch said of itself."""
    if "error" in torch:
        return [("torch", f"cannot be loaded: {torch['error']}")]
    lines = [
        ("torch", f"{torch['version']}, {', '.join(torch['backends']) or 'no'} backends, {torch['threads']} threads")
    ]
    lines += [
        (
            "CUDA",
            f"{torch['cuda'] or 'not built in'}, driver {torch['driver'] or 'none'}, NCCL {torch['nccl'] or 'none'}",
        )
    ]
    for i, gpu in enumerate(torch["gpus"]):
        lines.append(
            (f"cuda:{i}", f"{gpu['name']}, {diagnosis.gib(gpu['memory'])}, {gpu['capability']}, {gpu['uuid']}")
        )
    return lines


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
