"""A checkpoint of Megatron's as a run directory."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hpclm.config import ModelConfig
from hpclm.errors import ConfigError
from hpclm.interop import run
from hpclm.interop.megatron.layout import State, read
from hpclm.interop.megatron.names import ours
from hpclm.interop.megatron.settings import settings, swapped
from hpclm.interop.rules import forms, same, table
from hpclm.interop.target import fresh
from hpclm.parallel.form import Form

log = logging.getLogger(__name__)
TABLES = ("tokens.weight", "output.weight")


class Merged:
    """The weights of a checkpoint under our names, the parts of the tensor ranks put together."""

    def __init__(self, state: State, config: ModelConfig):
        self.state, self.config, self.forms = state, config, forms(config)
        self._names = {ours(name): name for name in state.parts}
        if config.tied:  # a last stage has the token table again
            self._names.pop("output.weight", None)

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._names)

    def read(self, name: str) -> Tensor:
        """One of them; a token table without its padding."""
        parts = self.state.parts[self._names[name]]
        if ".qkv." in name:
            parts = [reordered(part, self.state.version, self.config) for part in parts]
        whole = merged(parts, self.forms[name], swapped(self.state.args))
        if name in TABLES and len(whole) < self.config.vocab_size:
            raise ConfigError(
                f"{self._names[name]} has {len(whole)} rows, and model.vocab_size is {self.config.vocab_size}"
            )
        return whole[: self.config.vocab_size] if name in TABLES else whole


def merged(parts: Sequence[Tensor], form: Form, swap: bool = False) -> Tensor:
    """A tensor of the parts that the tensor ranks have of it; ``swap``: of two blocks the second comes first."""
    if form.dim is None or (len(parts) == 1 and not (swap and form.parts == 2)):
        return parts[0]
    blocks = [part.chunk(form.parts, form.dim) for part in parts]
    order = reversed(range(form.parts)) if swap else range(form.parts)
    return torch.cat([block[number] for number in order for block in blocks], form.dim)


def reordered(x: Tensor, version: float, config: ModelConfig) -> Tensor:
    """A rank's fused projection in today's order, heads x (q, k, v) x D: version 0 has the three first, version 1 last."""
    width = config.head_width
    if version >= 2:
        return x
    if config.groups != config.heads:
        raise ConfigError(
            f"checkpoint version {version} knows no grouped queries, and model.kv_heads={config.kv_heads}"
        )
    if version == 0:
        return x.unflatten(0, (3, -1, width)).transpose(0, 1).flatten(0, 2)
    if version == 1:
        return x.unflatten(0, (-1, width, 3)).transpose(1, 2).flatten(0, 2)
    raise ConfigError(f"checkpoint version {version} is not known here; 0, 1, 2 and 3 are")


def convert(folder: Path, target: Path, words: list[str]) -> ModelConfig:
    """Make the run directory ``target`` from the checkpoint in ``folder``; ``words``: model.… settings it does not say.

    ConfigError where hpclm has no such network, or settings and weights do not fit together.
    """
    state = read(folder)
    if state.unread:
        log.warning("the settings in the checkpoint are not used: %s", state.unread)
    if state.args is None and not words:
        raise ConfigError(
            f"{folder} does not say the network's settings; give them: model.layers=… model.hidden=… model.heads=… and what "
            "else differs from hpclm's defaults"
        )
    try:
        config = run.network({} if state.args is None else settings(state.args), words)
    except ConfigError as error:
        raise ConfigError([f"{folder}: {line}" for line in error.problems]) from None
    if not any(word.startswith("model.vocab_size=") for word in words):
        log.warning(
            "model.vocab_size=%d is what the checkpoint says; where rows of its table are padding, give the tokenizer's size",
            config.vocab_size,
        )
    source = Merged(state, config)
    rules = [table(name, name, config) if name in TABLES else same(name, name) for name in source.forms]
    weights = run.Weights(config, source, rules, str(folder))
    with fresh(target, mode=0o700) as draft:
        run.save(draft, target, config, {}, weights)
    return config
