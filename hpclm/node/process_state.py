"""Undo changes to the state of a process that uses hpclm as a library, when the call returns."""

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
"""The functions to call when the outermost ``preserved`` block ends."""


def undo_later(undo: Callable[[], object]) -> None:
    """Call ``undo`` when the outermost ``preserved`` block ends; without one, when the process exits."""
    stack = UNDO.get()
    if stack is None:
        atexit.register(undo)
    else:
        stack.callback(undo)


def change(module: Any, name: str, value: object) -> None:
    """Set an attribute of a library's module until ``undo_later`` restores it."""
    before = getattr(module, name)
    if before != value:
        undo_later(partial(setattr, module, name, before))
        setattr(module, name, value)


@contextmanager
def preserved() -> Iterator[None]:
    """Run the block with the state of a new process, and restore this process's state, however the block ends.

    The state is random generators, numeric settings of PyTorch and NumPy, the environment and warning filters. Memory and open
    files of a run are freed.
    """
    with ExitStack() as stack:
        stack.enter_context(environment.preserved())
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        _preserve_python(stack)
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
            gc.collect()  # models and mapped files may be in reference cycles


def _preserve_python(stack: ExitStack) -> None:
    """Restore, when ``stack`` closes, the settings of Python that libraries change at their first use."""
    if multiprocessing.get_start_method(allow_none=True) is None:
        stack.callback(multiprocessing.set_start_method, None, force=True)
    stack.callback(sys.path.__setitem__, slice(None), sys.path[:])
    stack.callback(sys.setrecursionlimit, sys.getrecursionlimit())


def _preserve_generators(stack: ExitStack) -> None:
    """Restore, when ``stack`` closes, the random generators of Python, NumPy and PyTorch, on the CPU and all GPUs."""
    stack.callback(random.setstate, random.getstate())
    stack.callback(np.random.set_state, np.random.get_state())
    if torch.cuda.is_initialized():
        stack.callback(torch.cuda.set_device, torch.cuda.current_device())
        for generator in torch.cuda.default_generators:
            stack.callback(generator.set_state, generator.get_state())
    else:  # PyTorch keeps a seed until a GPU is used
        stack.callback(torch.cuda.manual_seed_all, torch.initial_seed())
    stack.callback(torch.set_rng_state, torch.get_rng_state())


def _preserve_numerics(stack: ExitStack) -> None:
    """Set PyTorch's numeric settings as in a new process; restore the present ones when ``stack`` closes."""
    backends: Any = torch.backends
    for module, name in (
        (backends.cuda.matmul, "fp32_precision"),
        (backends.mkldnn.matmul, "fp32_precision"),
        (backends.cudnn, "benchmark"),
        (torch.utils.deterministic, "fill_uninitialized_memory"),
    ):
        stack.callback(setattr, module, name, getattr(module, name))
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # raised if the caller has set fp32_precision
        precision = "highest"
    stack.callback(torch.set_float32_matmul_precision, precision)
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


def _free(error: BaseException | None) -> None:
    """Clear the frames of ``error``: a notebook keeps its last traceback, and with it models and GPU memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
