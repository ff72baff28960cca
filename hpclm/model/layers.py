"""Linear, norm and token table: fp32 weights, computed in the type of the activations they meet.

T tokens in a sequence, t = T / tp the slice of it that a tensor-parallel process holds between layers, B sequences in a
micro-batch, C hidden width, V vocabulary. A weight's initial values come from the generator that is passed in, so they
depend on the seed and the layer, not on who builds it. With one process t is T and nothing is communicated.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hpclm import apex
from hpclm.config import ModelConfig
from hpclm.model.draw import Initial, Part
from hpclm.parallel.collectives import gathered_linear, scatter, share
from hpclm.parallel.form import Form
from hpclm.parallel.mesh import Axis


class ColumnLinear(Part):
    """y = x W^T + b with the rows of W split: [t, ..., n_in] -> [T, ..., n_out / tp].

    ``parts``: blocks of rows that are each split for themselves.
    """

    def __init__(
        self, n_in: int, n_out: int, bias: bool, std: float, generator: torch.Generator, tp: Axis, parts: int = 1
    ):
        super().__init__(tp)
        self.weight = self.held("weight", Initial.normal(Form((n_out, n_in), 0, parts), std, generator))
        self.bias = self.held("bias", Initial(Form((n_out,), 0, parts))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[t, ..., n_in] -> [T, ..., n_out / tp]."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return gathered_linear(x, self.weight.to(x.dtype), bias, self.tp)


class RowLinear(Part):
    """y = x W^T + b with the columns of W split: [T, ..., n_in / tp] -> [t, ..., n_out]."""

    def __init__(self, n_in: int, n_out: int, bias: bool, std: float, generator: torch.Generator, tp: Axis):
        super().__init__(tp)
        self.weight = self.held("weight", Initial.normal(Form((n_out, n_in), 1), std, generator))
        self.bias = self.held("bias", Initial(Form((n_out,)))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, ..., n_in / tp] -> [t, ..., n_out]."""
        weight, bias = self.weight.to(x.dtype), self.bias
        if self.tp.size == 1:
            return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
        y = scatter(F.linear(x, weight), self.tp)
        return y if bias is None else y + share(bias, self.tp).to(x.dtype)


class Norm(Part):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) over the last dimension.

    Every process of ``tp`` has the whole weight and meets its own slice of the activations.
    """

    def __init__(self, config: ModelConfig, width: int, tp: Axis):
        super().__init__(tp)
        self.rms, self.eps = config.norm == "rmsnorm", config.norm_eps
        self.fused = apex.kernels() if config.kernels == "apex" else None
        self.weight = self.held("weight", Initial(Form((width,)), mean=1.0))
        self.bias = self.held("bias", Initial(Form((width,)))) if config.bias and not self.rms else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        weight = share(self.weight, self.tp).to(x.dtype)
        fused = self.fused if x.is_cuda else None
        if self.rms:
            if fused and fused.rms_norm:
                return fused.rms_norm(x, weight, weight.shape, self.eps)
            return F.rms_norm(x, weight.shape, weight, self.eps)
        bias = None if self.bias is None else share(self.bias, self.tp).to(x.dtype)
        if fused and fused.layer_norm and bias is not None:
            return fused.layer_norm(x, weight, bias, weight.shape, self.eps)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


class TokenTable(Part):
    """One row for each entry of the padded vocabulary; the rows are split."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, generator: torch.Generator, tp: Axis):
        super().__init__(tp)
        self.dtype = dtype  # of the activations, from here on
        self.vocab_size = config.vocab_size
        self.scale = config.hidden**0.5 if config.embed_scale else 1.0
        form = Form((config.padded_vocab, config.hidden), 0)
        self.weight = self.held("weight", Initial.normal(form, config.init_std, generator))

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] ids -> [t, B, C] in the compute type."""
        found = self._found(ids.t()).to(self.dtype)
        return found if self.scale == 1.0 else found * self.scale

    def _found(self, ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        mine = ids - self.tp.rank * len(self.weight)
        outside = (mine < 0) | (mine >= len(self.weight))
        found = F.embedding(mine.masked_fill(outside, 0), self.weight).to(self.dtype)
        return scatter(found.masked_fill(outside[..., None], 0.0), self.tp)  # one process has the row, the others 0


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Dropout that costs nothing when it is off."""
    return F.dropout(x, probability) if training and probability else x
