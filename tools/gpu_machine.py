"""The stages of gpu_proof.sh that look at the machine itself: packages, what it is, its limits, and where a step's time goes.

python tools/gpu_machine.py install --wheels gpu-wheels --out gpu-proof   # into OUT/site; nothing else is changed
python tools/gpu_machine.py facts --out gpu-proof                         # OUT/facts.json, OUT/versions.txt
python tools/gpu_machine.py limits
python tools/gpu_machine.py step --out gpu-proof                          # uncompiled; with --compile also OUT/trace.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

NEEDED = (
    "torch",
    "numpy",
    "omegaconf",
    "yaml",
    "orjson",
    "psutil",
    "tokenizers",
    "xxhash",
    "tqdm",
    "wcwidth",
    "pytest",
)
"""Modules without which no stage runs."""


def install(wheels: Path, site: Path) -> int:
    """Install the wheels into ``site``; those that do not suit this Python are named and left out. 0 if all of them did."""
    shutil.rmtree(site, ignore_errors=True)
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        print(f"no wheels in {wheels}: tools/gpu_wheels.sh collects them")
        return 1
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--no-compile", "--no-cache-dir", "--target", str(site)]
    if subprocess.run([*pip, *files], capture_output=True).returncode == 0:
        print(f"{len(files)} wheels installed")
        return 0
    shutil.rmtree(site, ignore_errors=True)
    bad = 0
    for file in files:
        done = subprocess.run([*pip, file], capture_output=True, text=True)
        if done.returncode:
            bad += 1
            print(f"{Path(file).name} is left out: {' '.join(done.stderr.split()[:40])}")
    print(f"{len(files) - bad} of {len(files)} wheels installed")
    return 1 if bad else 0


def facts(out: Path) -> None:
    """Write what this machine is, and the versions of what is installed on it."""
    missing = [name for name in NEEDED if util.find_spec(name) is None]
    machine_facts: dict[str, object] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "missing": missing,
    }
    header = Path(sysconfig.get_path("include"), "Python.h")
    machine_facts["compiler"] = next(filter(None, map(shutil.which, ("g++", "clang++", "gcc"))), None)
    machine_facts["Python.h"] = header.exists()
    if "torch" not in missing:
        import torch

        machine_facts |= {"torch": torch.__version__, "cuda": torch.cuda.is_available()}
        if torch.cuda.is_available():
            gpu = torch.cuda.get_device_properties(0)
            machine_facts |= {"GPU": gpu.name, "memory": f"{gpu.total_memory / 2**30:.0f} GiB"}
            machine_facts |= {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
            if torch.distributed.is_nccl_available():
                machine_facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
            query = "--query-gpu=driver_version,clocks.max.sm,power.limit"
            machine_facts["driver, clock, power"] = said("nvidia-smi", query, "--format=csv,noheader").strip()
    versions = sorted(f"{package.name}=={package.version}" for package in metadata.distributions() if package.name)
    (out / "versions.txt").write_text("\n".join([*dict.fromkeys(versions), "", said("nvidia-smi")]))
    (out / "facts.json").write_text(json.dumps(machine_facts, indent=1))
    print(", ".join(f"{name} {value}" for name, value in machine_facts.items() if value not in (None, [])))


def said(*command: str) -> str:
    """What a command prints; empty if it cannot be run."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    return ""


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


def step(device: str, out: Path, small: bool, compiled: bool) -> None:
    """Time and trace steps of GPT-2 124M; print its speed and its dearest operations. Compiled: OUT/trace.json opens in Perfetto."""
    import torch
    from bench_train import SHAPES, ours

    from hpclm.config import ModelConfig

    gpu = device == "cuda"
    shape, context, batch = ("small", 64, 2) if small else ("124m", 1024, 16)
    model = ModelConfig(**SHAPES[shape], context=context)
    rows = torch.randint(0, model.vocab_size, (batch, context + 1)).to(device)
    wait = torch.cuda.synchronize if gpu else lambda: None
    do_step = ours(model, rows, torch.bfloat16 if gpu else torch.float32, compiled=compiled)
    times = []
    for _ in range(10):
        began = time.perf_counter()
        do_step()
        wait()
        times.append(time.perf_counter() - began)
    rate = batch * context / statistics.median(times[4:])
    print(f"first step {times[0]:.1f} s; {shape}, {batch} x {context} tokens: {rate:,.0f} tokens/s", flush=True)
    with torch.profiler.profile() as trace:
        for _ in range(3):
            do_step()
        wait()
    if compiled:
        trace.export_chrome_trace(str(out / "trace.json"))
    spent = {e.key: e.self_device_time_total if gpu else e.self_cpu_time_total for e in trace.key_averages()}
    if not any(spent.values()):
        sys.exit("the profiler has recorded no kernels")
    print("| operation | times | ms |\n|---|---|---|")
    for event in sorted(trace.key_averages(), key=lambda e: -spent[e.key])[:10]:
        print(f"| `{event.key[:80]}` | {event.count} | {spent[event.key] / 1000:.2f} |")
    waits = sum(e.count for e in trace.key_averages() if "Synchronize" in e.key)
    print(f"| host waits | {waits} | |")
    print(f"| tokens/s | {rate:,.0f} | |")


def main() -> int:
    """Do what the first argument says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("act", choices=("install", "facts", "limits", "step"))
    parser.add_argument("--out", type=Path, default=Path("gpu-proof"))
    parser.add_argument("--wheels", type=Path, default=Path("gpu-wheels"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small models, to rehearse")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.act == "install":
        return install(args.wheels, args.out / "site")
    if args.act == "facts":
        facts(args.out)
    elif args.act == "limits":
        limits(args.device, args.small)
    else:
        step(args.device, args.out, args.small, args.compile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
