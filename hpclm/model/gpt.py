"""A GPT: embedding, blocks, norm, head. The engine gets them as a list of layers.

T tokens in a sequence, t = T / tp of them on this process between layers, B sequences in a micro-batch, C hidden size, V
padded vocabulary size. Activations are [t, B, C].
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpclm.base.registry import class_check, lookup
from hpclm.config import EngineConfig, ModelConfig
from hpclm.config.layer import DenseMLP, Layer
from hpclm.config.model import BLOCKS
from hpclm.model import head, own_block, weights
from hpclm.model.attention.latent import LatentAttention
from hpclm.model.attention.layer import Attention
from hpclm.model.context import LayerContext
from hpclm.model.dropout import dropout
from hpclm.model.expert_mlp import ExpertAxes, ExpertMLP
from hpclm.model.head import LogitShape
from hpclm.model.init import TensorParallelModule
from hpclm.model.layers import MLP, Norm, VocabParallelEmbedding
from hpclm.model.position import POSITIONS
from hpclm.model.spec import LayerSpec
from hpclm.parallel.mesh import SINGLE, Axis

CHECK = class_check("forward", made_with=("config", "recompute_core", "generator", "tp"), named=True, base=nn.Module)


class InputEmbedding(TensorParallelModule):
    """Position embeddings, embedding norm and dropout: [t, B, C] -> [t, B, C]."""

    def __init__(self, config: ModelConfig, generator: torch.Generator, tp: Axis):
        super().__init__(tp)
        self.dropout = config.dropout
        table = weights.entry(config)
        self.table = self.optional(table, "table", generator)
        self.fixed: Tensor | None
        fixed = POSITIONS[config.positions].table
        self.register_buffer("fixed", fixed and fixed(config.context, config.hidden), persistent=False)
        norm = table.parts.get("norm")
        self.norm = Norm(config, norm, tp) if norm else None

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[t, B, C] -> [t, B, C]."""
        table = self.fixed if self.table is None else self.replicated(self.table)
        if table is not None:
            mine = slice(self.tp.rank * len(x), (self.tp.rank + 1) * len(x))
            positions = context.positions
            rows = table[mine, None] if positions is None else F.embedding(positions.t()[mine], table)
            # added in the compute type; the fp32 table would promote the whole residual stream to fp32
            x = x + rows.to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        return dropout(x, self.dropout if self.training else 0.0, context.keys, 0, self.tp.rank, context.part)


class Block(nn.Module):
    """A transformer block, attention and MLP with residual connections: [t, B, C] -> [t, B, C]."""

    def __init__(
        self,
        config: ModelConfig,
        recompute_core: bool,
        generator: torch.Generator,
        tp: Axis,
        layer: Layer | None = None,
        axes: ExpertAxes = ExpertAxes(),  # noqa: B008
    ):
        """``layer``: the block to build; None: the first one of ``config``. ``axes``: the mesh axes of the MLP's experts."""
        super().__init__()
        layer = layer or config.blocks[0]
        table = weights.block(config, layer, axes.split, axes.ep.size)
        self.dropout = config.dropout
        self.rank = tp.rank
        self.multiplier = config.residual_multiplier

        def norm(name: str) -> Norm | None:
            return Norm(config, table.parts[name], tp) if name in table.parts else None

        self.norm1 = norm("norm1")
        mixer = LatentAttention if layer.mixer.latent.kv_rank else Attention
        self.attention = mixer(config, layer.mixer, table.parts["attention"], recompute_core, generator, tp)
        self.post_norm1 = norm("post_norm1")
        self.norm2 = norm("norm2")
        self.mlp: MLP | ExpertMLP
        if isinstance(layer.mlp, DenseMLP):
            self.mlp = MLP(config, table.parts["mlp"], generator, tp)
        else:
            self.mlp = ExpertMLP(config, layer.mlp, table.parts["mlp"], generator, tp, axes)
        self.post_norm2 = norm("post_norm2")

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[t, B, C] -> [t, B, C]."""
        y = self.attention(x if self.norm1 is None else self.norm1(x), context)
        x = self._add(x, y, self.post_norm1, context, 0)
        y = x if self.norm2 is None else self.norm2(x)
        y = self.mlp(y, context) if isinstance(self.mlp, ExpertMLP) else self.mlp(y)
        return self._add(x, y, self.post_norm2, context, 1)

    def _add(self, x: Tensor, y: Tensor, norm: Norm | None, context: LayerContext, site: int) -> Tensor:
        y = y if norm is None else norm(y)
        keys = context.keys
        part = context.part
        y = dropout(y, self.dropout if self.training else 0.0, keys, site, self.rank, part)
        return x + (y if self.multiplier == 1.0 else y * self.multiplier)


def layers(
    config: ModelConfig,
    engine: EngineConfig,
    dtype: torch.dtype,
    seed: int,
    tp: Axis = SINGLE,
    axes: ExpertAxes = ExpertAxes(),  # noqa: B008
) -> list[LayerSpec]:
    """The layers in order, split over ``tp``, and experts over ``axes``. Activations have type ``dtype``; initial weights depend on
    ``seed``."""

    def made(module: Callable[..., nn.Module], number: int, **kwargs: Any) -> dict[str, Any]:
        # 100,003 is prime, so layers of neighbouring seeds share no stream. The numbers must not change: they determine
        # the initial weights of every run with this seed
        return dict(module=module, config=config, tp=tp, seed=seed * 100_003 + number, **kwargs)

    tokens = made(VocabParallelEmbedding, 0, dtype=dtype)
    norm = dict(config=config, table=weights.norm(config, config.hidden), tp=tp)
    shape = LogitShape(config.logit_multiplier, config.logit_cap, config.logits_fp32)
    if config.tied:
        output = LayerSpec("tokens", _seeded, tokens, call=partial(head.tied_output, shape=shape))
    else:
        untied = made(VocabParallelEmbedding, 2, dtype=dtype, use="output")
        output = LayerSpec("output", _seeded, untied, call=partial(head.output, shape=shape))
    specs = [
        LayerSpec("tokens", _seeded, tokens, call=_without_context),
        LayerSpec("entry", _seeded, made(InputEmbedding, 1)),
        *_blocks(config, engine, made, axes),
        LayerSpec("norm", Norm, norm, call=_without_context),
        output,
    ]
    return [replace(spec, number=number) for number, spec in enumerate(specs)]


def _blocks(
    config: ModelConfig, engine: EngineConfig, made: Callable[..., dict[str, Any]], axes: ExpertAxes
) -> Iterator[LayerSpec]:
    module = lookup("model.block", config.block, BLOCKS, CHECK)
    for number, layer in enumerate(config.blocks):
        name = f"block{number}"
        # the embeddings and the output, tied or not, have the numbers before 3: blocks are initialised equally in both cases
        kwargs = made(module, 3 + number, recompute_core=engine.recompute == "selective")
        recompute = engine.recompute == "full"
        if config.block in BLOCKS:
            kwargs |= dict(layer=layer, axes=axes)
            yield LayerSpec(name, _seeded, kwargs, recompute=recompute, layer=layer)
        else:  # it initialises its own weights
            build = partial(own_block.build_own_block, name=name)
            yield LayerSpec(name, build, kwargs, recompute=recompute, layer=layer, on_meta=False)


def _seeded(module: Callable[..., nn.Module], seed: int, **kwargs: Any) -> nn.Module:
    return module(**kwargs, generator=torch.Generator().manual_seed(seed))


def _without_context(module: nn.Module, x: Tensor, _: LayerContext) -> Any:
    return module(x)


def check_blocks(specs: Sequence[LayerSpec]) -> None:
    """ConfigError if user-defined blocks are unsuitable. Builds two blocks, because a weight that two blocks share is noticed
    only then, and a pipeline stage may have a single block."""
    for spec in specs:
        if spec.name in ("block0", "block1"):
            spec.build()


def random(config: ModelConfig) -> bool:
    """Whether training uses random numbers: dropout, or a user-defined block that may."""
    return bool(config.dropout or config.attention.dropout or config.block not in BLOCKS)
