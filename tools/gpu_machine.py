"""The stages of gpu_proof.sh that look at the machine itself: packages, what it is, and its limits.

python tools/gpu_machine.py install --wheels gpu-wheels --out gpu-proof   # into OUT/site; nothing else is changed
python tools/gpu_machine.py facts --out gpu-proof                         # OUT/facts.json, OUT/versions.txt
python tools/gpu_machine.py limits
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import shutil
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


def main() -> int:
    """Do what the first argument says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("act", choices=("install", "facts", "limits"))
    parser.add_argument("--out", type=Path, default=Path("gpu-proof"))
    parser.add_argument("--wheels", type=Path, default=Path("gpu-wheels"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small models, to rehearse")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.act == "install":
        return install(args.wheels, args.out / "site")
    if args.act == "facts":
        facts(args.out)
    else:
        limits(args.device, args.small)
    return 0


if __name__ == "__main__":
    sys.exit(main())
