from functools import partial

import pytest
import torch
import torch.nn.functional as F

from hpclm.model.compiled import compiled
from hpclm.model.head import Head
from hpclm.model.loss import TokenLoss, nll_and_gradient


@pytest.mark.parametrize("chunk", [1, 5, 24, None])
@pytest.mark.parametrize("vocab", [40, 33])
def test_the_chunked_loss_and_its_gradients_are_those_of_all_logits_at_once(chunk, vocab):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 3, 16, generator=draw, requires_grad=True)  # [T, B, C]
    weight = torch.randn(40, 16, generator=draw, requires_grad=True)
    labels = torch.randint(0, vocab, (3, 8), generator=draw)
    factors = torch.rand(3, 8, generator=draw)
    logits = F.linear(hidden, weight[:vocab]).transpose(0, 1)
    wanted = (F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") * factors.flatten()).sum()
    theirs = torch.autograd.grad(wanted * 3, (hidden, weight))
    loss, _ = TokenLoss(chunk)(Head(hidden, weight, vocab), labels, factors)
    ours = torch.autograd.grad(loss * 3, (hidden, weight))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    with torch.no_grad():
        assert TokenLoss(chunk)(Head(hidden, weight, vocab), labels, factors)[0].item() == pytest.approx(
            wanted.item(), rel=1e-5
        )


@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_z_losses_change_the_gradients_and_are_summed_apart(way):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 3, 16, generator=draw, requires_grad=True)
    weight = torch.randn(40, 16, generator=draw, requires_grad=True)
    labels, factors = torch.randint(0, 33, (3, 8), generator=draw), torch.rand(3, 8, generator=draw)
    logits = F.linear(hidden, weight[:33]).transpose(0, 1)
    plain = (F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") * factors.flatten()).sum()
    z = (0.1 * logits.logsumexp(-1).square() * factors).sum()
    theirs = torch.autograd.grad(plain + z, (hidden, weight))
    loss = TokenLoss(5, z_loss=0.1)
    if way == "compiled":
        loss.whole = partial(compiled(nll_and_gradient, backend="aot_eager"), z_loss=0.1)
    found, reported = loss(Head(hidden, weight, 33), labels, factors)
    ours = torch.autograd.grad(found, (hidden, weight))
    assert (found.item(), reported["z_loss"].item()) == pytest.approx((plain.item(), z.item()), rel=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
