"""torch.compile, with a way back: what cannot be compiled runs as it is."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from hpclm.node import environment

log = logging.getLogger(__name__)
VARIANTS = 64  # of one function: shapes of micro-batches, training and evaluation; PyTorch gives up after 8


class Compilation:
    """Functions that are compiled when they first run, until that fails for one of them; the log says why, once."""

    def __init__(self, name: str, backend: Any = "inductor"):
        """``name``: what they are, for the log."""
        import torch._dynamo
        import torch._functorch.config

        environment.for_inductor()
        torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
        # with the forward pass, where a failure has the function run as it is; in the backward pass it would end the run
        torch._functorch.config.force_non_lazy_backward_lowering = True
        self.name, self.backend, self.works = name, backend, True

    def of(self, function: Callable[..., Any], plain: Callable[..., Any], whole: bool = True) -> Callable[..., Any]:
        """``function`` compiled, ``whole``: as one graph; ``plain``, which gives the same, once that has failed."""
        import torch

        compiled = torch.compile(function, dynamic=False, fullgraph=whole, backend=self.backend)

        def attempt(*args: Any, **kwargs: Any) -> Any:
            if self.works:
                try:
                    return compiled(*args, **kwargs)
                except failures() as error:
                    self.works = False
                    warn(self.name, error)
            return plain(*args, **kwargs)

        return attempt


def compile_layers(layers: Iterable[nn.Module], whole: bool, backend: Any = "inductor") -> Compilation:
    """Compile the forward pass of each layer, with one graph for all that are alike. ``whole``: without graph breaks."""
    compilation = Compilation("blocks run", backend)
    for layer in layers:
        layer.forward = compilation.of(layer.forward, layer.forward, whole)
    return compilation


def failures() -> tuple[type[Exception], ...]:
    """What PyTorch raises where it cannot compile."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def warn(what: str, error: Exception) -> None:
    """Log that ``what`` is not compiled, and why."""
    why = " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])
    log.warning("torch.compile failed, so %s uncompiled and slower (engine.compile=false silences this): %s", what, why)
