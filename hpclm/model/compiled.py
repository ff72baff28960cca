"""torch.compile with a fallback: functions that cannot be compiled run uncompiled."""

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
VARIANTS = 64  # graphs per function, for shapes of micro-batches, training and evaluation; PyTorch's default is 8
ELSEWHERE = "another rank that computes the same layers cannot compile them"


class Compilation:
    """Functions compiled on their first call, until that fails for one of them; the reason is logged once."""

    def __init__(self, name: str, backend: Any = "inductor", axes: Sequence[Axis] = ()):
        """``name``: the subject and verb of the log message. ``axes``: axes whose processes exchange tensors in the functions. They
        must all run the same code: if one cannot compile, none does."""
        try:  # first: importing torch._dynamo creates PyTorch's default folder
            environment.for_inductor()
        except OSError as error:  # no place for temporary files, or no room there
            backend = without_folder(error)
        import torch._dynamo
        import torch._functorch.config
        import torch._inductor.config

        change(torch._inductor.config, "cpp_cache_precompile_headers", False)
        change(torch._dynamo.config, "recompile_limit", max(VARIANTS, torch._dynamo.config.recompile_limit))
        # compile the backward pass with the forward pass, where a failure falls back; in the backward pass it would
        # end the run
        change(torch._functorch.config, "force_non_lazy_backward_lowering", True)
        # ranks that exchange nothing may mix compiled and uncompiled code
        together = [axis for axis in axes if axis.size > 1]
        self.name = name
        if together:
            backend = compiled_together(backend, together)
        self.backend = backend
        self.works = True
        self.failure = ""
        """The reason why this process could not compile; empty if it could, or if the reason is ELSEWHERE."""

    def of(self, function: Callable[..., Any], plain: Callable[..., Any], whole: bool = True) -> Callable[..., Any]:
        """``function`` compiled, as one graph if ``whole``; after a failure, the equivalent ``plain``."""
        # one graph for each shape, and at most VARIANTS graphs
        compiled = torch.compile(function, dynamic=False, fullgraph=whole, backend=self.backend)

        def attempt(*args: Any, **kwargs: Any) -> Any:
            if self.works:
                try:
                    return compiled(*args, **kwargs)
                except failures() as error:
                    self.works = False
                    if ELSEWHERE not in str(error):
                        self.failure = reason(error)
                    warn(self.name, error)
            return plain(*args, **kwargs)

        return attempt


def without_folder(error: OSError) -> Callable[..., Any]:
    """A backend that fails because no folder for compiled code could be created. It fails on use, so that the other processes learn of
    the failure and the function falls back."""
    why = f"no folder for compiled code can be made: {error.filename or 'TMPDIR'}: {error.strerror}"

    def attempt(graph: Any, inputs: Sequence[Any]) -> Any:
        raise RuntimeError(why)

    return attempt


def compiled_together(backend: Any, axes: Sequence[Axis]) -> Callable[..., Any]:
    """A backend that fails on all processes of ``axes`` if ``backend`` fails on one. They compile the same graphs in the same order, and
    would wait for each other forever if one ran other collectives."""

    def attempt(graph: Any, inputs: Sequence[Any]) -> Any:
        import torch._dynamo

        run = None
        error = None
        try:
            run = torch._dynamo.lookup_backend(backend)(graph, list(inputs))
        except Exception as failure:  # a backend may raise anything
            error = failure
        device = next((given.device for given in inputs if isinstance(given, Tensor)), torch.device("cpu"))
        failed = torch.tensor(float(error is not None), device=device)
        # the failed rank also gets here: otherwise the others would wait for it
        for axis in axes:
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=axis.group)
        if error is not None:
            raise error
        if failed.item():
            raise RuntimeError(ELSEWHERE)
        return run

    return attempt


class StackCompilation:
    """The compilations of a stack: its layers or, if those run uncompiled, FlexAttention alone."""

    def __init__(self, axes: Sequence[Axis]):
        """``axes``: see Compilation."""
        self.axes = axes
        self.layers: Compilation | None = None
        self.attention: Compilation | None = None
        self.may_compile_attention = False
        """Whether FlexAttention may be compiled separately, on GPUs."""

    @property
    def works(self) -> bool:
        """Whether layers are compiled; false once that has failed."""
        return self.layers is not None and self.layers.works

    @property
    def compiles_attention(self) -> bool:
        """Whether FlexAttention is compiled separately; false once that has failed."""
        return self.may_compile_attention and (self.attention is None or self.attention.works)

    def attention_alone(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """FlexAttention's ``function``, compiled separately until that fails."""
        if self.attention is None:
            self.attention = Compilation("attention runs", axes=self.axes)
            self._compiled_attention = self.attention.of(function, function)
        return self._compiled_attention

    @property
    def tried(self) -> list[Compilation]:
        """All compilations, failed ones included."""
        return [tried for tried in (self.layers, self.attention) if tried is not None]


def compile_layers(
    layers: Iterable[nn.Module], whole: bool, backend: Any = "inductor", axes: Sequence[Axis] = ()
) -> Compilation:
    """Compile the forward pass of each layer; identical layers share graphs. ``whole``: without graph breaks. ``axes``: see Compilation."""
    compilation = Compilation("blocks run", backend, axes)
    for layer in layers:
        layer.forward = compilation.of(layer.forward, layer.forward, whole)
    return compilation


def failures() -> tuple[type[Exception], ...]:
    """The exceptions that PyTorch raises if it cannot compile."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def reason(error: Exception) -> str:
    """The message of a compilation error in one line."""
    return " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])


def warn(what: str, error: Exception) -> None:
    """Log that ``what`` runs uncompiled, and the reason."""
    log.warning(
        "torch.compile failed, so %s uncompiled and slower (engine.compile=false silences this): %s",
        what,
        reason(error),
    )
