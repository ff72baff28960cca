import pytest
import torch
import torch.nn.functional as F

from hpclm.model.kernels import BLOCK, blocked


@pytest.mark.parametrize("length", [1, 7, BLOCK, BLOCK + 1, 300])
def test_attention_in_blocks_is_causal_attention(length):
    draw = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(2, 3, length, 8, generator=draw).requires_grad_() for _ in range(3))
    outer = torch.randn(2, 3, length, 8, generator=draw)
    found = {}
    for name, attend in {
        "ours": blocked,
        "torch": lambda *x: F.scaled_dot_product_attention(*x, is_causal=True),
    }.items():
        y = attend(q, k, v)
        found[name] = [y.detach(), *torch.autograd.grad(y, (q, k, v), outer)]
    for a, b in zip(found["ours"], found["torch"], strict=True):
        assert (a - b).abs().max() < 1e-5
