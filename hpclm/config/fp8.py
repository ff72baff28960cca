"""Which products engine.fp8 computes in FP8, and which settings rule it out."""

from collections.abc import Callable, Iterator
from typing import Any

from hpclm.config.model import BLOCKS
from hpclm.config.section import Rule

MULTIPLE = 16
"""Sides of matrices in FP8 are multiples of this: PyTorch's scaled_mm requires it."""


def blocks(model: Any) -> range:
    """The numbers of the blocks whose linear layers multiply in FP8: all but the first and the last."""
    return range(1, model.layers - 1)


def _with_fp8(broken: Callable[[Any], Any], sentence: str | Callable[[Any], str] | None = None) -> Rule:
    """A rule for runs in FP8."""
    return Rule(lambda run: broken(run) if run.engine.fp8 is not None else (), sentence)


def _odd_widths(run: Any) -> Iterator[str]:
    """Widths of matrices that are not multiples of MULTIPLE."""
    model, tensor = run.model, run.parallel.tensor
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
            yield f"engine.fp8={run.engine.fp8} needs widths that are multiples of {MULTIPLE}, and {name} is {width:g} wide"


RULES = (
    _with_fp8(
        lambda run: run.engine.precision not in ("auto", "bf16"),
        lambda run: f"engine.fp8={run.engine.fp8} needs engine.precision=bf16, not {run.engine.precision}",
    ),
    _with_fp8(
        lambda run: run.model.block not in BLOCKS,
        f"{{engine.fp8}} does not support {{model.block}}; it applies to {', '.join(BLOCKS)}",
    ),
    _with_fp8(
        lambda run: not blocks(run.model),
        "{engine.fp8} has no effect with {model.layers}: the first and the last block stay in bf16",
    ),
    _with_fp8(_odd_widths),
)
