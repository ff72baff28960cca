"""Linear, norm and token table: fp32 weights, computed in the type of the activations they meet.

T tokens in a sequence, B sequences in a micro-batch, C hidden width, V vocabulary. A weight's initial values come from
the generator that is passed in, so they depend on the seed and the layer, not on who builds it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpclm.config import ModelConfig


def normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> nn.Parameter:
    """A weight of ``shape`` drawn from N(0, std)."""
    return nn.Parameter(torch.empty(shape).normal_(std=std, generator=generator))


class Linear(nn.Module):
    """y = x W^T + b: [..., n_in] -> [..., n_out]."""

    def __init__(self, n_in: int, n_out: int, bias: bool, std: float, generator: torch.Generator):
        super().__init__()
        self.weight = normal((n_out, n_in), std, generator)
        self.bias = nn.Parameter(torch.zeros(n_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., n_in] -> [..., n_out]."""
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) over the last dimension."""

    def __init__(self, config: ModelConfig, width: int):
        super().__init__()
        self.rms, self.eps = config.norm == "rmsnorm", config.norm_eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.bias and not self.rms else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        weight = self.weight.to(x.dtype)
        if self.rms:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return F.layer_norm(x, weight.shape, weight, None if self.bias is None else self.bias.to(x.dtype), self.eps)


class TokenTable(nn.Module):
    """One row for each entry of the padded vocabulary."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, generator: torch.Generator):
        super().__init__()
        self.dtype = dtype  # of the activations, from here on
        self.vocab_size = config.vocab_size
        self.scale = config.hidden**0.5 if config.embed_scale else 1.0
        self.weight = normal((config.padded_vocab, config.hidden), config.init_std, generator)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] ids -> [T, B, C] in the compute type."""
        found = F.embedding(ids.t(), self.weight).to(self.dtype)
        return found if self.scale == 1.0 else found * self.scale


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Dropout that costs nothing when it is off."""
    return F.dropout(x, probability) if training and probability else x
