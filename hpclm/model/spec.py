"""How to build and call one layer of a model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hpclm.config.layer import Layer
from hpclm.model.context import LayerContext


@dataclass(frozen=True)
class LayerSpec:
    """How to build one layer. Specs with the same ``name`` share one module; ``call`` tells how this spec uses it."""

    name: str
    module: Callable[..., nn.Module]
    kwargs: dict[str, Any] = field(default_factory=dict)
    call: Callable[[nn.Module, Any, LayerContext], Any] | None = None  # None: module(x, context)
    recompute: bool = False
    number: int = 0
    """Index among all layers of the model; seeds its dropout."""
    layer: Layer | None = None
    """The block as a value; None: embeddings, the last norm or the head."""
    on_meta: bool = True
    """Whether to build the layer on the meta device and initialise it later, as modules of hpclm allow (model.init). Then every process
    can list all layers, and fill only those that it keeps."""

    def build(self) -> nn.Module:
        """Build the layer, on the meta device if its modules support that, otherwise on the CPU."""
        with torch.device("meta" if self.on_meta else "cpu"):
            return self.module(**self.kwargs)
