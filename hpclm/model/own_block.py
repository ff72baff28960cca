"""Blocks of the user's own, model.block=package.module:Name: what every engine and layout can train, save and resume.

| a block | is |
|---|---|
| has a weight that only some micro-batches or replicas use | trained: elsewhere its gradient is 0 |
| freezes a weight, has one without dimensions, or one under two names | refused as it is built |
| registers a hook on the gradient of a weight | refused as it is built: engines replace weights |
| changes a buffer or an attribute in training | refused in the second step: a checkpoint has only weights |
"""

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hpclm.errors import ConfigError

MAX_TEXT = 4096  # characters of a list or dictionary that is compared
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


def build(module: Callable[..., nn.Module], name: str, seed: int, **kwargs: Any) -> nn.Module:
    """The block called ``name``, its random numbers seeded; ConfigError if not every engine could train it."""
    # only the CPU's generator: blocks are built there. Modules of PyTorch, such as nn.Linear, take no generator
    with torch.random.fork_rng(devices=[]), _NoGradientHooks(name):
        torch.manual_seed(seed)
        block = module(**kwargs, generator=torch.Generator().manual_seed(seed))
    problems = list(_unsuitable(name, block))
    if problems:
        raise ConfigError(problems)
    usual = vars(nn.Module()).keys()
    # now: libraries add attributes of their own
    kept = {
        path: (*vars(module).keys() - usual, *dict(module.named_buffers(recurse=False)))
        for path, module in block.named_modules()
    }
    block.hpclm_state = name, kept  # type: ignore[assignment]
    return block


def _unsuitable(name: str, block: nn.Module) -> Iterator[str]:
    """The weights of a new block that not every engine can train."""
    names: dict[nn.Parameter, str] = {}
    for path, weight in block.named_parameters(name, remove_duplicate=False):
        # a weight that this process has seen in another block says so
        other = names.get(weight) or vars(weight).get("hpclm_name")
        if other:
            yield f"{other} and {path} are one weight; every weight of model.block must be made anew in its constructor, and have one name"
            continue
        names[weight] = path
        if not weight.requires_grad:
            yield (
                f"{path} does not require a gradient, and engines train all weights; keep fixed values in a buffer, or freeze the weight "
                f"with 'optim.groups=[{{match: {path.removeprefix(name + '.')}, lr: 0}}]'"
            )
        if not weight.ndim:
            yield f"{path} has no dimension, so no engine can divide it; make it a vector, such as torch.ones(1)"
    for weight, path in names.items():
        weight.hpclm_name = path  # type: ignore[attr-defined]


class _EveryWeight(torch.autograd.Function):
    """The first of the arguments; the others, weights, get a gradient of 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        """See torch.autograd.Function."""
        ctx.alike = [(weight.shape, weight.new_zeros(())) for weight in weights]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """See torch.autograd.Function."""
        # a copy: PyTorch may keep what it is given as a weight's gradient, and DeepSpeed receives the next one into the same memory
        return gradient.clone(), *(zero.expand(shape) for shape, zero in ctx.alike)


def use_every_weight(layer: nn.Module) -> None:
    """Give every weight of a user's block a gradient in every backward pass, if only 0, in one order: libraries that send gradients as they
    come would otherwise wait for those of other replicas, or add up gradients of different weights."""

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x, *others = arguments
        if not torch.is_grad_enabled():
            return None
        # of the input, so that this is the last node of the block's backward pass, and all gradients are complete with it
        return _EveryWeight.apply(x, *module.parameters()), *others

    if is_own(layer):
        layer.register_forward_pre_hook(hook)


def is_own(layer: nn.Module) -> bool:
    """True for a block of the user's own."""
    return "hpclm_state" in vars(layer)


class BlockState:
    """What blocks of the user's own keep besides weights, which a resumed run would not have."""

    def __init__(self, model: nn.Module):
        self.blocks = [module for module in model.modules() if is_own(module)]
        self.values: dict[str, Any] = {}
        """By name, after the first step."""

    def begin(self) -> None:
        """After the first step, by which blocks have made what they compute once."""
        self.values = dict(self._current())

    def check(self) -> None:
        """ConfigError if a value is another than after the first step."""
        changed = sorted(name for name, value in self._current() if self.values.get(name, value) != value)
        if changed:
            raise ConfigError(
                f"training changes {', '.join(changed[:4])}, which no checkpoint has and processes do not share: a resumed run would differ. "
                "Keep it as a weight, compute it from the input, or draw from PyTorch's default generator; name in the block's attribute "
                "`transient` what no result depends on; or set checkpoint.enabled=false"
            )

    def _current(self) -> Iterator[tuple[str, Any]]:
        """Buffers, and attributes that may be state, by name."""
        for block in self.blocks:
            name, kept = block.hpclm_state  # type: ignore[misc]
            for path, keys in kept.items():
                module = block.get_submodule(path)
                for key in keys:
                    if key not in getattr(module, "transient", ()):
                        yield ".".join(filter(None, (name, path, key))), _comparable(getattr(module, key, None))


def _comparable(value: Any) -> Any:
    """A value that differs if ``value``, which may be state, does; None for other objects and for activations."""
    if isinstance(value, Tensor):
        return (
            None
            if value.requires_grad
            else _digest(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        )
    if isinstance(value, torch.Generator):
        return _digest(value.get_state().numpy())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, np.ndarray):
        return _digest(value)
    if isinstance(value, (bool, int, float)):
        return repr(value)
    if (
        isinstance(value, (list, tuple, dict, set, deque))
        and len(text := repr(value)) <= MAX_TEXT
        and " at 0x" not in text
    ):
        return text
    return None


def _digest(values: Any) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).hexdigest()
