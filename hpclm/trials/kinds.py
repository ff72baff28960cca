"""Recognise the kind of a user's object (block, optimizer, data source, ...) by its base class and parameters."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hpclm.base.errors import ConfigError
from hpclm.base.registry import OWN, lookup
from hpclm.trials.verdict import SETTINGS

PARAMETERS = {
    ("data", "context", "seed", "vocab_size"): "source",
    ("position", "length", "optim"): "schedule",
    ("weights", "optim"): "optimizer",
}
"""Parameters of a function, by position -> its kind."""
METHODS = {
    ("train_step", "evaluate", "tensors", "scalars", "load"): "engine",
    ("encode", "encode_batch", "decode"): "tokenizer",
    ("send", "close"): "sink",
}
"""Methods of a class -> its kind."""


def load(name: str) -> Any:
    """Load the object ``name``, module:attribute; ConfigError if it does not exist."""
    if not OWN.fullmatch(name):
        raise ConfigError(f"{name!r} is not module:attribute, such as mine:Block for the class Block of mine.py")
    return lookup("code", name, {}, lambda _: None)


def kind_of(name: str, loaded: Any) -> str:
    """The kind of ``loaded``, the object ``name``; ConfigError if it fits several kinds, or none."""
    if inspect.isclass(loaded):
        if issubclass(loaded, torch.optim.Optimizer):
            return "optimizer"
        kinds = [kind for methods, kind in METHODS.items() if all(callable(getattr(loaded, m, None)) for m in methods)]
        if kinds:
            return kinds[0]
        if issubclass(loaded, nn.Module):
            return "block"
    names = _required(loaded) if callable(loaded) else ()
    for parameters, kind in PARAMETERS.items():
        if names[: len(parameters)] == parameters:
            return kind
    same_length = [kind for parameters, kind in PARAMETERS.items() if len(parameters) == len(names)]
    if len(same_length) == 1:
        return same_length[0]
    raise ConfigError(
        f"{name} is not a block (torch.nn.Module), an optimizer (torch.optim.Optimizer), an engine, a tokenizer, a sink, or a function "
        f"for data.source or optim.schedule; give its kind with --kind {'|'.join(SETTINGS)}, and see hpclm docs your-own-code"
    )


def _required(function: Any) -> Sequence[str]:
    """The names of the required arguments of ``function``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD,)
    )
