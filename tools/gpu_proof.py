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


def stages(device: str, out: Path, small: bool) -> list[Stage]:
    """All stages, the most telling first; ``small``: with models that are computed anywhere."""
    on = {"HPCLM_TEST_DEVICE": device} | ({"HPCLM_TEST_SHAPE": "cpu"} if small else {})
    tests = ["-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", "-vv", "tests/gpu"]
    own = [__file__, "--out", str(out), *(["--small"] if small else [])]
    tools = {name: str(TOOLS / f"{name}.py") for name in ("bench_train", "bench_checkpoint", "kernel_table")}

    def stage(name: str, *words: str, least: int = 20, most: int = 180, **more: Any) -> Stage:
        return Stage(name, [PYTHON, *words], min(least, 5) if small else least, most, **more)

    def train(shape: str, context: int, batch: int, *words: str, least: int = 40) -> Stage:
        name = f"training speed, {shape}"
        sizes = ["--shape", shape, "--context", str(context), "--batch", str(batch)]
        where = ["--device", device, "--json", str(out / f"{slug(name)}.json")]
        return stage(name, tools["bench_train"], *where, *sizes, *words, least=least)

    limits = stage("limits", *own, "--limits", device, least=2 if small else 15)
    profile = stage("profile", *own, "--profile", device)
    others = ["plain PyTorch, compiled", "transformers, compiled", "Megatron-core", "limit"]
    quick = ["--rounds", "2", "--no-memory", "--only", "hpclm"]
    if device == "cpu":
        few = stage("tests of the step", *tests, "-k", "chance or native-accumulating", most=300, environment=on)
        return [limits, few, train("small", 64, 2, *quick, "limit"), profile]
    speed = [
        train("124m", 1024, 16, "--only", "hpclm", *others),
        train("1.3b", 2048, 8, "--no-memory", "--only", "hpclm, compiled", *others[::2], "limit", least=60),
        train("llama-1b", 2048, 8, "--no-memory", "--only", "hpclm, compiled", *others[1:]),
    ]
    step = ["-k", "native or waits or memory or compiled"]
    return [
        limits,
        stage("tests of the step", *tests, *step, least=60, most=240, environment=on),
        *([train("small", 64, 2, *quick, *others)] if small else speed),
        stage("all tests", *tests, least=120, most=540, environment=on),
        stage("checkpoints", tools["bench_checkpoint"], *(["--megabytes=20"] if small else []), least=60, most=240),
        profile,
        stage(
            "kernels",
            tools["kernel_table"],
            "124m, native, uncompiled" if small else "124m, native",
            least=60,
            most=240,
        ),
    ]


def slug(name: str) -> str:
    """A stage's name as that of a file."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower())


def run(stage: Stage, out: Path, seconds: float) -> dict[str, Any]:
    """Run one stage, at most ``seconds``; its output goes to a file beside the report, and what it wrote as JSON into the results."""
    log = out / f"{slug(stage.name)}.log"
    log.with_suffix(".json").unlink(missing_ok=True)
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
    seconds, text = round(time.monotonic() - began, 1), log.read_text(encoding="utf-8", errors="replace")
    found = {"code": code, "seconds": seconds, "shown": shown(text, code != 0), "log": log.name}
    if log.with_suffix(".json").exists():
        found["figures"] = json.loads(log.with_suffix(".json").read_text())
    return found


def facts(device: str) -> dict[str, str]:
    """What this machine is."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    if device == "cuda":
        given = torch.cuda.get_device_properties(0)
        found |= {"GPU": given.name, "memory": f"{given.total_memory / 2**30:.0f} GiB", "CUDA": str(torch.version.cuda)}
        found |= {"cuDNN": str(torch.backends.cudnn.version())}
        if torch.distributed.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            said = subprocess.run(asked, capture_output=True, text=True, timeout=20)
            found["driver, clock, power"] = said.stdout.strip()
    return found


def limits(device: str, small: bool) -> None:
    """Measure matrix products and memory traffic back to back, and print one line."""
    import torch

    gpu = device == "cuda"
    dtype, size, count = (torch.bfloat16, 8192, 50) if not small else (torch.bfloat16 if gpu else torch.float32, 512, 5)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    big = torch.empty((1 << 24 if small else 1 << 31) // 4, device=device)
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


def profile(device: str, out: Path, small: bool) -> None:
    """Trace a few steps of a small GPT with torch.profiler: OUT/trace.json opens in Perfetto; print the dearest operations."""
    import torch
    from bench_train import SHAPES, ours

    from hpclm.config import ModelConfig

    gpu = device == "cuda"
    shape, context, batch = ("small", 64, 2) if small else ("124m", 1024, 16)
    model = ModelConfig(**SHAPES[shape], context=context)
    rows = torch.randint(0, model.vocab_size, (batch, context + 1)).to(device)
    step = ours(model, rows, torch.bfloat16 if gpu else torch.float32, compiled=gpu)
    for _ in range(4):
        step()
    with torch.profiler.profile() as trace:
        for _ in range(3):
            step()
    trace.export_chrome_trace(str(out / "trace.json"))
    spent = {e.key: e.self_device_time_total if gpu else e.self_cpu_time_total for e in trace.key_averages()}
    if not any(spent.values()):
        sys.exit("the profiler has recorded no kernels")
    print("| operation | times | ms |\n|---|---|---|")
    for each in sorted(trace.key_averages(), key=lambda e: -spent[e.key])[:10]:
        print(f"| `{each.key[:80]}` | {each.count} | {spent[each.key] / 1000:.2f} |")
    waits = sum(e.count for e in trace.key_averages() if "Synchronize" in e.key)
    print(f"| host waits | {waits} | |")


def work(todo: list[Stage], known: dict[str, Any], out: Path, minutes: float) -> None:
    """Run all stages that are not done, those that failed before last, and write after each what is known."""
    until = time.monotonic() + 60 * minutes
    for stage in sorted(todo, key=lambda stage: stage.name in known["stages"]):
        left = until - time.monotonic()
        if known["stages"].get(stage.name, {}).get("code") == 0 or left < stage.least:
            continue
        print(f"== {stage.name} ({left / 60:.1f} minutes left)", flush=True)
        known["stages"][stage.name] = run(stage, out, min(left, stage.most * max(1, minutes / 9)))
        for name, text in (("results.json", json.dumps(known, indent=1)), ("report.md", report(known, todo))):
            half = out / f"{name}.new"
            half.write_text(text)
            half.replace(out / name)
        print(known["stages"][stage.name]["shown"], flush=True)


def report(known: dict[str, Any], todo: list[Stage]) -> str:
    """All that is known, and what of ``todo`` is not, as Markdown."""
    names = [*known["stages"], *(stage.name for stage in todo if stage.name not in known["stages"])]
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


def shown(text: str, failed: bool) -> str:
    """What a report says of a stage's output: its table, what was left out, tests that failed; the last line unless the table is all."""
    lines = [line for line in text.splitlines() if line.strip()]
    table = [line for line in lines if line.startswith("|")]
    notes = [line for line in lines if " is left out: " in line or line.startswith(("FAILED ", "ERROR "))]
    if not notes:  # tests that were stopped give no summary
        notes = [line for line in lines if re.search(r"::.* (FAILED|ERROR)\b", line)]
    last = lines[-1:] if failed or not table else []
    return "\n\n".join("\n".join(part) for part in (table, [f"- {note}" for note in notes[:40]], last) if part)


def main() -> int:
    """Read the arguments, and run the stages that are not done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=9, help="time there is (default 9); with more, a stage may take longer"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-proof"), help="where the results go (default gpu-proof)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--small", action="store_true", help="small models, to rehearse; always so on a CPU")
    parser.add_argument("--only", nargs="*", metavar="WORD", help="only stages whose name contains one of these words")
    parser.add_argument("--again", action="store_true", help="begin afresh, whatever is done")
    parser.add_argument("--limits", metavar="DEVICE", help=argparse.SUPPRESS)
    parser.add_argument("--profile", metavar="DEVICE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.limits:
        limits(args.limits, args.small)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    if args.profile:
        profile(args.profile, args.out, args.small)
        return 0
    import torch

    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "none"
    if device == "none" or (device == "cuda" and not torch.cuda.is_available()):
        print(f"PyTorch {torch.__version__} finds no GPU here; --device cpu rehearses without one", file=sys.stderr)
        return 64
    saved = args.out / "results.json"
    known: dict[str, Any] = json.loads(saved.read_text()) if saved.exists() and not args.again else {}
    if known.get("device") != device:
        known = {"device": device, "facts": facts(device), "stages": {}}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    todo = stages(device, args.out, args.small or device == "cpu")
    todo = [stage for stage in todo if not args.only or any(word in stage.name for word in args.only)]
    work(todo, known, args.out, args.minutes)
    print(f"\n{report(known, todo)}\n{args.out / 'report.md'}")
    return 0 if all(known["stages"].get(stage.name, {}).get("code") == 0 for stage in todo) else 1


if __name__ == "__main__":
    sys.exit(main())
