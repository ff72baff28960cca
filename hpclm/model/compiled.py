"""torch.compile, with a way back: what cannot be compiled runs as it is."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpclm.node import environment
from hpclm.node.process_state import change
from hpclm.parallel.mesh import Axis

log = logging.getLogger(__name__)
VARIANTS = 64  # of one function: shapes of micro-batches, training and evaluation; PyTorch gives up after 8
ELSEWHERE = "another rank that computes the same layers cannot compile them"


class Compilation:
    """Functions that are compiled when they first run, until that fails for one of them; the log says why, once."""

    def __init__(self, name: str, backend: Any = "inductor", axes: Sequence[Axis] = ()):
        """``name``: what they are, for the log. ``axes``: of the processes that the functions exchange tensors with, which must
        all run them in one way: if one of these cannot compile, none does."""
        try:  # first: importing torch._dynamo makes PyTorch's default folder
            environment.for_inductor()
        except OSError as error:  # no place for temporary files, or no room there
            backend = without_folder(error)
        import torch._dynamo
        import torch._functorch.config
        import torch._inductor.config

        change(torch._inductor.config, "cpp_cache_precompile_headers", False)
        change(torch._dynamo.config, "recompile_limit", max(VARIANTS, torch._dynamo.config.recompile_limit))
        # with the forward pass, where a failure has the function run as it is; in the backward pass it would end the run
        change(torch._functorch.config, "force_non_lazy_backward_lowering", True)
        # ranks that exchange nothing may run compiled and uncompiled side by side
        together = [axis for axis in axes if axis.size > 1]
        self.name, self.backend = name, compiled_together(backend, together) if together else backend
        self.works = True
        self.failure = ""
        """Why this process could not compile; empty if it could, or if ELSEWHERE is the reason."""

    def of(self, function: Callable[..., Any], plain: Callable[..., Any], whole: bool = True) -> Callable[..., Any]:
        """``function`` compiled, ``whole``: as one graph; ``plain``, which gives the same, once that has failed."""
        # a graph for each shape, of which there are few (VARIANTS)
        compiled = torch.compile(function, dynamic=False, fullgraph=whole, backend=self.backend)

        def attempt(*args: Any, **kwargs: Any) -> Any:
            if self.works:
                try:
                    return compiled(*args, **kwargs)
                except failures() as error:
                    self.works = False
                    self.failure = "" if ELSEWHERE in str(error) else reason(error)
                    warn(self.name, error)
            return plain(*args, **kwargs)

        return attempt


def without_folder(error: OSError) -> Callable[..., Any]:
    """A backend that fails because no folder for compiled code could be made. It fails when it is used, where the other processes
    learn of it, and a function runs as it is."""
    why = f"no folder for compiled code can be made: {error.filename or 'TMPDIR'}: {error.strerror}"

    def attempt(graph: Any, inputs: Sequence[Any]) -> Any:
        raise RuntimeError(why)

    return attempt


def compiled_together(backend: Any, axes: Sequence[Axis]) -> Callable[..., Any]:
    """A backend that fails on all processes of ``axes`` where ``backend`` fails on one. They compile the same graphs in the same
    order, and would wait for one another forever if one went on with other collectives."""

    def attempt(graph: Any, inputs: Sequence[Any]) -> Any:
        import torch._dynamo

        run, error = None, None
        try:
            run = torch._dynamo.lookup_backend(backend)(graph, list(inputs))
        except Exception as failure:  # a backend may raise anything
            error = failure
        device = next((given.device for given in inputs if isinstance(given, Tensor)), torch.device("cpu"))
        failed = torch.tensor(float(error is not None), device=device)
        # also the rank that has failed comes here: otherwise the others would wait for it
        for axis in axes:
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=axis.group)
        if error is not None:
            raise error
        if failed.item():
            raise RuntimeError(ELSEWHERE)
        return run

    return attempt


class StackCompilation:
    """What a stack of layers compiles: its layers or, where those run as they are, FlexAttention on its own."""

    def __init__(self, axes: Sequence[Axis]):
        """``axes``: as of Compilation."""
        self.axes = axes
        self.layers: Compilation | None = None
        self.attention: Compilation | None = None
        self.may_compile_attention = False
        """Whether FlexAttention may be compiled on its own, on GPUs."""

    @property
    def works(self) -> bool:
        """Whether layers are compiled; not any more once that has failed."""
        return self.layers is not None and self.layers.works

    @property
    def compiles_attention(self) -> bool:
        """Whether FlexAttention is compiled on its own; not any more once that has failed."""
        return self.may_compile_attention and (self.attention is None or self.attention.works)

    def attention_alone(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """FlexAttention's ``function``, compiled on its own until that fails."""
        if self.attention is None:
            self.attention = Compilation("attention runs", axes=self.axes)
            self._compiled_attention = self.attention.of(function, function)
        return self._compiled_attention

    @property
    def tried(self) -> list[Compilation]:
        """All that is compiled, or was to be."""
        return [tried for tried in (self.layers, self.attention) if tried is not None]


def compile_layers(
    layers: Iterable[nn.Module], whole: bool, backend: Any = "inductor", axes: Sequence[Axis] = ()
) -> Compilation:
    """Compile the forward pass of each layer, with one graph for all that are alike. ``whole``: without graph breaks. ``axes``: as
    of Compilation."""
    compilation = Compilation("blocks run", backend, axes)
    for layer in layers:
        layer.forward = compilation.of(layer.forward, layer.forward, whole)
    return compilation


def failures() -> tuple[type[Exception], ...]:
    """What PyTorch raises where it cannot compile."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def reason(error: Exception) -> str:
    """What such an error says, in a line."""
    return " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])


def warn(what: str, error: Exception) -> None:
    """Log that ``what`` is not compiled, and why."""
    log.warning(
        "torch.compile failed, so %s uncompiled and slower (engine.compile=false silences this): %s",
        what,
        reason(error),
    )
