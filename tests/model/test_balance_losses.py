"""Losses that balance the choice of experts, by their definitions."""

from types import SimpleNamespace

import pytest
import torch

from hpclm.config import ModelConfig
from hpclm.model.balance_losses import COUNTS, add_balance_losses, tokens_of_experts
from hpclm.model.context import LayerContext, Reports

LOSSES = {
    "experts.balance_sequence": 0.5,
    "experts.balance_micro_batch": 0.25,
    "experts.balance_step": 0.125,
    "experts.router_z_loss": 2.0,
}


def told(scores, chosen, weights, load=None, **more):
    """What is reported of [t, B, E] scores and [t, B, k] chosen experts, and the gradient of the scores."""
    count, k = scores.shape[-1], chosen.shape[-1]
    shape = {"experts.count": count, "experts.per_token": k, "experts.router_choice_bias": True, **{**LOSSES, **more}}
    scores = scores.clone().requires_grad_()
    choice = SimpleNamespace(logits=scores.log(), scores=scores, chosen=chosen)
    metadata = LayerContext(None, None, None, None, weights=weights, reports=Reports())
    x = torch.zeros(*weights.shape, 3, requires_grad=True)
    add_balance_losses(x, metadata, ModelConfig.of(shape).experts, choice, load, ()).sum().backward()
    return metadata.reports.values, scores.grad


def test_all_losses_are_1_where_every_expert_has_as_many_tokens():
    scores, chosen = (
        torch.full((4, 2, 4), 0.25),
        torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]])[:, None].expand(4, 2, 2),
    )
    values, _ = told(scores, chosen, torch.full((4, 2), 1 / 8), load=torch.ones(4))
    assert [round(float(values[f"balance_loss_{name}"]), 5) for name in ("sequence", "micro_batch", "step")] == [
        1,
        1,
        1,
    ]
    assert values[COUNTS].tolist() == [4, 4, 4, 4]
    assert float(values["router_z_loss"]) == pytest.approx(0, abs=1e-5)  # of probabilities, which add up to 1


def test_losses_are_the_shares_times_the_tokens_of_each_expert_that_count_in_the_loss():
    draw = torch.Generator().manual_seed(0)
    scores = torch.rand(5, 2, 4, generator=draw)
    chosen = torch.stack([torch.randperm(4, generator=draw)[:2] for _ in range(10)]).view(5, 2, 2)
    weights = torch.rand(5, 2, generator=draw)
    weights[1:3, 0] = 0.0
    load = torch.tensor([2.0, 1.0, 0.5, 0.5])
    values, gradient = told(scores, chosen, weights, load, **{"experts.router_score": "sigmoid"})
    exact = dict.fromkeys(
        ("balance_loss_sequence", "balance_loss_micro_batch", "balance_loss_step", "router_z_loss"), 0.0
    )
    counts = torch.zeros(2, 4)
    for t in range(5):
        for b in range(2):
            for expert in chosen[t, b]:
                counts[b, expert] += float(weights[t, b] > 0)
    for t in range(5):
        for b in range(2):
            shares = scores[t, b] / scores[t, b].sum()
            each = (shares * counts[b]).sum() * 4 / 2 / (3 if b == 0 else 5)
            exact["balance_loss_sequence"] += float(weights[t, b] * each)
            exact["balance_loss_micro_batch"] += float(weights[t, b] * (shares * counts.sum(0)).sum() * 4 / 2 / 8)
            exact["balance_loss_step"] += float(weights[t, b] * (shares * load).sum())
            exact["router_z_loss"] += float(weights[t, b] * scores[t, b].sum().log() ** 2)
    assert {name: float(values[name]) for name in exact} == pytest.approx(exact, rel=1e-4)
    assert values[COUNTS].tolist() == counts.sum(0).tolist()
    assert not gradient[1:3, 0].any() and gradient[0].all()


def test_tokens_are_counted_by_sequence_and_expert():
    chosen = torch.tensor([[[0, 2], [1, 2]], [[0, 1], [1, 2]]])
    assert tokens_of_experts(chosen, torch.ones(2, 2).long(), 3).tolist() == [[2, 1, 1], [0, 2, 2]]
    assert tokens_of_experts(chosen, torch.tensor([[1, 0], [0, 1]]), 3).tolist() == [[1, 0, 1], [0, 1, 1]]
