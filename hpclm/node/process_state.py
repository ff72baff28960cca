"""The state of a process that uses hpclm as a library: what hpclm sets for itself is undone when the call returns."""

import atexit
import gc
import multiprocessing
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch

from hpclm.node import environment

UNDO: ContextVar[ExitStack | None] = ContextVar("UNDO", default=None)
"""What is called when the outermost ``preserved`` block ends."""
COMPUTING = dict(divide="warn", over="warn", under="ignore", invalid="warn")
"""NumPy's own handling of floating-point errors."""


def undo_later(undo: Callable[[], object]) -> None:
    """Have ``undo`` called when the caller gets its process back, or when the process ends, if that is hpclm's own."""
    stack = UNDO.get()
    if stack is None:
        atexit.register(undo)
    else:
        stack.callback(undo)


def change(module: Any, name: str, value: object) -> None:
    """Set an attribute of a library's module, until ``undo_later`` calls back."""
    if (before := getattr(module, name)) != value:
        undo_later(partial(setattr, module, name, before))
        setattr(module, name, value)


@contextmanager
def preserved() -> Iterator[None]:
    """Compute in the block as in a new process, and leave this one as it was, however the block ends.

    That is random generators, numeric settings of PyTorch and NumPy, the environment, warnings filters, and what is open: the memory
    and the files of a run are freed.
    """
    with environment.preserved(), warnings.catch_warnings(), np.errstate(**COMPUTING), ExitStack() as stack:  # type: ignore[arg-type]
        _preserve_python(stack)
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        _preserve_generators(stack)
        _preserve_numerics(stack)
        token = UNDO.set(stack)
        try:
            yield
        except BaseException as error:
            _free(error)
            raise
        finally:
            UNDO.reset(token)
            gc.collect()  # models and mapped files that refer to themselves


def _preserve_python(stack: ExitStack) -> None:
    """What libraries change in Python itself when they are first used."""
    if multiprocessing.get_start_method(allow_none=True) is None:
        stack.callback(multiprocessing.set_start_method, None, force=True)
    stack.callback(sys.path.__setitem__, slice(None), sys.path[:])
    stack.callback(sys.setrecursionlimit, sys.getrecursionlimit())


def _free(error: BaseException | None) -> None:
    """Free what the frames of ``error`` hold, which a notebook would keep with its last traceback: models, and a GPU's memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _preserve_generators(stack: ExitStack) -> None:
    """PyTorch's generators of the CPU and of all GPUs."""
    if torch.cuda.is_initialized():
        stack.callback(torch.cuda.set_device, torch.cuda.current_device())
        for generator in torch.cuda.default_generators:
            stack.callback(generator.set_state, generator.get_state())
    else:  # a seed waits until a GPU is used, if one ever is
        stack.callback(torch.cuda.manual_seed_all, torch.initial_seed())
    stack.callback(torch.set_rng_state, torch.get_rng_state())


def _preserve_numerics(stack: ExitStack) -> None:
    """How PyTorch computes, which is as in a new process from here on."""
    _preserve_precision(stack)
    _preserve_attribute(stack, torch.utils.deterministic, "fill_uninitialized_memory")
    _preserve_attribute(stack, torch.backends.cudnn, "benchmark")
    stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_default_dtype(torch.float32)
    if torch.get_default_device().type != "cpu":
        stack.enter_context(torch.device("cpu"))  # not set_default_device, which fails in a block of another device
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.enable_grad())
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))


def _preserve_precision(stack: ExitStack) -> None:
    """Precision of fp32 products, by the older interface and by the newer one that PyTorch 2.9 brought."""
    backends: Any = torch.backends
    for backend in (backends.cuda.matmul, backends.mkldnn.matmul):
        _preserve_attribute(stack, backend, "fp32_precision")
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the two interfaces contradict each other, where only the newer one was used
        before = "highest"
    stack.callback(torch.set_float32_matmul_precision, before)


def _preserve_attribute(stack: ExitStack, module: Any, name: str) -> None:
    stack.callback(setattr, module, name, getattr(module, name))
