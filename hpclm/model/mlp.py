"""The block's MLP, plain or gated (Shazeer 2020)."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpclm.config import ModelConfig
from hpclm.model.layers import ColumnLinear, RowLinear
from hpclm.parallel.mesh import Axis

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "swiglu": F.silu,
    "geglu": F.gelu,
}


class MLP(nn.Module):
    """[t, B, C] -> [t, B, C]. Gated: ``up`` holds the gate's rows, then the other branch's."""

    def __init__(self, config: ModelConfig, generator: torch.Generator, tp: Axis):
        super().__init__()
        self.activation, self.gated = ACTIVATIONS[config.activation], config.gated
        inner = config.ffn_width
        branches, std = 1 + self.gated, config.init_std / (2 * config.layers) ** 0.5
        self.up = ColumnLinear(
            config.hidden, inner * branches, config.bias, config.init_std, generator, tp, parts=branches
        )
        self.down = RowLinear(inner, config.hidden, config.bias, std, generator, tp)

    def forward(self, x: Tensor) -> Tensor:
        """[t, B, C] -> [t, B, C]."""
        x = self.up(x)
        if self.gated:
            gate, x = x.chunk(2, -1)
            return self.down(self.activation(gate) * x)
        return self.down(self.activation(x))
