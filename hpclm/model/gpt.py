"""A GPT as a list of layers that an engine builds and runs.

T tokens in a sequence, t = T / tp of them on this process between layers, B sequences in a micro-batch, C hidden width, V
padded vocabulary. Activations are [t, B, C].
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpclm.config import EngineConfig, ModelConfig
from hpclm.config.model import BLOCKS
from hpclm.model.attention import Attention
from hpclm.model.draw import Initial, Part
from hpclm.model.layers import Norm, TokenTable, dropout
from hpclm.model.mlp import MLP
from hpclm.model.position import Layout, sinusoids
from hpclm.parallel.collectives import share
from hpclm.parallel.form import Form
from hpclm.parallel.mesh import ALONE, Axis
from hpclm.registry import lookup


@dataclass(frozen=True)
class LayerSpec:
    """How to build one layer. Specs with the same ``name`` are one module; ``call`` says how this one uses it."""

    name: str
    module: Callable[..., nn.Module]
    kwargs: dict[str, Any] = field(default_factory=dict)
    call: Callable[[nn.Module, Any, Layout], Any] | None = None  # None: module(x, layout)
    recompute: bool = False
    number: int = 0
    """Its place among all layers of the model; dropout follows from it."""
    late: bool = False
    """Whether its weights may be filled after it is built: its modules are ours and know their values (model.draw)."""

    def build(self) -> nn.Module:
        """The layer: on the meta device, as shapes that are filled later, or where that cannot be, whole on the CPU."""
        with torch.device("meta" if self.late else "cpu"):
            return self.module(**self.kwargs)


class Head(NamedTuple):
    """What the model gives: the last activations, and the rows that turn them into logits."""

    hidden: Tensor  # [t, B, C]
    weight: Tensor  # [V / tp, C], fp32
    vocab_size: int  # rows that stand for a token; the others are padding
    tp: Axis = ALONE

    def logits(self) -> Tensor:
        """[B, T, vocabulary] in the compute type; for a model that one process holds."""
        rows = self.weight[: self.vocab_size].to(self.hidden.dtype)
        return F.linear(self.hidden, rows).transpose(0, 1)


def layers(
    config: ModelConfig, engine: EngineConfig, dtype: torch.dtype, seed: int, tp: Axis = ALONE
) -> list[LayerSpec]:
    """The model, first to last, split over ``tp``; activations are of type ``dtype``, initial weights follow from ``seed``."""
    block = lookup("model.block", config.block, BLOCKS)
    table = dict(config=config, dtype=dtype)
    recompute_core = engine.recompute == "selective"

    def draw(index: int) -> dict[str, Any]:
        return dict(seed=seed * 100_003 + index, tp=tp)

    specs = [
        LayerSpec("tokens", _seeded, dict(module=TokenTable, **table, **draw(0)), call=_embed),
        LayerSpec("entry", _seeded, dict(module=Entry, config=config, **draw(1))),
    ]
    for index in range(config.layers):
        kwargs = dict(module=block, config=config, recompute_core=recompute_core, **draw(3 + index))
        specs.append(LayerSpec(f"block{index}", _seeded, kwargs, recompute=engine.recompute == "full"))
    specs.append(LayerSpec("norm", Norm, dict(config=config, width=config.hidden, tp=tp), call=_plain))
    output = "tokens" if config.tied else "output"
    specs.append(
        LayerSpec(output, _seeded, dict(module=TokenTable, **table, **draw(0 if config.tied else 2)), call=_head)
    )
    own = config.block not in BLOCKS  # a block of the user's may set its weights as it likes
    return [
        replace(spec, number=number, late=not (own and spec.name.startswith("block")))
        for number, spec in enumerate(specs)
    ]


def random(config: ModelConfig) -> bool:
    """Whether something random happens in training: dropout, or a block that is not ours to know."""
    return bool(config.dropout or config.attention_dropout or config.block not in BLOCKS)


def _seeded(module: Callable[..., nn.Module], seed: int, **kwargs: Any) -> nn.Module:
    return module(**kwargs, generator=torch.Generator().manual_seed(seed))


def _embed(table: nn.Module, ids: Tensor, _: Layout) -> Tensor:
    return table(ids)


def _plain(module: nn.Module, x: Tensor, _: Layout) -> Tensor:
    return module(x)


def _head(table: nn.Module, x: Tensor, _: Layout) -> Head:
    assert isinstance(table, TokenTable)
    return Head(x, table.weight, table.vocab_size, table.tp)


class Entry(Part):
    """Positions, the embedding's norm and dropout: [t, B, C] -> [t, B, C]."""

    def __init__(self, config: ModelConfig, generator: torch.Generator, tp: Axis):
        super().__init__(tp)
        self.dropout = config.dropout
        learned = config.positions == "learned"
        form = Form((config.context, config.hidden))
        self.table = self.held("table", Initial.normal(form, config.init_std, generator)) if learned else None
        fixed = sinusoids(config.context, config.hidden) if config.positions == "sinusoidal" else None
        self.fixed: Tensor | None
        self.register_buffer("fixed", fixed, persistent=False)
        self.norm = Norm(config, config.hidden, tp) if config.embed_norm else None

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """[t, B, C] -> [t, B, C]."""
        table = self.fixed if self.table is None else share(self.table, self.tp)
        if table is not None:
            mine = slice(self.tp.rank * len(x), (self.tp.rank + 1) * len(x))
            where = table[mine, None] if layout.positions is None else F.embedding(layout.positions.t()[mine], table)
            x = x + where.to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        return dropout(x, self.dropout, self.training)


class Block(nn.Module):
    """Attention and MLP, each normalised on the way in and added on the way out: [t, B, C] -> [t, B, C]."""

    def __init__(self, config: ModelConfig, recompute_core: bool, generator: torch.Generator, tp: Axis):
        super().__init__()
        self.dropout = config.dropout
        self.norm1 = Norm(config, config.hidden, tp)
        self.attention = Attention(config, recompute_core, generator, tp)
        self.norm2 = Norm(config, config.hidden, tp)
        self.mlp = MLP(config, generator, tp)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """[t, B, C] -> [t, B, C]."""
        x = x + dropout(self.attention(self.norm1(x), layout), self.dropout, self.training)
        return x + dropout(self.mlp(self.norm2(x)), self.dropout, self.training)
