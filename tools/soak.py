#!/usr/bin/env python
"""Train under random faults until the run is done, and compare it with an undisturbed one; prints the goodput.

    python tools/soak.py                          # about five minutes: 4 processes, a fault every 20 s
    python tools/soak.py --steps 2000 --mtbf 30 engine.name=fsdp2

Faults, once each start has done a step: a signal that warns or kills one process or all of them, a kill in the middle of a save, and a flipped bit in the
newest checkpoint followed by a kill. Words after the options are settings of the run. Exit code 0: every loss is equal, to
the last bit, and nothing had to be mended by hand.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

Fault = Callable[[Path, list[int], random.Random], bool]
ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run both, compare, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps (default: 600)")
    parser.add_argument("--mtbf", type=float, default=20, help="mean seconds between faults (default: 20)")
    parser.add_argument("--processes", type=int, default=4, help="processes of the run (default: 4)")
    parser.add_argument("--every", type=int, default=20, help="steps between saves (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: 0)")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the run")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory(prefix="hpclm-soak-") as folder:
        words = [f"budget.steps={args.steps}", f"checkpoint.every={args.every}", *args.settings]
        began = time.monotonic()
        calm = launch(Path(folder) / "calm", args.processes, words)
        if calm.wait():
            print(f"the undisturbed run ended with exit code {calm.returncode}", file=sys.stderr)
            return 1
        alone = time.monotonic() - began
        out = Path(folder) / "soak"
        counts, codes, wall = disturb(out, args, words)
        return tell(Path(folder) / "calm", out, counts, codes, alone, wall, args.steps)


def launch(out: Path, processes: int, words: list[str]) -> "subprocess.Popen[bytes]":
    """Start the run on this machine; its log is in its directory."""
    quiet = ["log.tensorboard=false", "evaluate.every=0", "model.dropout=0.1", "engine.device=cpu"]
    command = [sys.executable, "-m", "hpclm", "submit", "configs/debug.yaml", "--cluster", "local"]
    command += ["--gpus", str(processes), f"out={out}", *quiet, *words]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def disturb(out: Path, args: argparse.Namespace, words: list[str]) -> tuple[Counter[str], Counter[int], float]:
    """Start the run again until it is done, with faults on the way: how often which, exit codes, seconds in all."""
    draw, counts, codes = random.Random(args.seed), Counter[str](), Counter[int]()
    began, due = time.monotonic(), draw.expovariate(1 / args.mtbf)
    process, before = launch(out, args.processes, words), 0
    while True:
        if process.poll() is not None:
            codes[process.returncode] += 1
            if process.returncode == 0 or sum(codes.values()) > 1000:
                return counts, codes, time.monotonic() - began
            before = step(out)
            process = launch(out, args.processes, words)
        elif time.monotonic() - began > due and step(out) > before:
            name = draw.choice(list(FAULTS))
            if FAULTS[name](out, ranks(out), draw):
                counts[name] += 1
                print(f"{time.monotonic() - began:6.0f} s  step {step(out):>5}  {name}", flush=True)
                due = time.monotonic() - began + draw.expovariate(1 / args.mtbf)
        time.sleep(0.05)


def ranks(out: Path) -> list[int]:
    """Processes of the run that train."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "hpclm.train" in words and any(str(out) in word for word in words):
            pids.append(int(folder.name))
    return sorted(pids)


def step(out: Path) -> int:
    """The last step that is written down."""
    rows = (out / "metrics.jsonl").read_text().splitlines() if (out / "metrics.jsonl").exists() else []
    return max((json.loads(row)["step"] for row in rows if row.endswith("}")), default=0)


def send(number: int, everyone: bool = False) -> Fault:
    """A signal to one process, or to all."""

    def act(out: Path, pids: list[int], draw: random.Random) -> bool:
        for pid in pids if everyone else draw.sample(pids, min(1, len(pids))):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return False
        return bool(pids)

    return act


def in_a_save(out: Path, pids: list[int], draw: random.Random) -> bool:
    """Kill a process while a checkpoint is being written."""
    until = time.monotonic() + 5
    while not list((out / "checkpoints").glob(".tmp-*")):
        if time.monotonic() > until:
            return False
    return send(signal.SIGKILL)(out, pids, draw)


def damage(out: Path, pids: list[int], draw: random.Random) -> bool:
    """Flip a bit of the newest checkpoint, where there are others, and kill everything."""
    saved = sorted((out / "checkpoints").glob("step-*"))
    if len(saved) < 2 or not pids:
        return False
    try:
        victim = draw.choice(sorted(saved[-1].glob("rank-*")))
        with victim.open("r+b") as file:
            file.seek(draw.randrange(victim.stat().st_size))
            byte = file.read(1)[0] ^ 1 << draw.randrange(8)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte]))
    except (OSError, IndexError):  # pruned meanwhile
        return False
    return send(signal.SIGKILL, everyone=True)(out, pids, draw)


FAULTS = {
    "KILL of one": send(signal.SIGKILL),
    "TERM to one": send(signal.SIGTERM),
    "USR1 to all": send(signal.SIGUSR1, everyone=True),
    "KILL of all": send(signal.SIGKILL, everyone=True),
    "KILL in a save": in_a_save,
    "a flipped bit": damage,
}


def losses(out: Path) -> dict[int, str]:
    """Loss by step, in hex."""
    rows = [json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: float(row["loss"]).hex() for row in rows if "loss" in row}


def tell(
    calm: Path, out: Path, counts: Counter[str], codes: Counter[int], alone: float, wall: float, steps: int
) -> int:
    """Print what happened; 0 when all is well."""
    done = losses(out)
    wrong = [number for number, loss in losses(calm).items() if done.get(number) != loss]
    starts = (out / "events.jsonl").read_text().count('"kind": "began"')
    aside = len(list((out / "checkpoints").glob(".bad-*")))
    print(f"\nfaults: {sum(counts.values())} ({', '.join(f'{n} x {name}' for name, n in counts.items())})")
    print(
        f"exit codes: {', '.join(f'{n} x {code}' for code, n in sorted(codes.items()))}; starts that trained: {starts}"
    )
    print(
        f"steps {steps}; losses that differ from the undisturbed run: {len(wrong)}; bad checkpoints set aside: {aside}"
    )
    print(f"goodput {alone / wall:.0%}: undisturbed {alone:.0f} s, under faults {wall:.0f} s")
    return 1 if wrong or len(done) != steps else 0


if __name__ == "__main__":
    raise SystemExit(main())
