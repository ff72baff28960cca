"""Products of linear layers in FP8 (engine.fp8): y = x W^T and d_x = d_y W. The gradient of W stays a product in bf16.

[n, k] rows are multiplied by powers of two, one for each row (rowwise) or one for all (tensorwise), so that the largest value nearly
fills the type, and rounded. The powers come from the operands of this product (dynamic scaling). Types are those of torchao's recipes of
the same names: e4m3, and for d_y e5m2 with one scale for the tensor.

If one scale covers values of several tensor-parallel ranks, the ranks all-reduce the maximum, so they quantize like a single process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hpclm.parallel.collectives import all_gather, all_reduce_max
from hpclm.parallel.mesh import Axis

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
EXPONENTS = {E4M3: 8, E5M2: 15}
"""Exponent of each type's largest value, which is 1.75 times this power of two."""
MANTISSA = 23  # bits of the fp32 mantissa
BIAS = 127  # of the fp32 exponent


class Quantized(NamedTuple):
    """``values`` x ``scales``."""

    values: Tensor  # [n, k] in FP8
    scales: Tensor  # [n, 1], or [1, 1], fp32 powers of two

    def in_bf16(self) -> Tensor:
        """[n, k] bf16, without further rounding."""
        return self.values.to(torch.bfloat16) * self.scales.to(torch.bfloat16)


@dataclass(frozen=True)
class FP8:
    """FP8 multiplication of a linear layer."""

    rowwise: bool
    """True: one scale for each row; false: one for the tensor."""
    tp: Axis
    splits_inputs: bool
    """True: tensor-parallel ranks split the layer's inputs; false: they split its outputs."""
    emulated: bool = False
    """Multiply quantized values in bf16, as on CPUs; exact except for the order of sums."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """[..., k] and [n, k] -> [..., n]. Ranks that split the outputs gather the quantized ``x`` along its first dimension."""
        a, b = self.operands(x.flatten(0, -2), weight, (E4M3, E4M3), self.splits_inputs)
        if not self.splits_inputs:
            # bytes, since not every backend of torch.distributed supports FP8
            values = all_gather(a.values.view(torch.uint8), self.tp).view(E4M3)
            a = Quantized(values, all_gather(a.scales, self.tp) if self.rowwise else a.scales)
        return self._product(a, b, fast=True).view(-1, *x.shape[1:-1], len(weight))

    def input_gradient(self, d_y: Tensor, weight: Tensor) -> Callable[[], Tensor]:
        """[..., n] and [n, k] -> a function that computes the product [..., k] without communication."""
        types = (E4M3 if self.rowwise else E5M2, E4M3)
        a, b = self.operands(d_y.flatten(0, -2), weight.t(), types, not self.splits_inputs)
        # the recipes accumulate tensorwise gradients exactly; the rowwise kernel is slow that way
        return lambda: self._product(a, b, fast=self.rowwise).view(*d_y.shape[:-1], -1)

    def operands(
        self, a: Tensor, b: Tensor, types: tuple[torch.dtype, torch.dtype], summed: bool
    ) -> tuple[Quantized, Quantized]:
        """Quantize the operands [m, k] and [n, k] of a product. ``summed``: whether ranks split k and sum their products."""
        dims = (1,) if self.rowwise else (0, 1)
        largest = [operand.abs().amax(dims, keepdim=True).float() for operand in (a, b)]
        if summed or not self.rowwise:
            agreed = all_reduce_max(torch.cat(largest), self.tp)
            largest = list(agreed.split([len(each) for each in largest]))
        first, second = map(quantized, (a, b), largest, types)
        return first, second

    def _product(self, a: Quantized, b: Quantized, fast: bool) -> Tensor:
        """[m, k] and [n, k] -> [m, n] bf16. ``fast``: on Hopper GPUs, sums may be less exact than fp32."""
        if self.emulated:
            return F.linear(a.in_bf16(), b.in_bf16())
        kind = F.ScalingType.RowWise if self.rowwise else F.ScalingType.TensorWise
        return F.scaled_mm(a.values, b.values.t(), a.scales, kind, b.scales.t(), kind, use_fast_accum=fast)


def quantized(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Quantized:
    """Quantize [n, k] bf16. ``largest``: the largest magnitude of each row or of all, fp32."""
    # in integer arithmetic: with logarithms and quotients, devices and compiled code would choose different powers in
    # close cases. These are the smallest exponents with 1.75 x 2^(exponent - BIAS) >= largest
    exponents = (largest.view(torch.int32) + (1 << MANTISSA - 2) - 1 >> MANTISSA).clamp(min=EXPONENTS[dtype] + 1)
    shift = exponents - EXPONENTS[dtype]
    scales = (shift << MANTISSA).view(torch.float32)
    factors = (2 * BIAS - shift << MANTISSA).view(torch.float32)
    return Quantized((x * factors.to(x.dtype)).to(dtype).contiguous(), scales)
