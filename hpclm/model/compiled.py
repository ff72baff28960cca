"""Compiling layers with torch.compile: one graph for all that are alike, and eager operations where that fails."""

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

log = logging.getLogger(__name__)
VARIANTS = 64  # of one layer: shapes of micro-batches, training and evaluation; PyTorch gives up after 8


def compile_layers(layers: Iterable[nn.Module], whole: bool, backend: Any = "inductor") -> None:
    """Compile each layer when it first runs. ``whole``: without graph breaks.

    A layer that cannot be compiled runs as it is, and so do all others; the log says why, once.
    """
    import torch._dynamo
    import torch._functorch.config

    torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    # with the forward pass, where a failure has the layer run as it is; in the backward pass it would end the run
    torch._functorch.config.force_non_lazy_backward_lowering = True
    group = tuple(layers)
    for layer in group:
        layer.compile(dynamic=False, fullgraph=whole, backend=backend)
        layer._compiled_call_impl = _Attempt(layer, group)


class _Attempt:
    """A compiled layer until compiling it fails."""

    def __init__(self, layer: nn.Module, group: tuple[nn.Module, ...]):
        self.layer, self.group, self.call = layer, group, layer._compiled_call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        assert self.call is not None
        try:
            return self.call(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            why = " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])
            log.warning(
                "torch.compile failed, so blocks run uncompiled and slower (engine.compile=false silences this): %s",
                why,
            )
            for layer in self.group:
                layer._compiled_call_impl = None
            return self.layer(*args, **kwargs)
