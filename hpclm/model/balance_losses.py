"""Losses that balance the choice of experts, the router's z-loss, and counts of tokens for each expert.

All except the loss over a micro-batch are the same in every layout and for every micro-batch size. Tokens excluded from the model's loss
are excluded here too.

t tokens of each sequence on this process, B sequences in a micro-batch, E experts, k of them for each token.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hpclm.config.experts import ExpertsConfig
from hpclm.model.context import LayerContext
from hpclm.model.reports import add_loss
from hpclm.parallel.collectives import all_reduce
from hpclm.parallel.mesh import Axis

COUNTS = "expert_tokens/"
"""Prefix of the reported counts; the block's name follows it."""
SMALLEST_SUM = 1e-20  # added to sums of scores, as in DeepSeek-V3: sigmoids may all be 0


class Choice(Protocol):
    """A router's choice; see hpclm.model.expert_mlp.Routing."""

    @property
    def logits(self) -> Tensor:
        """[t, B, E] fp32."""

    @property
    def scores(self) -> Tensor:
        """[t, B, E] fp32."""

    @property
    def chosen(self) -> Tensor:
        """[t, B, k] int64."""


def add_balance_losses(
    x: Tensor,
    context: LayerContext,
    config: ExpertsConfig,
    choice: Choice,
    load: Tensor | None,
    axes: Sequence[Axis],
) -> Tensor:
    """``x`` [t, B, C], whose backward pass adds the losses that ``config`` enables. ``load``: see Router.load. ``axes``: the axes
    of the processes that divide the sequences of a micro-batch. Reports each expert's tokens. Does nothing if no loss is computed."""
    if context.weights is None or context.reports is None:
        return x
    counted = (context.weights > 0).long()
    counts = tokens_of_experts(choice.chosen, counted, config.count)
    context.reports.values[COUNTS] = counts.sum(0)
    # Wang et al. 2024 and DeepSeek-V3: affinities that sum to 1
    shares = choice.scores if config.router_score == "softmax" else normalized(choice.scores)
    if config.balance_sequence or config.balance_micro_batch:
        of_sequences = torch.cat([counts, counted.sum(0)[:, None]], 1)
        for axis in axes:
            of_sequences = all_reduce(of_sequences, axis)
        hits = of_sequences[:, :-1].float()
        tokens = of_sequences[:, -1:]
        factor = config.count / config.per_token
        if config.balance_sequence:
            values = (shares * (hits * factor / tokens.clamp(min=1))).sum(-1)
            x = add_loss(context, x, "balance_loss_sequence", values, config.balance_sequence)
        if config.balance_micro_batch:
            values = (shares * (hits.sum(0) * factor / tokens.sum().clamp(min=1))).sum(-1)
            x = add_loss(context, x, "balance_loss_micro_batch", values, config.balance_micro_batch)
    if config.balance_step:
        assert load is not None, "the engine sets Router.load"
        x = add_loss(context, x, "balance_loss_step", (shares * load).sum(-1), config.balance_step)
    if config.router_z_loss:
        x = add_loss(context, x, "router_z_loss", choice.logits.logsumexp(-1).square(), config.router_z_loss)
    return x


def normalized(scores: Tensor) -> Tensor:
    """[..., n] scores divided by their sums."""
    return scores / (scores.sum(-1, keepdim=True) + SMALLEST_SUM)


def tokens_of_experts(chosen: Tensor, counted: Tensor, experts: int) -> Tensor:
    """[t, B, k] chosen experts, and [t, B] 1 for counted tokens, otherwise 0 -> [B, E] int64: each expert's tokens in each sequence."""
    sequences = torch.arange(chosen.shape[1], device=chosen.device)[:, None]
    # one-dimensional, because GPUs then add in a fixed order; a [t, B, E] tensor of hits would cost E / k times more
    places = (sequences * experts + chosen).flatten()
    ones = counted[..., None].expand_as(chosen).flatten()
    return counted.new_zeros(chosen.shape[1] * experts).scatter_add_(0, places, ones).view(-1, experts)
