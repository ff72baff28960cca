"""NVIDIA apex's kernels, as far as they can be tried without a GPU: what its compiled half is called with."""

import sys
import types

import pytest
import torch

from hpclm.config import ModelConfig
from hpclm.model.position import rotary, rotate
from hpclm.node import apex


def extension():
    """The interface of the compiled half, in PyTorch's operations."""
    module = types.ModuleType("rotation")
    module.forward_cached = lambda x, cos, sin, transposed: rotate(x, cos, sin)
    module.backward_cached = lambda d, cos, sin, transposed: rotate(d, cos, -sin)
    return module


@pytest.fixture(params=["fused_rotary_positional_embedding", "apex._extensions.fused_rotary_positional_embedding"])
def installed(request, monkeypatch):
    """The extension where older and newer versions of apex have it; none has apex.transformer."""
    for name in ("apex", "apex._extensions"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, request.param, extension())
    apex.kernels.cache_clear()
    yield
    apex.kernels.cache_clear()


def test_apexs_rotation_needs_only_its_compiled_half(installed):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 3, 8, generator=draw, requires_grad=True)
    outer = torch.randn(6, 2, 3, 8, generator=draw)
    cos, sin = rotary(torch.arange(6)[:, None], ModelConfig(hidden=8, heads=1))
    wanted, found = rotate(x, cos, sin), apex.kernels().rotate(x, cos, sin)
    assert torch.equal(found, wanted)
    assert torch.allclose(*(torch.autograd.grad(y, x, outer)[0] for y in (found, wanted)))
