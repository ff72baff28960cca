"""QK-clip (with Muon, MuonClip; Kimi Team 2025): scales down queries and keys with too large attention scores.

S is the largest score of a head in a step, and tau = optim.qk_clip. After the update, the weights of the head's queries and of its key
are multiplied by min(1, sqrt(tau / S)). As in Megatron-core (SelfAttention.clip_qk), S is the maximum over the heads that share a key.
Biases are scaled like the weights, so that the scores fall by exactly this factor. Each kind of attention says which rows it scales.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from hpclm.engine.sharded_parameter import ShardedParameter, rectangles
from hpclm.model.attention.layer import SoftmaxAttention
from hpclm.model.stack import Stack
from hpclm.parallel.collectives import all_reduce_max
from hpclm.parallel.mesh import Compute


class QKClip:
    """Measures the scores of this process's heads, and scales the values that its optimizer updates."""

    def __init__(self, stacks: Sequence[Stack], weights: Sequence[ShardedParameter], compute: Compute, limit: float):
        mesh = compute.mesh
        heads = stacks[0].config.attention.heads // mesh.tp.size
        named = [(name, layer) for stack in stacks for name, layer in stack.named_modules()]
        layers = {name.removeprefix("layers."): layer for name, layer in named if isinstance(layer, SoftmaxAttention)}
        self.mesh = mesh
        self.limit = limit
        self.largest = torch.empty(len(layers), heads, device=compute.device)
        """[layers, H] the largest scores so far in this step."""
        for layer, row in zip(layers.values(), self.largest, strict=True):
            layer.largest = row
        self.mixer = next(iter(layers.values()), None)
        """One of the layers, which are of one class."""
        numbers = {name: number for number, name in enumerate(layers)}
        self.weights = list[tuple[int, str, ShardedParameter]]()
        """The weights of these layers, each with its layer's number and the name of its linear layer."""
        for weight in weights:
            name, _, part = weight.name.rpartition(".")[0].rpartition(".")
            if name in numbers:
                self.weights.append((numbers[name], part, weight))

    def begin(self) -> None:
        """Reset the measurements before a step."""
        self.largest.fill_(-torch.inf)

    @torch.no_grad()
    def clip(self, skipped: Tensor) -> dict[str, Tensor]:
        """Scale down weights with too large scores, unless the update was ``skipped``. Returns the largest score. A collective."""
        # over all replicas: otherwise each would scale its copy of a weight differently
        largest = all_reduce_max(self.largest, self.mesh.dp)
        factors = {}
        if self.mixer is not None:
            factors = self.mixer.clip_factors(torch.where(skipped == 0, largest, -torch.inf), self.limit)
        for layer, part, weight in self.weights:
            if part not in factors:
                continue
            rows = factors[part]
            values = weight.parameter.view(-1)
            used = 0
            rows_here = rectangles(weight.placement.local(self.mesh.tp), weight.begin, weight.begin + weight.count)
            for (first, *_), size in rows_here:
                block = values[used : used + prod(size)].view(size[0], -1)
                block.mul_(rows[layer, first : first + size[0], None])
                used += block.numel()
        return {"max_attention_score": all_reduce_max(largest.max(), self.mesh.model)}
