"""Each collective against the same arithmetic in one process, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from tests import ranks

T, B, C, N = 8, 2, 6, 4


def given(name, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))), dtype=torch.float64)


def slices(x, axis):
    return x.chunk(axis.size)[axis.rank].clone().requires_grad_()


def act(name):
    """What a rank gets from the collective ``name`` and back through it."""
    import torch.distributed as dist

    from hpclm.config import ParallelConfig
    from hpclm.parallel import collectives
    from hpclm.parallel.mesh import Mesh

    axis = Mesh.build(dist.get_rank(), dist.get_world_size(), ParallelConfig(tensor=dist.get_world_size())).tp
    if name == "gather":
        x = slices(given("x", T, B, C), axis)
        y = collectives.gather(x, axis)
        y.backward(given(f"dy{axis.rank}", T, B, C))
        return y.detach(), x.grad
    if name == "scatter":
        x = given(f"x{axis.rank}", T, B, C).requires_grad_()
        y = collectives.scatter(x, axis)
        y.backward(given("dy", T, B, C).chunk(axis.size)[axis.rank])
        return y.detach(), x.grad
    if name == "copy_to_tp":
        x = given("x", C).requires_grad_()
        y = collectives.copy_to_tp(x, axis)
        y.backward(given(f"dy{axis.rank}", C))
        return y.detach(), x.grad
    x = slices(given("x", T, B, C), axis)
    weight = given(f"w{axis.rank}", N, C).requires_grad_()
    bias = given(f"b{axis.rank}", N).requires_grad_()
    y = collectives.gathered_linear(x, weight, bias, axis)
    y.backward(given(f"dy{axis.rank}", T, B, N))
    return y.detach(), x.grad, weight.grad, bias.grad


def close(found, wanted):
    return torch.allclose(found, wanted, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_each_collective_is_its_sum_or_slice_and_its_gradient_the_transpose(size):
    x = given("x", T, B, C)
    d_ys = [given(f"dy{rank}", T, B, C) for rank in range(size)]
    for rank, (y, d_x) in enumerate(ranks.run(size, act, "gather")):
        assert close(y, x) and close(d_x, sum(d_ys).chunk(size)[rank])
    xs = [given(f"x{rank}", T, B, C) for rank in range(size)]
    for rank, (y, d_x) in enumerate(ranks.run(size, act, "scatter")):
        assert close(y, sum(xs).chunk(size)[rank]) and close(d_x, given("dy", T, B, C))
    for y, d_x in ranks.run(size, act, "copy_to_tp"):
        assert close(y, given("x", C)) and close(d_x, sum(given(f"dy{rank}", C) for rank in range(size)))


@pytest.mark.parametrize("size", [2, 4])
def test_a_gathered_linear_is_the_linear_of_the_whole(size):
    x = given("x", T, B, C).requires_grad_()
    found = ranks.run(size, act, "gathered_linear")
    total = 0
    for rank, (y, _, d_weight, d_bias) in enumerate(found):
        weight = given(f"w{rank}", N, C).requires_grad_()
        bias = given(f"b{rank}", N).requires_grad_()
        wanted = F.linear(x, weight, bias)
        d_y = given(f"dy{rank}", T, B, N)
        theirs = torch.autograd.grad(wanted, (x, weight, bias), d_y)
        total = total + theirs[0]
        assert close(y, wanted) and close(d_weight, theirs[1]) and close(d_bias, theirs[2])
    for rank, (_, d_x, _, _) in enumerate(found):
        assert close(d_x, total.chunk(size)[rank])
