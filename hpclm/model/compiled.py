"""torch.compile: whether it works on this machine, and functions compiled with it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hpclm.base.errors import HpclmError
from hpclm.node import environment
from hpclm.node.process_state import change

VARIANTS = 64  # graphs per function, for shapes of micro-batches, training and evaluation; PyTorch's default is 8


def prepare() -> None:
    """Set up PyTorch's compiler in this process. OSError or ConfigError if there is no folder for compiled code."""
    environment.for_inductor()  # first: importing torch._dynamo creates PyTorch's default folder
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    change(torch._inductor.config, "cpp_cache_precompile_headers", False)
    change(torch._dynamo.config, "recompile_limit", max(VARIANTS, torch._dynamo.config.recompile_limit))
    # compile the backward pass with the forward pass, where compiled() explains a failure
    change(torch._functorch.config, "force_non_lazy_backward_lowering", True)


def compiled(function: Callable[..., Any], whole: bool = True, backend: Any = "inductor") -> Callable[..., Any]:
    """``function`` compiled on its first call for each shape, as one graph if ``whole``. HpclmError if that fails."""
    prepare()
    run = torch.compile(function, dynamic=False, fullgraph=whole, backend=backend)

    def attempt(*args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        try:
            return run(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            raise HpclmError(
                f"torch.compile failed: {reason(error)}\nset engine.compile=false to train uncompiled, which is slower"
            ) from error

    return attempt


def problem(device: torch.device, backend: Any = "inductor") -> str:
    """Why a small kernel and its gradient cannot be compiled for ``device``; empty if they can. Uses no compiled code of earlier runs."""
    try:
        prepare()
        import torch._inductor.config

        x = torch.ones(8, device=device, requires_grad=True)
        with torch._inductor.config.patch(force_disable_caches=True):
            torch.compile(_small, dynamic=False, fullgraph=True, backend=backend)(x).backward()
    except OSError as error:
        return f"no folder for compiled code can be made: {error.filename or 'TMPDIR'}: {error.strerror}"
    except Exception as error:  # compilers and backends may raise anything
        return reason(error)
    return ""


def _small(x: Tensor) -> Tensor:
    return (x.sin() * x).sum()


class StackCompilation:
    """The parts of a stack that are compiled: its layers, or FlexAttention alone."""

    def __init__(self) -> None:
        self.layers = False
        """Whether the layers are compiled."""
        self.may_compile_attention = False
        """Whether FlexAttention may be compiled separately, on GPUs."""
        self._attention: Callable[..., Any] | None = None

    def attention_alone(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """FlexAttention's ``function``, compiled separately."""
        if self._attention is None:
            self._attention = compiled(function)
        return self._attention


def reason(error: Exception) -> str:
    """The message of a compilation error in one line."""
    return " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2]) or repr(error)
