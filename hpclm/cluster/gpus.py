"""How many GPUs this machine has, found without loading PyTorch here."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hpclm.errors import HpclmError

DEVICES = ("dev/nvidia[0-9]*", "dev/kfd", "dev/dxg")
"""Files of which there is one where PyTorch can see a GPU: NVIDIA's, AMD's, and Windows' to Linux."""
ASK = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


def count(env: Mapping[str, str], root: Path = Path("/")) -> int:
    """GPUs that PyTorch sees in the environment ``env``; asked of PyTorch in a process of its own, which takes seconds,
    and only where there is a GPU's device file below ``root``."""
    if not any(next(root.glob(pattern), None) for pattern in DEVICES):
        return 0
    try:
        told = subprocess.run(
            [sys.executable, "-c", ASK], env=env, capture_output=True, text=True, timeout=120, check=True
        )
        return int(told.stdout.split()[-1])
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        raise HpclmError(f"PyTorch cannot count the GPUs here: {said}") from None
    except subprocess.TimeoutExpired:
        raise HpclmError("PyTorch did not count the GPUs here within 120 s; is a driver or a GPU stuck?") from None
