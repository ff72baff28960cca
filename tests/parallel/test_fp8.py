"""Linear layers in FP8: what is multiplied, its scales, and that tensor-parallel ranks quantize as one process does."""

import math

import pytest
import torch

from hpclm.config import ModelConfig
from hpclm.model.layers import ColumnLinear, RowLinear
from hpclm.model.weights import column_linear, row_linear
from hpclm.parallel.fp8 import E4M3, E5M2, FP8, quantized
from hpclm.parallel.mesh import SINGLE, Axis
from tests import ranks

LARGEST = {E4M3: 448.0, E5M2: 57344.0}
BITS, SMALLEST = {E4M3: 3, E5M2: 2}, {E4M3: -6, E5M2: -14}
RECIPES = pytest.mark.parametrize("rowwise", [True, False], ids=["rowwise", "tensorwise"])
T, B, C, WIDTH = 6, 2, 32, 64
CONFIG = ModelConfig.of({"hidden": C, "attention.heads": 4, "layers": 3})


def drawn(*shape, seed=0):
    """bf16 numbers of very different sizes."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=draw) * torch.exp(2 * torch.randn(shape, generator=draw))).bfloat16()


def scale_of(largest, dtype):
    """The smallest power of two in fp32 that times the type's largest value is no less than ``largest``."""
    power = -126
    while LARGEST[dtype] * 2.0**power < largest:
        power += 1
    return 2.0**power


def in_fp64(x, dtype, dims):
    """``x`` quantized and multiplied back, in fp64 from the definitions of the types."""
    x = x.double()
    largest = x.abs().amax(dims, keepdim=True)
    scales = torch.tensor([scale_of(value, dtype) for value in largest.flatten().tolist()]).double().view_as(largest)
    scaled = x / scales
    exponents = torch.frexp(scaled).exponent - 1
    step = 2.0 ** (exponents.clamp(min=SMALLEST[dtype]) - BITS[dtype]).double()
    return (scaled / step).round() * step * scales


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_bf16_number_gets_the_largest_scale_with_which_it_does_not_overflow(dtype):
    every = torch.arange(1 << 15, dtype=torch.int16).view(torch.bfloat16)
    x = every[every.isfinite() & (every > 0)][:, None]
    values, scales = quantized(x, x.float(), dtype)
    back = values.double() * scales.double()
    assert values.float().isfinite().all() and (torch.frexp(scales).mantissa == 0.5).all()
    usual = (x.double() > 2.0**-100).squeeze()
    assert (back[usual] / x[usual].double() - 1).abs().max() <= 2.0 ** -(BITS[dtype] + 1)
    wanted = [scale_of(value, dtype) for value in x[usual].flatten().tolist()[::37]]
    assert scales[usual].flatten().tolist()[::37] == wanted


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_in_its_row_and_a_row_of_zeros_is_zero(bad):
    x = torch.tensor([[1.0, bad], [1.0, 3.0], [0.0, 0.0]]).bfloat16()
    [bad_row, good, zeros] = quantized(x, x.abs().amax(1, keepdim=True).float(), E4M3).in_bf16()
    assert not bad_row[1].isfinite() and good.tolist() == [1.0, 3.0] and zeros.tolist() == [0.0, 0.0]


@RECIPES
def test_products_are_those_of_the_quantized_numbers(rowwise):
    x, weight, d_y = drawn(T, B, C), drawn(WIDTH, C, seed=1), drawn(T, B, WIDTH, seed=2)
    fp8, dims, of_gradient = (
        FP8(rowwise, SINGLE, False, emulated=True),
        (1,) if rowwise else (0, 1),
        E4M3 if rowwise else E5M2,
    )
    y = in_fp64(x.flatten(0, 1), E4M3, dims) @ in_fp64(weight, E4M3, dims).t()
    d_x = in_fp64(d_y.flatten(0, 1), of_gradient, dims) @ in_fp64(weight.t(), E4M3, dims).t()
    for found, wanted in ((fp8.output(x, weight), y), (fp8.input_gradient(d_y, weight)(), d_x)):
        assert found.dtype == torch.bfloat16 and found.shape[:2] == (T, B)
        apart = (found.flatten(0, 1).double() - wanted).abs()
        assert (apart <= 2.0**-8 * wanted.abs() + 1e-5 * wanted.abs().max()).all()


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older versions have scaled_mm on GPUs only")
@RECIPES
def test_pytorchs_scaled_mm_gives_what_the_emulation_gives(rowwise):
    x, weight, d_y = drawn(T, B, C), drawn(WIDTH, C, seed=1), drawn(T, B, WIDTH, seed=2)
    emulated, real = (FP8(rowwise, SINGLE, False, emulated=way) for way in (True, False))
    for wanted, found in (
        (emulated.output(x, weight), real.output(x, weight)),
        (emulated.input_gradient(d_y, weight)(), real.input_gradient(d_y, weight)()),
    ):
        # on CPUs, scaled_mm rounds more than once
        assert (found.float() - wanted.float()).abs().max() <= 2.0**-6 * wanted.float().abs().max()


@pytest.mark.parametrize("kind", [ColumnLinear, RowLinear])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_gradients_of_weight_and_bias_are_those_of_bf16(kind, in_place):
    table = {ColumnLinear: column_linear, RowLinear: row_linear}[kind](CONFIG, WIDTH, True)
    layer = kind(table, torch.Generator(), SINGLE)
    layer.weight.data = layer.weight.data.bfloat16()
    layer.fp8 = FP8(True, SINGLE, kind is RowLinear, emulated=True)
    total = drawn(*layer.weight.shape).float()
    layer.main_grads = {"weight": total.clone()} if in_place else {}
    x = drawn(T, B, layer.weight.shape[1], seed=3).requires_grad_()
    y = layer(x)
    d_y = drawn(*y.shape, seed=4)
    y.backward(d_y)
    rows, columns = d_y.flatten(0, 1), x.detach().flatten(0, 1)
    found = layer.main_grads["weight"] - total if in_place else layer.weight.grad
    torch.testing.assert_close(found.float(), (rows.t() @ columns).float(), rtol=0.01, atol=1e-3 * in_place)
    torch.testing.assert_close(layer.bias.grad, rows.sum(0).float())
    assert torch.equal(x.grad, layer.fp8.input_gradient(d_y, layer.weight)())
    assert torch.equal(y, layer.fp8.output(x, layer.weight) + layer.bias.bfloat16())


def parts(rowwise, size):
    """What a rank of tensor parallelism makes of its parts of the same tensors: outputs and gradients of inputs of both kinds."""
    rank = torch.distributed.get_rank() if size > 1 else 0
    tp = Axis(size, rank, torch.distributed.group.WORLD if size > 1 else None, tuple(range(size)))

    def mine(x, dim):
        return x.chunk(size, dim)[rank]

    column, row = (FP8(rowwise, tp, splits_inputs, emulated=True) for splits_inputs in (False, True))
    x, weight, d_y = drawn(T, B, C), drawn(WIDTH, C, seed=1), drawn(T, B, WIDTH, seed=2)
    found = {"columns": column.output(mine(x, 0), mine(weight, 0)), "rows": row.input_gradient(d_y, mine(weight, 1))()}
    # these are sums over ranks: what is summed must be quantized alike
    for name, a, b, dtype in (("sums", x, weight, E4M3), ("sums of gradients", d_y, weight.t(), E5M2)):
        operands = row.operands(mine(a, -1).flatten(0, 1), mine(b, 1), (dtype, E4M3), summed=True)
        found |= {f"{name} {number}": operand.in_bf16() for number, operand in enumerate(operands)}
        found |= {f"scales of {name} {number}": operand.scales for number, operand in enumerate(operands)}
    return {name: tensor.float().numpy() for name, tensor in found.items()}


@RECIPES
def test_tensor_parallel_ranks_quantize_as_one_process_does(rowwise):
    whole, split = parts(rowwise, 1), ranks.run(2, parts, rowwise, 2)
    for name, wanted in whole.items():
        each = [torch.from_numpy(rank[name]) for rank in split]
        found = each[0] if "scales" in name else torch.cat(each, -1)
        assert torch.equal(found, torch.from_numpy(wanted)), name
        assert "scales" not in name or torch.equal(each[0], each[1]), name
