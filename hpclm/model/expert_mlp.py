"""Mixture of experts: a router chooses a few of a layer's MLPs for each token (Shazeer et al. 2017).

T tokens in a sequence, t = T / tp of them on this process between layers, B sequences in a micro-batch, C hidden size, E experts, k of
them for each token, F inner size of an expert. No token is dropped, however uneven the choice (Gale et al. 2022).
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpclm.config import ModelConfig, ParallelConfig
from hpclm.config.experts import ExpertsConfig
from hpclm.model.balance_losses import add_balance_losses, normalized
from hpclm.model.context import LayerContext
from hpclm.model.init import TensorParallelModule
from hpclm.model.layers import ACTIVATIONS, MLP, activated
from hpclm.model.weights import Table
from hpclm.parallel.collectives import all_gather, gather, scatter
from hpclm.parallel.dispatch import on_host, route
from hpclm.parallel.mesh import SINGLE, Axis, Mesh

ALIGNMENT = 16  # rows of grouped_mm must be a multiple of this many bytes


class ExpertAxes(NamedTuple):
    """The axes that divide experts and sequences."""

    ep: Axis = SINGLE
    """The processes that divide the experts."""
    cp: Axis = SINGLE
    """The processes that divide sequences."""
    split: bool = True
    """Whether experts are split over tensor parallelism."""

    @classmethod
    def of(cls, parallel: ParallelConfig, mesh: Mesh) -> "ExpertAxes":
        """The axes that ``parallel`` describes."""
        return cls(mesh.ep, mesh.cp, parallel.split_experts)


class Routing(NamedTuple):
    """A router's choice for each token of [t, B]."""

    logits: Tensor  # [t, B, E] fp32
    scores: Tensor  # [t, B, E] fp32; the factors are scores of the chosen experts
    chosen: Tensor  # [t, B, k] int64
    factors: Tensor  # [t, B, k] fp32, of the chosen experts' results


class Router(TensorParallelModule):
    """Chooses experts in fp32: rounding to bf16 would change the choice between close scores (Fedus et al. 2022, section 2.4)."""

    def __init__(self, config: ExpertsConfig, table: Table, generator: torch.Generator, tp: Axis):
        """``table``: made by weights.router()."""
        super().__init__(tp)
        self.config = config
        self.weight = self.declared(table, "weight", generator)
        self.bias = self.optional(table, "bias")
        self.choice_bias: Tensor | None
        """[E] fp32; engines keep it in fp32 and move it, gradients do not."""
        self.new_buffer("choice_bias", torch.zeros(config.count, device="cpu") if config.router_choice_bias else None)
        self.load: Tensor | None = None
        """[E] fp32: each expert's tokens in the previous step, divided by the mean; set by engines with model.experts.balance_step."""
        self.received: tuple[int, int] | None = None
        """With parallel.expert: the rows that this process's experts received last, and the rows of an even load."""

    def forward(self, x: Tensor) -> Routing:
        """[t, B, C] -> the choice for each token."""
        # rounded like the copies that some engines compute with, so that all engines choose the same experts
        weight = self.replicated(self.weight).to(x.dtype).float()
        bias = None if self.bias is None else self.replicated(self.bias).to(x.dtype).float()
        logits = F.linear(x.float(), weight, bias)
        scores = logits.softmax(-1) if self.config.router_score == "softmax" else logits.sigmoid()
        chosen = self._choose(scores.detach())
        factors = scores.gather(-1, chosen)
        if self.config.router_normalize:
            factors = normalized(factors)
        return Routing(logits, scores, chosen, factors * self.config.router_scale)

    def _choose(self, scores: Tensor) -> Tensor:
        """[t, B, E] scores -> [t, B, k] experts."""
        config = self.config
        if self.choice_bias is not None:
            scores = scores + self.choice_bias
        if config.router_groups > 1:
            grouped = scores.unflatten(-1, (config.router_groups, -1))
            best = grouped.topk(2, -1).values.sum(-1).topk(config.router_top_groups, -1).indices
            taken = torch.zeros_like(grouped[..., 0]).scatter(-1, best, 1.0)
            scores = grouped.masked_fill(taken[..., None] == 0, -torch.inf).flatten(-2)
        return scores.topk(config.per_token, -1).indices


class Experts(TensorParallelModule):
    """The experts of this process: rows sorted by expert [m, C] -> results times the rows' factors [m, C].

    With tensor parallelism, each result is a partial sum.
    """

    loops = False
    """Whether to compute one expert after the other, without grouped_mm."""

    def __init__(self, activation: str, table: Table, generator: torch.Generator, tp: Axis, split: bool):
        """``activation``: model.activation. ``table``: made by weights.stacked_experts(). ``split``: see ExpertAxes."""
        super().__init__(tp)
        self.split = split
        self.kind = activation
        self.activation = ACTIVATIONS[activation]
        self.up = self.declared(table, "up", generator)
        self.down = self.declared(table, "down", generator)
        self.up_bias = self.optional(table, "up_bias")
        self.down_bias = self.optional(table, "down_bias")

    def forward(self, x: Tensor, factors: Tensor, counts: Tensor) -> Tensor:
        """[m, C] rows, the first ``counts[0]`` for the first expert, and the factors [m] of their results -> [m, C]."""
        up, down = (self._weight(weight).to(x.dtype) for weight in (self.up, self.down))
        up_bias, down_bias = (
            None if bias is None else self._weight(bias).to(x.dtype) for bias in (self.up_bias, self.down_bias)
        )
        if down_bias is not None and self.split and self.tp.size > 1:
            down_bias = self.replicated(down_bias) / self.tp.size  # every rank adds it to its partial sum
        multiply = grouped if self.groups(x.dtype) else one_by_one
        ends = counts.cumsum(0).to(torch.int32)
        y = multiply(x, up, ends)
        if up_bias is not None:
            y = y + repeated(up_bias, counts, len(x))
        # the factors scale the inner rows, which are saved anyway, so their gradient does not need the results
        y = multiply(activated(y, self.kind, self.activation), down, ends, factors[:, None])
        if down_bias is not None:
            y = y + repeated(down_bias, counts, len(x)) * factors[:, None]
        return y

    def groups(self, dtype: torch.dtype) -> bool:
        """Whether grouped_mm can compute the products in this type."""
        rows = self.up.shape[2], self.up.shape[1], self.down.shape[2]
        return not self.loops and all(width * dtype.itemsize % ALIGNMENT == 0 for width in rows)

    def _weight(self, weight: Tensor) -> Tensor:
        """``weight``; if every tensor-parallel rank holds it whole for its own tokens, the gradient is summed over the ranks."""
        return weight if self.split else self.replicated(weight)


def repeated(bias: Tensor, counts: Tensor, rows: int) -> Tensor:
    """[E, A] biases -> [m, A]: the bias of each row's expert."""
    return bias.repeat_interleave(counts, 0, output_size=rows)


def grouped(x: Tensor, weights: Tensor, ends: Tensor, factors: Tensor | None = None) -> Tensor:
    """Multiply [m, A] rows, times ``factors`` [m, 1], by [E, B, A] matrices -> [m, B]; the rows of expert e end before ``ends[e]``."""
    if factors is None:
        return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    return _ScaledProduct.apply(x, factors, weights, ends)


def one_by_one(x: Tensor, weights: Tensor, ends: Tensor, factors: Tensor | None = None) -> Tensor:
    """See grouped(); loops over the experts, and the host waits for their counts."""
    if factors is not None:
        x = x * factors
    parts = x.split(on_host(ends.diff(prepend=ends.new_zeros(1)), len(x)))
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights.unbind(), strict=True)])


class _ScaledProduct(torch.autograd.Function):
    """grouped() with factors; saves only the unscaled rows, and multiplies again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, factors, weights, ends)
        return F.grouped_mm(x * factors, weights.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        x, factors, weights, ends = ctx.saved_tensors
        [d_y] = outer
        d_x = None
        d_factors = None
        d_weights = None
        if any(ctx.needs_input_grad[:2]):  # without the first, if weights of the experts are frozen
            d_scaled = F.grouped_mm(d_y, weights, offs=ends)
            d_x = d_scaled * factors
            d_factors = (d_scaled * x).sum(-1, keepdim=True)
        if ctx.needs_input_grad[2]:  # a zero-bubble schedule asks for one gradient at a time
            d_weights = F.grouped_mm(d_y.t(), x * factors, offs=ends)
        return d_x, d_factors, d_weights, None


class ExpertMLP(nn.Module):
    """Router, experts and shared experts: [t, B, C] -> [t, B, C]."""

    def __init__(
        self,
        config: ModelConfig,
        experts: ExpertsConfig,
        table: Table,
        generator: torch.Generator,
        tp: Axis,
        axes: ExpertAxes,
    ):
        """``table``: the MLP's part of weights.block()."""
        super().__init__()
        self.config = experts
        self.tp = tp
        self.axes = axes
        self.router = Router(experts, table.parts["router"], generator, tp)
        self.experts = Experts(config.activation, table.parts["experts"], generator, tp, axes.split)
        shared = table.parts.get("shared")
        self.shared = MLP(config, shared, generator, tp) if shared else None

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[t, B, C] -> [t, B, C]."""
        routing = self.router(x)
        x = add_balance_losses(x, context, self.config, routing, self.router.load, (self.tp, self.axes.cp))
        chosen = routing.chosen
        factors = routing.factors.to(x.dtype)
        tokens = x
        split = self.axes.split and self.tp.size > 1
        if split:  # each process has a part of every expert, so it needs the tokens of all processes
            tokens = gather(x, self.tp)
            factors = gather(factors, self.tp)
            chosen = all_gather(chosen, self.tp)
        y = self.compute(tokens, chosen, factors)
        if split:
            y = scatter(y, self.tp)
        if self.shared is not None:
            y = y + self.shared(x)
        return y

    def compute(self, x: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
        """[T, B, C] tokens, their [T, B, k] experts and the factors of these -> [T, B, C]."""
        way = route(chosen.flatten(0, 1), self.config.count, self.axes.ep)
        if way.sizes is not None:
            self.router.received = sum(way.sizes[1]), way.places.numel()
        rows = way.send(x.flatten(0, 1))
        factors = way.send_factors(factors.flatten(0, 1))
        return way.give_back(self.experts(rows, factors, way.counts)).view(x.shape)

    def runs_uncompiled(self, dtype: torch.dtype) -> bool:
        """Whether compute() cannot be compiled: the host must know each expert's number of tokens, or the type is not bf16. PyTorch
        up to 2.13 traces grouped_mm only in bf16."""
        return self.axes.ep.size > 1 or dtype != torch.bfloat16 or not self.experts.groups(dtype)


def routers(module: Any) -> list[Router]:
    """The routers of a module, in order."""
    return [inner for inner in module.modules() if isinstance(inner, Router)]
