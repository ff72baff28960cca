"""User-defined blocks, model.block=package.module:Name: requirements for training, saving and resuming with every engine and layout.

| a block | is |
|---|---|
| has a weight that only some micro-batches or replicas use | trained: elsewhere its gradient is 0 |
| has a weight without dimensions, or one under two names | refused as it is built |
| registers a hook on the gradient of a weight | refused as it is built: engines replace weights |
| changes a buffer or an attribute in training | refused in the second step: a checkpoint has only weights |
"""

import hashlib
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hpclm.base.errors import ConfigError

HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)


class _NoGradientHooks(TorchFunctionMode):
    """Inside this context, registering a hook on a tensor's gradient raises ConfigError."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOOKS:
            raise ConfigError(
                f"{self.name} registers a hook on the gradient of a weight, which engines lose when they replace the weight; "
                "change the gradient where the weight is used, such as weight * kept + weight.detach() * (1 - kept)"
            )
        return func(*args, **(kwargs or {}))


def build_own_block(module: Callable[..., nn.Module], name: str, seed: int, **kwargs: Any) -> nn.Module:
    """Build the block called ``name`` with seeded random numbers; ConfigError if some engine could not train it."""
    # only the CPU's generator: blocks are built there. PyTorch modules such as nn.Linear take no generator
    with torch.random.fork_rng(devices=[]), _NoGradientHooks(name):
        torch.manual_seed(seed)
        block = module(**kwargs, generator=torch.Generator().manual_seed(seed))
    problems = list(_unsuitable(name, block))
    if problems:
        raise ConfigError(problems)
    block.hpclm_state = name, {path: _names(module) for path, module in _watched(block)}  # type: ignore[assignment]
    return block


def _unsuitable(name: str, block: nn.Module) -> Iterator[str]:
    """The weights of a new block that some engine could not train."""
    names: dict[nn.Parameter, str] = {}
    for path, weight in block.named_parameters(name, remove_duplicate=False):
        # hpclm_name is set below; a weight that has it belongs to an earlier block of this process too
        other = names.get(weight) or vars(weight).get("hpclm_name")
        if other:
            yield f"{other} and {path} are the same weight; the constructor of model.block must create every weight, under one name"
            continue
        names[weight] = path
        if weight.dtype != torch.float32:
            yield f"{path} is {weight.dtype}; weights are fp32: use {path.rpartition('.')[2]}.to(x.dtype) where the block computes"
        if not weight.ndim:
            yield f"{path} has no dimension, so no engine can divide it; make it a vector, such as torch.ones(1)"
    for weight, path in names.items():
        weight.hpclm_name = path  # type: ignore[attr-defined]


class _EveryWeight(torch.autograd.Function):
    """Returns the first argument unchanged; the others, which are weights, get a gradient of 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.like = [(weight.shape, weight.new_zeros(())) for weight in weights]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # a copy: PyTorch may keep it as a weight's gradient, and DeepSpeed receives the next one into the same memory
        return gradient.clone(), *(zero.expand(shape) for shape, zero in ctx.like)


def use_every_weight(layer: nn.Module) -> None:
    """Give every trained weight of a user's block a gradient in every backward pass, 0 if unused, in a fixed order. Otherwise, libraries that
    send gradients as they arrive would wait for other replicas, or add gradients of different weights."""

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x, *others = arguments
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        if not trained or not torch.is_grad_enabled():
            return None
        # applied to the input, and so the last node of the block's backward pass: when it has run, all gradients are complete
        return _EveryWeight.apply(x, *trained), *others

    if is_own(layer):
        layer.register_forward_pre_hook(hook)


def is_own(layer: nn.Module) -> bool:
    """True for a user-defined block."""
    return "hpclm_state" in vars(layer)


class KeptValues(ABC):
    """Values that a user's code keeps and no checkpoint has; a resumed run would lack them."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        """Values by name, after the first step."""

    @abstractmethod
    def current(self) -> dict[str, Any]:
        """The values now, by name, for comparison."""

    def begin(self) -> None:
        """Record the values after the first step, when constants have been computed."""
        self.values = self.current()

    def changed(self) -> list[str]:
        """Names of values that have changed since the first step."""
        now = self.current()
        return sorted(name for name in now.keys() & self.values if _differ(self.values[name], now[name]))


class BlockState(KeptValues):
    """State that user-defined blocks keep besides weights."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.blocks = [module for module in model.modules() if is_own(module)]

    def current(self) -> dict[str, Any]:
        """Buffers, and attributes that may be state, by name."""
        values = {}
        for block in self.blocks:
            name, begun = block.hpclm_state  # type: ignore[misc]
            transient = getattr(block, "transient", ())
            for path, module in _watched(block):
                for key in _names(module):
                    value = getattr(module, key, None)
                    place = f"{path}.{key}".removeprefix(".")
                    # libraries add attributes of other kinds than tensors
                    watched = isinstance(value, Tensor) or key in begun.get(path, ())
                    if watched and not any(f"{place}.".startswith(f"{left}.") for left in transient):
                        values[f"{name}.{place}"] = comparable(value)
        return values


def _watched(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a block except those of hpclm, with their paths."""
    return ((path, m) for path, m in block.named_modules() if not type(m).__module__.startswith("hpclm."))


def _names(module: nn.Module) -> set[str]:
    """The names of a module's attributes and buffers."""
    return (vars(module).keys() - vars(nn.Module()).keys()) | dict(module.named_buffers(recurse=False)).keys()


def comparable(value: Any, saved: Container[int] = ()) -> Any:
    """A representation of ``value`` for comparison; None for activations, for objects that are not state, and for those whose ids are
    ``saved``."""
    if id(value) in saved:
        return None
    if isinstance(value, torch.optim.Optimizer):
        value = [value.state, value.param_groups]
    if isinstance(value, Tensor):
        if value.requires_grad:
            return None
        return _digest(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    if isinstance(value, torch.Generator):
        return _digest(value.get_state().numpy())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, np.ndarray):
        return _digest(value)
    if isinstance(value, dict):
        named = {id(key) if isinstance(key, Tensor) else repr(key): entry for key, entry in value.items()}
        return {name: comparable(entry, saved) for name, entry in named.items()}
    if isinstance(value, (list, tuple, deque)):
        return [comparable(entry, saved) for entry in value]
    if isinstance(value, (bool, int, float, set)):
        return repr(value)
    return None


def _differ(before: Any, now: Any) -> bool:
    """Whether a value has changed; a dictionary may gain entries, as a cache does."""
    if isinstance(before, dict) and isinstance(now, dict):
        return any(_differ(before[key], now[key]) for key in before.keys() & now.keys())
    return bool(before != now)


def _digest(values: Any) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).hexdigest()
