"""Questions to libraries and programs, each in a process of its own: one that crashes or hangs is an answer too."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

Answer = dict[str, Any]
"""What was found, or {"error": why not}."""

SECONDS = 30.0

TORCH = """
import json, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
gpus = []
for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    p = torch.cuda.get_device_properties(i)
    gpus.append(dict(name=p.name, memory=p.total_memory, uuid=str(getattr(p, "uuid", "")),
                     capability=f"{p.major}.{p.minor}"))
print(json.dumps(dict(
    version=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip, threads=torch.get_num_threads(), gpus=gpus,
    architectures=torch.cuda.get_arch_list(),
    nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda and dist.is_nccl_available() else None,
    backends=[name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()],
)))
"""
MPI = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(json.dumps(dict(version=mpi4py.__version__, library=MPI.Get_library_version().split(",")[0].strip())))
"""
APEX = """
import json
from apex.optimizers import FusedAdam
found = {"FusedAdam": True, "norms": True, "rotary positions": True}
try:
    import fused_layer_norm_cuda
except ImportError:
    found["norms"] = False
try:
    import fused_rotary_positional_embedding
except ImportError:
    found["rotary positions"] = False
print(json.dumps(found))
"""
LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDRA_", "MPI_", "SLURM_STEP")


def python(code: str, env: Mapping[str, str], seconds: float = SECONDS) -> Answer:
    """What ``code`` prints as JSON, run by this interpreter without the launcher's variables."""
    calm = {name: value for name, value in env.items() if not name.startswith(LAUNCHERS)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds, env=calm, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {seconds:.0f} s"}
    except OSError as error:
        return {"error": str(error)}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        ended = f"ended by signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        return {"error": last or ended}
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        return {"error": "no answer"}


def program(*words: str, seconds: float = 5.0) -> Answer:
    """First line that a program prints, and where it is; {"error": ...} when it is not there or fails."""
    path = shutil.which(words[0])
    if not path:
        return {"error": f"{words[0]} is not in PATH"}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"{words[0]} gives no answer within {seconds:.0f} s", "path": path}
    except OSError as error:
        return {"error": str(error), "path": path}
    lines = (done.stdout + done.stderr).strip().splitlines() or [""]
    return {"error": lines[-1], "path": path} if done.returncode else {"says": lines[0], "path": path}
