"""The stages of gpu_proof.sh: run those that are not done, within the time there is, and write what they found."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parent
PYTHON = sys.executable


@dataclass(frozen=True)
class Stage:
    """One command, what is worth knowing of its output, and the seconds without which it is not begun."""

    name: str
    words: list[str]
    least: int = 20
    most: int = 180
    environment: dict[str, str] = field(default_factory=dict)
    shown: Callable[[str], str] = lambda text: _table(text) or _last(text)


def stages(device: str, out: Path) -> list[Stage]:
    """All stages, the most telling first; for a CPU small ones."""
    gpu = device == "cuda"
    on = {"HPCLM_TEST_DEVICE": device}
    tests = [PYTHON, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", "tests/gpu"]

    def train(name: str, *words: str, least: int = 40) -> Stage:
        command = [PYTHON, str(TOOLS / "bench_train.py"), "--device", device, "--json", str(out / f"{name}.json")]
        return Stage(f"training speed, {name}", [*command, *words], least)

    if not gpu:
        small = ["--context", "64", "--batch", "2", "--rounds", "2", "--no-memory", "--only", "hpclm", "limit"]
        return [
            Stage("limits", [PYTHON, __file__, "--limits", device], 2, shown=_last),
            Stage("tests of the step", [*tests, "-k", "chance or native-accumulating"], 5, 300, on, _last),
            train("small", *small, least=5),
            Stage("profile", [PYTHON, __file__, "--profile", device, "--out", str(out)], 5),
        ]
    main = ["hpclm", "plain PyTorch, compiled", "transformers, compiled", "Megatron-core", "limit"]
    big = ["hpclm, compiled", "plain PyTorch, compiled", "Megatron-core", "limit"]
    llama = ["hpclm, compiled", "transformers, compiled", "Megatron-core", "limit"]
    return [
        Stage("limits", [PYTHON, __file__, "--limits", device], 15, shown=_last),
        Stage("tests of the step", [*tests, "-k", "native or waits or memory or compiled"], 60, 240, on, _last),
        train("124m", "--shape", "124m", "--context", "1024", "--batch", "16", "--only", *main),
        train("1.3b", "--shape", "1.3b", "--context", "2048", "--batch", "8", "--no-memory", "--only", *big, least=60),
        train("llama-1b", "--shape", "llama-1b", "--context", "2048", "--batch", "8", "--no-memory", "--only", *llama),
        Stage("all tests", tests, 120, 540, on, _last),
        Stage("checkpoints", [PYTHON, str(TOOLS / "bench_checkpoint.py")], 60, 240),
        Stage("profile", [PYTHON, __file__, "--profile", device, "--out", str(out)], 20),
    ]


def run(stage: Stage, out: Path, seconds: float) -> dict[str, Any]:
    """Run one stage, at most ``seconds``; its output goes to a file beside the report."""
    log = out / f"{re.sub(r'[^a-z0-9.]+', '-', stage.name.lower())}.log"
    began = time.monotonic()
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            stage.words,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | stage.environment,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:  # out of time, or this program was asked to stop
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    return {"code": code, "seconds": round(time.monotonic() - began, 1), "shown": stage.shown(text), "log": log.name}


def facts(device: str) -> dict[str, str]:
    """What this machine is."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    if device == "cuda":
        given = torch.cuda.get_device_properties(0)
        found |= {"GPU": given.name, "memory": f"{given.total_memory / 2**30:.0f} GiB", "CUDA": str(torch.version.cuda)}
        found |= {"cuDNN": str(torch.backends.cudnn.version()), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
        asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            said = subprocess.run(asked, capture_output=True, text=True, timeout=20)
            found["driver, clock, power"] = said.stdout.strip()
    return found


def limits(device: str) -> None:
    """Measure matrix products and memory traffic back to back, and print one line."""
    import torch

    gpu = device == "cuda"
    dtype, size, count = (torch.bfloat16, 8192, 50) if gpu else (torch.float32, 512, 5)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    big = torch.empty((1 << 31 if gpu else 1 << 24) // 4, device=device)
    wait = torch.cuda.synchronize if gpu else lambda: None

    def seconds(work: Callable[[], object]) -> float:
        for _ in range(3):
            work()
        wait()
        began = time.perf_counter()
        for _ in range(count):
            work()
        wait()
        return (time.perf_counter() - began) / count

    product, copy = seconds(lambda: a @ b), seconds(lambda: big.add_(1))
    print(
        f"{2 * size**3 / product / 1e12:,.2f} TFLOP/s in {str(dtype).removeprefix('torch.')} products of {size} x {size}; "
        f"{2 * big.nbytes / copy / 1e12:,.3f} TB/s of memory traffic"
    )


def profile(device: str, out: Path) -> None:
    """Trace a few steps of a small GPT with torch.profiler: OUT/trace.json opens in Perfetto; print the dearest operations."""
    import torch
    from bench_train import SHAPES, ours

    from hpclm.config import ModelConfig

    gpu = device == "cuda"
    shape, context, batch = ("124m", 1024, 16) if gpu else ("small", 64, 2)
    model = ModelConfig(**SHAPES[shape], context=context)
    rows = torch.randint(0, model.vocab_size, (batch, context + 1)).to(device)
    step = ours(model, rows, torch.bfloat16 if gpu else torch.float32, compiled=gpu)
    for _ in range(4):
        step()
    with torch.profiler.profile() as trace:
        for _ in range(3):
            step()
    trace.export_chrome_trace(str(out / "trace.json"))
    rows_ = sorted(trace.key_averages(), key=lambda e: -(e.self_device_time_total if gpu else e.self_cpu_time_total))[
        :10
    ]
    print("| operation | times | ms |\n|---|---|---|")
    for each in rows_:
        spent = each.self_device_time_total if gpu else each.self_cpu_time_total
        print(f"| `{each.key[:80]}` | {each.count} | {spent / 1000:.2f} |")
    waits = sum(e.count for e in trace.key_averages() if "Synchronize" in e.key)
    print(f"| host waits | {waits} | |")


def report(known: dict[str, Any], names: list[str]) -> str:
    """All that is known, as Markdown."""
    text = ["# Proof on " + known["facts"].get("GPU", "a CPU: a rehearsal"), ""]
    text += [", ".join(f"{name} {value}" for name, value in known["facts"].items()), ""]
    text += ["| stage | result | seconds |", "|---|---|---|"]
    for name in names:
        found = known["stages"].get(name)
        ended = (
            "not begun"
            if found is None
            else {0: "done", None: "out of time"}.get(found["code"], f"exit {found['code']}")
        )
        text.append(f"| {name} | {ended} | {found['seconds'] if found else ''} |")
    for name in names:
        if found := known["stages"].get(name):
            text += ["", f"## {name}", "", found["shown"]]
    return "\n".join(text) + "\n"


def _table(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return "\n".join(lines)


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "\n".join([*failed[:20], *lines[-1:]])


def main() -> int:
    """Read the arguments, and run the stages that are not done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=9, help="time there is (default 9)")
    parser.add_argument("--out", type=Path, default=Path("gpu-proof"), help="where the results go (default gpu-proof)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--again", action="store_true", help="begin afresh, whatever is done")
    parser.add_argument("--limits", metavar="DEVICE", help=argparse.SUPPRESS)
    parser.add_argument("--profile", metavar="DEVICE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.limits:
        limits(args.limits)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    if args.profile:
        profile(args.profile, args.out)
        return 0
    import torch

    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "none"
    if device == "none" or (device == "cuda" and not torch.cuda.is_available()):
        print(f"PyTorch {torch.__version__} finds no GPU here; --device cpu rehearses without one", file=sys.stderr)
        return 64
    until = time.monotonic() + 60 * args.minutes
    saved = args.out / "results.json"
    known: dict[str, Any] = json.loads(saved.read_text()) if saved.exists() and not args.again else {}
    if known.get("device") != device:
        known = {"device": device, "facts": facts(device), "stages": {}}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    todo = stages(device, args.out)
    names = [stage.name for stage in todo]
    for stage in todo:
        left = until - time.monotonic()
        before = known["stages"].get(stage.name)
        if (before and before["code"] is not None) or left < stage.least:
            continue
        print(f"== {stage.name} ({left / 60:.1f} minutes left)", flush=True)
        known["stages"][stage.name] = run(stage, args.out, min(left, stage.most))
        for path, text in ((saved, json.dumps(known, indent=1)), (args.out / "report.md", report(known, names))):
            half = path.with_suffix(".new")
            half.write_text(text)
            half.replace(path)
        print(known["stages"][stage.name]["shown"], flush=True)
    print(f"\n{report(known, names)}\n{args.out / 'report.md'}")
    return 0 if all(known["stages"].get(name, {}).get("code") == 0 for name in names) else 1


if __name__ == "__main__":
    sys.exit(main())
