"""A GPT as a list of layers that an engine builds and runs.

T tokens in a sequence, B sequences in a micro-batch, C hidden width, V padded vocabulary. Activations are [T, B, C].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpclm.config import EngineConfig, ModelConfig
from hpclm.config.model import BLOCKS
from hpclm.errors import ConfigError
from hpclm.model.attention import Attention
from hpclm.model.layers import Norm, TokenTable, dropout, normal
from hpclm.model.mlp import MLP
from hpclm.model.position import Layout, layout, sinusoids
from hpclm.registry import lookup


@dataclass(frozen=True)
class LayerSpec:
    """How to build one layer. Specs with the same ``name`` are one module; ``call`` says how this one uses it."""

    name: str
    module: Callable[..., nn.Module]
    kwargs: dict[str, Any] = field(default_factory=dict)
    call: Callable[[nn.Module, Any, Layout], Any] | None = None  # None: module(x, layout)
    recompute: bool = False


class Head(NamedTuple):
    """What the model gives: the last activations, and the rows that turn them into logits."""

    hidden: Tensor  # [T, B, C]
    weight: Tensor  # [V, C], fp32
    vocab_size: int  # rows that stand for a token; the others are padding

    def logits(self) -> Tensor:
        """[B, T, vocabulary] in the compute type."""
        rows = self.weight[: self.vocab_size].to(self.hidden.dtype)
        return F.linear(self.hidden, rows).transpose(0, 1)


def layers(config: ModelConfig, engine: EngineConfig, dtype: torch.dtype, seed: int) -> list[LayerSpec]:
    """The model, first to last; activations are of type ``dtype``, initial weights follow from ``seed``."""
    block = lookup("model.block", config.block, BLOCKS)
    table = dict(config=config, dtype=dtype)
    recompute_core = engine.recompute == "selective"

    def draw(index: int) -> dict[str, Any]:
        return dict(seed=seed * 100_003 + index)

    specs = [
        LayerSpec("tokens", _seeded, dict(module=TokenTable, **table, **draw(0)), call=_embed),
        LayerSpec("entry", _seeded, dict(module=Entry, config=config, **draw(1))),
    ]
    for index in range(config.layers):
        kwargs = dict(module=block, config=config, recompute_core=recompute_core, **draw(3 + index))
        specs.append(LayerSpec(f"block{index}", _seeded, kwargs, recompute=engine.recompute == "full"))
    specs.append(LayerSpec("norm", Norm, dict(config=config, width=config.hidden), call=_plain))
    output = "tokens" if config.tied else "output"
    specs.append(
        LayerSpec(output, _seeded, dict(module=TokenTable, **table, **draw(0 if config.tied else 2)), call=_head)
    )
    return specs


def _seeded(module: Callable[..., nn.Module], seed: int, **kwargs: Any) -> nn.Module:
    return module(**kwargs, generator=torch.Generator().manual_seed(seed))


def _embed(table: nn.Module, ids: Tensor, _: Layout) -> Tensor:
    return table(ids)


def _plain(module: nn.Module, x: Tensor, _: Layout) -> Tensor:
    return module(x)


def _head(table: nn.Module, x: Tensor, _: Layout) -> Head:
    assert isinstance(table, TokenTable)
    return Head(x, table.weight, table.vocab_size)


class Entry(nn.Module):
    """Positions, the embedding's norm and dropout: [T, B, C] -> [T, B, C]."""

    def __init__(self, config: ModelConfig, generator: torch.Generator):
        super().__init__()
        self.dropout = config.dropout
        learned = config.positions == "learned"
        self.table = normal((config.context, config.hidden), config.init_std, generator) if learned else None
        fixed = sinusoids(config.context, config.hidden) if config.positions == "sinusoidal" else None
        self.fixed: Tensor | None
        self.register_buffer("fixed", fixed, persistent=False)
        self.norm = Norm(config, config.hidden) if config.embed_norm else None

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """[T, B, C] -> [T, B, C]."""
        table = self.fixed if self.table is None else self.table
        if table is not None:
            where = table[: len(x), None] if layout.positions is None else F.embedding(layout.positions.t(), table)
            x = x + where.to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        return dropout(x, self.dropout, self.training)


class Block(nn.Module):
    """Attention and MLP, each normalised on the way in and added on the way out: [T, B, C] -> [T, B, C]."""

    def __init__(self, config: ModelConfig, recompute_core: bool, generator: torch.Generator):
        super().__init__()
        self.dropout = config.dropout
        self.norm1 = Norm(config, config.hidden)
        self.attention = Attention(config, recompute_core, generator)
        self.norm2 = Norm(config, config.hidden)
        self.mlp = MLP(config, generator)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """[T, B, C] -> [T, B, C]."""
        x = x + dropout(self.attention(self.norm1(x), layout), self.dropout, self.training)
        return x + dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class Stack(nn.Module):
    """All layers in one process."""

    def __init__(self, config: ModelConfig, specs: list[LayerSpec], recompute_every: int = 1):
        super().__init__()
        self.config, self.specs, self.recompute_every = config, specs, recompute_every
        self.layers = nn.ModuleDict()
        for spec in specs:
            if spec.name not in self.layers:
                self.layers[spec.name] = spec.module(**spec.kwargs)

    def forward(self, ids: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Head:
        """[B, T] ids, and optionally positions and document numbers [B, T] -> the model's head."""
        table = self.layers["tokens"]
        assert isinstance(table, TokenTable)
        where = layout(self.config, ids, table.dtype, positions, documents)
        x: Any = ids
        for together in self._groups():
            if together[0].recompute and self.training and torch.is_grad_enabled():
                x = checkpoint(self._run, together, x, where, use_reentrant=False)
            else:
                x = self._run(together, x, where)
        return x

    def weights(self) -> list[tuple[str, nn.Parameter]]:
        """Every parameter under its logical name, such as block0.attention.qkv.weight; a shared one once."""
        return [(name.removeprefix("layers."), p) for name, p in self.named_parameters()]

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over all weights by logical name; ConfigError names what is missing, left over or of another shape."""
        mine = dict(self.weights())
        shapes = {name: tuple(p.shape) for name, p in mine.items()}
        given = {name: tuple(t.shape) for name, t in tensors.items()}
        wrong = sorted(name for name in shapes.keys() | given.keys() if shapes.get(name) != given.get(name))
        if wrong:
            raise ConfigError(
                [f"weight {name} is {given.get(name)} there and {shapes.get(name)} here" for name in wrong[:10]]
            )
        for name, parameter in mine.items():
            parameter.copy_(tensors[name])

    def _run(self, specs: list[LayerSpec], x: Any, where: Layout) -> Any:
        for spec in specs:
            module = self.layers[spec.name]
            x = module(x, where) if spec.call is None else spec.call(module, x, where)
        return x

    def _groups(self) -> list[list[LayerSpec]]:
        """Neighbouring layers that are forgotten together, ``recompute_every`` at most; any other layer alone."""
        groups: list[list[LayerSpec]] = []
        for spec in self.specs:
            full = bool(groups) and (len(groups[-1]) == self.recompute_every or not groups[-1][0].recompute)
            if groups and spec.recompute and not full:
                groups[-1].append(spec)
            else:
                groups.append([spec])
        return groups
