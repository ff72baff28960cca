"""What a rank computes with."""

from dataclasses import dataclass

import torch

from hpclm.parallel.mesh import Mesh


@dataclass(frozen=True)
class Compute:
    """What this rank computes with."""

    device: torch.device
    dtype: torch.dtype
    """Of activations and matrix products."""
    mesh: Mesh
