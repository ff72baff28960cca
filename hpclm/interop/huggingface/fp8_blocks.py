"""Weights in fp8 with a scale for each block of a matrix, as DeepSeek publishes them (quant_method=fp8 in transformers)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hpclm.base.errors import ConfigError
from hpclm.interop.run import TensorSource

SCALE = "_scale_inv"
"""Suffix of the name of a weight's scales."""
SUPPORTED = dict(quant_method=("fp8",), fmt=("e4m3", None), activation_scheme=("dynamic", None))


def size(tree: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block in a config.json; None if the weights are not quantized, or in another way."""
    given = tree.get("quantization_config")
    if not isinstance(given, Mapping) or any(given.get(key) not in values for key, values in SUPPORTED.items()):
        return None
    block = given.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or any(type(length) is not int or length < 1 for length in block):
        return None
    return block[0], block[1]


def dequantized(source: TensorSource, tree: Mapping[str, Any]) -> TensorSource:
    """``source``, with weights multiplied by their scales if config.json says that there are any."""
    block = size(tree)
    if block is None:
        return source
    return Dequantized(source, block)


class Dequantized:
    """Tensors, read one at a time. Those in fp8 have scales [blocks of rows, blocks of columns] beside them, and are read in fp32."""

    def __init__(self, source: TensorSource, block: tuple[int, int]):
        self._source = source
        self._block = block
        there = source.names()
        self._scaled = {name for name in there if name + SCALE in there}
        self._names = there - {name + SCALE for name in self._scaled}

    def names(self) -> set[str]:
        """Names of all tensors except scales."""
        return self._names

    def read(self, name: str) -> Tensor:
        """The tensor ``name``; ConfigError if it and its scales do not fit."""
        tensor = self._source.read(name)
        is_fp8 = tensor.dtype == torch.float8_e4m3fn
        if is_fp8 != (name in self._scaled):
            raise ConfigError(f"{name} is {tensor.dtype}, but fp8 weights, and only these, need scales: {name}{SCALE}")
        if not is_fp8:
            return tensor
        return self._multiplied(name, tensor)

    def _multiplied(self, name: str, tensor: Tensor) -> Tensor:
        scales = self._source.read(name + SCALE).float()
        rows, columns = self._block
        expected = tuple(-(-length // part) for length, part in zip(tensor.shape, self._block, strict=False))
        if tensor.ndim != 2 or tuple(scales.shape) != expected:
            raise ConfigError(
                f"{name}{SCALE} has shape {tuple(scales.shape)}, which does not fit {tuple(tensor.shape)} in blocks of {rows} x {columns}"
            )
        whole = tensor.float()
        for part, line in zip(whole.split(rows), scales, strict=True):
            part.mul_(line.repeat_interleave(columns)[: tensor.shape[1]])
        return whole
