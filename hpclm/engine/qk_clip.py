"""QK-clip (with Muon, MuonClip; Kimi Team 2025): scales down queries and keys with too large attention scores.

S is the largest score of a head in a step, and tau = optim.qk_clip. After the update, the weights of the head's queries and of its key
are multiplied by min(1, sqrt(tau / S)). As in Megatron-core (SelfAttention.clip_qk), S is the maximum over the heads that share a key.
Biases are scaled like the weights, so that the scores fall by exactly this factor.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from hpclm.engine.sharded_parameter import ShardedParameter, rectangles
from hpclm.model.attention.layer import Attention
from hpclm.model.stack import Stack
from hpclm.parallel.collectives import all_reduce_max
from hpclm.parallel.mesh import Mesh


class QKClip:
    """Measures the scores of this process's heads, and scales the values that its optimizer updates."""

    def __init__(self, stacks: Sequence[Stack], weights: Sequence[ShardedParameter], mesh: Mesh, limit: float):
        model = stacks[0].config
        named = [(name, layer) for stack in stacks for name, layer in stack.named_modules()]
        layers = {name.removeprefix("layers."): layer for name, layer in named if isinstance(layer, Attention)}
        self.mesh = mesh
        self.limit = limit
        self.width = model.head_width
        self.per_group = model.attention.heads // model.attention.groups
        self.largest = torch.empty(
            len(layers), model.attention.heads // mesh.tp.size, device=weights[0].parameter.device
        )
        """[layers, H] the largest scores so far in this step."""
        for layer, row in zip(layers.values(), self.largest, strict=True):
            layer.largest = row
        numbers = {f"{name}.qkv": number for number, name in enumerate(layers)}
        owned = [(numbers.get(weight.name.rpartition(".")[0]), weight) for weight in weights]
        self.weights = [(number, weight) for number, weight in owned if number is not None]
        """Each weight of queries, keys and values, with its layer's number."""

    def begin(self) -> None:
        """Reset the measurements before a step."""
        self.largest.fill_(-torch.inf)

    @torch.no_grad()
    def clip(self, skipped: Tensor) -> dict[str, Tensor]:
        """Scale down weights with too large scores, unless the update was ``skipped``. Returns the largest score. A collective."""
        # over all replicas: otherwise each would scale its copy of a weight differently
        largest = all_reduce_max(self.largest, self.mesh.dp)
        by_key = largest.unflatten(1, (-1, self.per_group)).amax(2)
        # the root, since queries and keys are both scaled: their product falls by tau / S
        factors = torch.where((by_key > self.limit) & (skipped == 0), (self.limit / by_key).sqrt(), 1.0)
        rows = torch.cat(
            # the rows of a group's queries and of its key; values do not enter scores
            [factors[..., None].expand(-1, -1, self.per_group + 1), torch.ones_like(factors)[..., None]],
            2,
        )
        # the factor of each row of each layer's fused weight
        rows = rows.repeat_interleave(self.width, 2).flatten(1)
        for layer, weight in self.weights:
            values = weight.parameter.view(-1)
            used = 0
            rows_here = rectangles(weight.placement.local(self.mesh.tp), weight.begin, weight.begin + weight.count)
            for (first, *_), size in rows_here:
                block = values[used : used + prod(size)].view(size[0], -1)
                block.mul_(rows[layer, first : first + size[0], None])
                used += block.numel()
        return {"max_attention_score": all_reduce_max(largest.max(), self.mesh.model)}
