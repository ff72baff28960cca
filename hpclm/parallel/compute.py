"""What a rank computes with."""

from dataclasses import dataclass, replace

import torch

from hpclm.parallel.mesh import SINGLE, SINGLE_MESH, Mesh


@dataclass(frozen=True)
class Compute:
    """What this rank computes with."""

    device: torch.device
    dtype: torch.dtype
    """Of activations and matrix products."""
    mesh: Mesh = SINGLE_MESH

    @property
    def alone(self) -> "Compute":
        """This with one replica, whose weights and sequences are whole; stages and tensor-parallel slices stay."""
        mesh = self.mesh
        alone = replace(
            mesh, dp=SINGLE, cp=SINGLE, shard=SINGLE, replicate=SINGLE, holders=mesh.tp, world=mesh.model, nodes=1
        )
        return replace(self, mesh=alone)
