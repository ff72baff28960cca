"""Compiling layers and functions with torch.compile: one graph for all that are alike, and eager operations where that fails."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from hpclm.node import environment

log = logging.getLogger(__name__)
VARIANTS = 64  # of one layer: shapes of micro-batches, training and evaluation; PyTorch gives up after 8


def compile_layers(layers: Iterable[nn.Module], whole: bool, backend: Any = "inductor") -> None:
    """Compile each layer when it first runs. ``whole``: without graph breaks.

    A layer that cannot be compiled runs as it is, and so do all others; the log says why, once.
    """
    import torch._dynamo
    import torch._functorch.config

    environment.for_inductor()
    torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    # with the forward pass, where a failure has the layer run as it is; in the backward pass it would end the run
    torch._functorch.config.force_non_lazy_backward_lowering = True
    group = tuple(layers)
    for layer in group:
        layer.compile(dynamic=False, fullgraph=whole, backend=backend)
        layer._compiled_call_impl = _Attempt(layer, group)


def compile_function(
    function: Callable[..., Any], plain: Callable[..., Any], backend: Any = "inductor"
) -> Callable[..., Any]:
    """``function`` compiled as one graph when it first runs; ``plain``, which gives the same, where that fails."""
    import torch

    environment.for_inductor()
    call: Callable[..., Any] | None = torch.compile(function, dynamic=False, fullgraph=True, backend=backend)

    def attempt(*args: Any, **kwargs: Any) -> Any:
        nonlocal call
        if call is None:
            return plain(*args, **kwargs)
        try:
            return call(*args, **kwargs)
        except failures() as error:
            warn(f"{function.__name__} runs", error)
            call = None
            return plain(*args, **kwargs)

    return attempt


class _Attempt:
    """A compiled layer until compiling it fails."""

    def __init__(self, layer: nn.Module, group: tuple[nn.Module, ...]):
        self.layer, self.group, self.call = layer, group, layer._compiled_call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.call is not None
        try:
            return self.call(*args, **kwargs)
        except failures() as error:
            warn("blocks run", error)
            for layer in self.group:
                layer._compiled_call_impl = None
            return self.layer(*args, **kwargs)


def failures() -> tuple[type[Exception], ...]:
    """What PyTorch raises where it cannot compile."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def warn(what: str, error: Exception) -> None:
    """Log that ``what`` is not compiled, and why."""
    why = " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])
    log.warning("torch.compile failed, so %s uncompiled and slower (engine.compile=false silences this): %s", what, why)
