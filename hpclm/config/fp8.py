"""Which products engine.fp8 computes in FP8, and which settings rule it out.

``model`` is a ModelConfig, ``engine`` an EngineConfig, ``parallel`` a ParallelConfig, whose files do not import this one.
"""

from collections.abc import Iterator
from typing import Any

from hpclm.config.model import BLOCKS

MULTIPLE = 16
"""Sides of matrices in FP8 are multiples of this: PyTorch's scaled_mm requires it."""


def blocks(model: Any) -> range:
    """The numbers of the blocks whose linear layers multiply in FP8: all but the first and the last."""
    return range(1, model.layers - 1)


def problems(model: Any, engine: Any, parallel: Any) -> Iterator[str]:
    """Why FP8 cannot be used with these settings."""
    if engine.fp8 is None:
        return
    setting, tensor = f"engine.fp8={engine.fp8}", parallel.tensor
    if engine.precision not in ("auto", "bf16"):
        yield f"{setting} needs engine.precision=bf16, not {engine.precision}"
    if model.block not in BLOCKS:
        yield f"{setting} does not support model.block={model.block}; it applies to {', '.join(BLOCKS)}"
    if not blocks(model):
        yield f"{setting} has no effect with model.layers={model.layers}: the first and the last block stay in bf16"
    split = {"the projection to queries, keys and values": (model.heads + 2 * model.groups) * model.head_width}
    split["attention's output"] = model.attention_width
    if model.dense_layers:
        split["the MLP's inner width (model.ffn)"] = model.ffn_width
    if model.experts and model.shared_ffn:
        split["the shared experts' inner width (model.shared_ffn)"] = model.shared_ffn
    on_each = f" on each of parallel.tensor={tensor} processes" if tensor > 1 else ""
    widths = {"model.hidden": model.hidden} | {f"{name}{on_each}": size / tensor for name, size in split.items()}
    for name, width in widths.items():
        if width % MULTIPLE:
            yield f"{setting} needs widths that are multiples of {MULTIPLE}, and {name} is {width:g} wide"
