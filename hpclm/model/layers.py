"""Linear layers, norms, embedding and MLP: fp32 weights, computed in the type of the activations.

T tokens in a sequence, t = T / tp the slice that a tensor-parallel rank holds between layers, B sequences in a micro-batch, C hidden
size, V vocabulary size. Initial weights come from the generator passed in, so they depend on the seed and the layer, not on the layout.
With one process, t is T and nothing is communicated.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpclm.config import ModelConfig
from hpclm.config.model import GATED
from hpclm.model import weights
from hpclm.model.init import TensorParallelModule
from hpclm.model.weights import XIELU_BETA, Table
from hpclm.node import apex
from hpclm.parallel.collectives import gathered_linear, scatter, sum_over_tp
from hpclm.parallel.fp8 import FP8
from hpclm.parallel.main_gradients import embedding, linear
from hpclm.parallel.mesh import Axis
from hpclm.parallel.placement import Use

# gpt-oss's SwiGLU
CLAMPED_SLOPE = 1.702
CLAMP = 7.0
# Megatron-LM's fused bias-gelu is the tanh form and its unfused one the erf form, so the names here are explicit
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
    "swiglu_clamped": lambda x: x * torch.sigmoid(x * CLAMPED_SLOPE),
}
"""For gated activations: the function applied to the gate."""
NORMS = {"layernorm": ("layer_norm", True), "rmsnorm": ("rms_norm", False)}
"""For each kind: its name in PyTorch and apex, and whether it has a bias."""


def scaled(x: Tensor, factor: float) -> Tensor:
    """``x`` times ``factor``; costs nothing if the factor is 1."""
    return x if factor == 1.0 else x * factor


def capped(x: Tensor, cap: float | None) -> Tensor:
    """cap x tanh(x / cap), between -cap and cap (Gemma 2); None: ``x``."""
    return x if cap is None else cap * torch.tanh(x / cap)


class ColumnLinear(TensorParallelModule):
    """y = x W^T + b with the rows of W split, at the entry of a block's sublayer: [t, ..., C] -> [T, ..., width / tp]."""

    fp8: FP8 | None = None
    """Multiplication in FP8; None without engine.fp8."""

    def __init__(self, table: Table, generator: torch.Generator, tp: Axis):
        """``table``: made by weights.column_linear()."""
        super().__init__(tp)
        self.weight = self.declared(table, "weight", generator)
        self.bias = self.optional(table, "bias")

    def forward(self, x: Tensor) -> Tensor:
        """[t, ..., C] -> [T, ..., width / tp]."""
        bias = None if self.bias is None else self.accumulated("bias").to(x.dtype)
        return gathered_linear(x, self.weight.to(x.dtype), bias, self.tp, self.main_grads.get("weight"), self.fp8)


class WholeLinear(TensorParallelModule):
    """y = x W^T + b on every rank's own slice of the sequence: [t, ..., C] -> [t, ..., width]."""

    def __init__(self, table: Table, generator: torch.Generator, tp: Axis):
        """``table``: of weights.whole_linear()."""
        super().__init__(tp)
        self.weight = self.declared(table, "weight", generator)
        self.bias = self.optional(table, "bias")

    def forward(self, x: Tensor) -> Tensor:
        """[t, ..., C] -> [t, ..., width]."""
        weight = self.replicated(self.accumulated("weight")).to(x.dtype)
        bias = None if self.bias is None else self.replicated(self.accumulated("bias")).to(x.dtype)
        return F.linear(x, weight, bias)


class RowLinear(TensorParallelModule):
    """y = x W^T + b with the columns of W split, at the exit of a block's sublayer: [T, ..., width / tp] -> [t, ..., C]."""

    fp8: FP8 | None = None
    """See ColumnLinear."""

    def __init__(self, table: Table, generator: torch.Generator, tp: Axis):
        """``table``: made by weights.row_linear()."""
        super().__init__(tp)
        self.weight = self.declared(table, "weight", generator)
        self.bias = self.optional(table, "bias")

    def forward(self, x: Tensor) -> Tensor:
        """[T, ..., width / tp] -> [t, ..., C]."""
        weight = self.weight.to(x.dtype)
        main_grad = self.main_grads.get("weight")
        bias = None if self.bias is None else self.accumulated("bias")
        if self.tp.size == 1:
            return linear(x, weight, None if bias is None else bias.to(x.dtype), main_grad, self.fp8)
        # the bias is added after the sum over the ranks, or each rank would add it once
        y = scatter(linear(x, weight, None, main_grad, self.fp8), self.tp)
        return y if bias is None else y + self.replicated(bias).to(x.dtype)


class Norm(TensorParallelModule):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) over the last dimension.

    Every rank of ``tp`` holds the whole weight and applies it to its own slice of the activations.
    """

    def __init__(self, config: ModelConfig, table: Table, tp: Axis, eps: float | None = None):
        """``table``: of weights.norm(). ``eps``: None: model.norm_eps."""
        super().__init__(tp)
        self.norm, self.biased = NORMS[config.norm]
        self.eps = config.norm_eps if eps is None else eps
        self.fused = apex.norms().get(self.norm) if config.kernels == "apex" else None
        self.weight = self.declared(table, "weight")
        self.bias = self.optional(table, "bias")

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        weight = self.replicated(self.accumulated("weight")).to(x.dtype)
        bias = None if self.bias is None else self.replicated(self.accumulated("bias")).to(x.dtype)
        terms = (weight, bias) if self.biased else (weight,)
        # apex's kernels need the bias of a biased norm, and a tensor on a GPU
        if self.fused and x.is_cuda and all(term is not None for term in terms):
            return self.fused(x, *terms, weight.shape, self.eps)
        y: Tensor = getattr(F, self.norm)(x, weight.shape, *terms, self.eps)
        return y


class ProjectionNorm(TensorParallelModule):
    """RMSNorm over all heads of a projection, which are split over ``tp``: [T, B, H, D] -> the same."""

    def __init__(self, config: ModelConfig, table: Table, tp: Axis):
        super().__init__(tp)
        self.eps = config.norm_eps
        self.width = table.weights["weight"].size
        self.weight = self.declared(table, "weight")

    def forward(self, x: Tensor) -> Tensor:
        """[T, B, H, D] of this process's heads -> the same."""
        # in fp32: bf16's 8 bits lose the small terms in a sum of thousands of squares
        squares = sum_over_tp(x.float().square().sum((-2, -1), keepdim=True), self.tp)
        y = (x.float() * torch.rsqrt(squares / self.width + self.eps)).to(x.dtype)
        return y * self.weight.to(x.dtype).view(x.shape[-2:])


class XIELU(TensorParallelModule):
    """xIELU (Huang and Schlag 2024): quadratic above 0, exponential and linear below, with two weights a layer."""

    EPS = -1e-6  # as in transformers; so the activation of 0 is not 0, which a norm of a row of zeros amplifies

    def __init__(self, table: Table, tp: Axis):
        super().__init__(tp)
        self.alpha_p = self.declared(table, "alpha_p")
        self.alpha_n = self.declared(table, "alpha_n")

    def forward(self, x: Tensor) -> Tensor:
        """[...] -> [...]."""
        above: Tensor = F.softplus(self.replicated(self.alpha_p).to(x.dtype))
        below = XIELU_BETA + F.softplus(self.replicated(self.alpha_n).to(x.dtype))
        grown = torch.expm1(x.clamp(max=0))
        # EPS clamps only the value, because clamping would make the gradient jump
        grown = grown + (torch.expm1(x.clamp(max=self.EPS)) - grown).detach()
        low = (grown - x) * below + XIELU_BETA * x
        return torch.where(x > 0, above * x * x + XIELU_BETA * x, low)


class VocabParallelEmbedding(TensorParallelModule):
    """Token embedding with the padded vocabulary split over the ranks; also the output projection if tied."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, generator: torch.Generator, tp: Axis, use: Use = "embedding"
    ):
        super().__init__(tp)
        self.dtype = dtype  # of the activations
        self.vocab_size = config.vocab_size
        # sqrt(hidden) as in Vaswani et al. 2017 and Gemma
        self.scale = config.embed_multiplier * (config.hidden**0.5 if config.embed_scale else 1.0)
        self.weight = self.declared(weights.vocabulary(config, use), "weight", generator)
        self.rows: Tensor | None = None
        """The weight in the compute type, without a gradient, if an engine casts it once a step."""

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] ids -> [t, B, C] in the compute type."""
        x = self._look_up(ids.t()).to(self.dtype)
        return scaled(x, self.scale)

    def _look_up(self, ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return embedding(ids, self.weight, self.main_grads.get("weight"))
        mine = ids - self.tp.rank * len(self.weight)
        outside = (mine < 0) | (mine >= len(self.weight))
        # tokens of other ranks read row 0; masked_fill zeroes their gradient
        rows = embedding(mine.masked_fill(outside, 0), self.weight, self.main_grads.get("weight")).to(self.dtype)
        return scatter(rows.masked_fill(outside[..., None], 0.0), self.tp)  # one rank has the row, the others add 0


class MLP(nn.Module):
    """[t, B, C] -> [t, B, C]. If gated, ``up`` holds the rows of the gate, then the rows of the up projection."""

    def __init__(self, config: ModelConfig, table: Table, generator: torch.Generator, tp: Axis):
        """``table``: made by weights.mlp()."""
        super().__init__()
        self.kind = config.activation
        learned = table.parts.get("activation")
        self.activation = XIELU(learned, tp) if learned else ACTIVATIONS[config.activation]
        self.up = ColumnLinear(table.parts["up"], generator, tp)
        self.down = RowLinear(table.parts["down"], generator, tp)

    def forward(self, x: Tensor) -> Tensor:
        """[t, B, C] -> [t, B, C]."""
        return self.down(activated(self.up(x), self.kind, self.activation))


def activated(x: Tensor, kind: str, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """[..., F], or [..., 2 F] of gate and up if gated -> [..., F]. ``kind``: model.activation. ``activation``: its function."""
    if kind not in GATED:
        return activation(x)
    gate, up = x.chunk(2, -1)
    if kind == "swiglu_clamped":
        return activation(gate.clamp(max=CLAMP)) * (up.clamp(-CLAMP, CLAMP) + 1)
    return activation(gate) * up
