"""A GPT as a list of layers that an engine builds and runs.

T tokens in a sequence, t = T / tp of them on this process between layers, B sequences in a micro-batch, C hidden size, V
padded vocabulary size. Activations are [t, B, C].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpclm.base.registry import class_check, lookup
from hpclm.config import EngineConfig, ModelConfig
from hpclm.config.model import BLOCKS
from hpclm.model.attention.layer import Attention
from hpclm.model.attention.layout import AttentionMetadata
from hpclm.model.dropout import dropout
from hpclm.model.experts import ExpertAxes, ExpertMLP
from hpclm.model.init import InitSpec, TensorParallelModule
from hpclm.model.layers import MLP, Norm, VocabParallelEmbedding, capped, scaled
from hpclm.model.own_block import build_own_block
from hpclm.model.position import POSITIONS
from hpclm.parallel.mesh import SINGLE, Axis
from hpclm.parallel.placement import Placement

CHECK = class_check("forward", made_with=("config", "recompute_core", "generator", "tp"), named=True, base=nn.Module)


@dataclass(frozen=True)
class LayerSpec:
    """How to build one layer. Specs with the same ``name`` share one module; ``call`` tells how this spec uses it."""

    name: str
    module: Callable[..., nn.Module]
    kwargs: dict[str, Any] = field(default_factory=dict)
    call: Callable[[nn.Module, Any, AttentionMetadata], Any] | None = None  # None: module(x, metadata)
    recompute: bool = False
    number: int = 0
    """Index among all layers of the model; seeds its dropout."""
    kind: str = "full"
    """Kind of its attention, one of LAYER_KINDS (config/model.py)."""
    on_meta: bool = False
    """Whether to build the layer on the meta device and initialise it later, as hpclm's own modules allow (model.init)."""

    def build(self) -> nn.Module:
        """Build the layer, on the meta device if its modules support that, otherwise on the CPU."""
        with torch.device("meta" if self.on_meta else "cpu"):
            return self.module(**self.kwargs)


class LogitShape(NamedTuple):
    """How the product of hidden states and output projection becomes logits."""

    multiplier: float = 1.0
    cap: float | None = None
    fp32: bool = False

    def product(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """[..., C] hidden and [V, C] rows -> [..., V]."""
        return F.linear(hidden.float(), rows.float()) if self.fp32 else F.linear(hidden, rows)

    def of(self, product: Tensor) -> Tensor:
        """The logits for a product."""
        return capped(scaled(product, self.multiplier), self.cap)

    def backward(self, gradient: Tensor, logits: Tensor | None) -> Tensor:
        """The gradient of the product from the gradient of its ``logits``, which are only needed with a cap."""
        if self.cap is not None and logits is not None:
            gradient = gradient * (1 - (logits / self.cap).square())
        return scaled(gradient, self.multiplier)


class Head(NamedTuple):
    """The output of the model: the final activations, and the weight that projects them to logits."""

    hidden: Tensor  # [t, B, C]
    weight: Tensor  # [V / tp, C], fp32, or in the compute type with main_grad
    vocab_size: int  # the remaining rows are padding
    tp: Axis = SINGLE
    cast: Tensor | None = None  # the weight in the compute type, if it has been cast already
    main_grad: Tensor | None = None  # the weight's gradient, if the backward pass accumulates it in place
    shape: LogitShape = LogitShape()

    def rows(self) -> Tensor:
        """[V / tp, C] in the compute type; gradients belong to ``weight``."""
        return self.weight.to(self.hidden.dtype) if self.cast is None else self.cast

    def logits(self) -> Tensor:
        """[B, T, vocabulary] logits in the compute type; without tensor parallelism."""
        return self.shape.of(self.shape.product(self.hidden, self.rows()[: self.vocab_size])).transpose(0, 1)


def layers(
    config: ModelConfig,
    engine: EngineConfig,
    dtype: torch.dtype,
    seed: int,
    tp: Axis = SINGLE,
    axes: ExpertAxes = ExpertAxes(),  # noqa: B008
) -> list[LayerSpec]:
    """The layers, split over ``tp``, and experts over ``axes``. ``dtype``: type of activations. ``seed``: determines initial weights."""
    block = lookup("model.block", config.block, BLOCKS, CHECK)
    table = dict(config=config, dtype=dtype)
    recompute_core = engine.recompute == "selective"

    def init(index: int) -> dict[str, Any]:
        # 100,003 is prime, so layers of neighbouring seeds share no stream. The numbers below must not change: they
        # determine the initial weights of every run with this seed
        return dict(seed=seed * 100_003 + index, tp=tp)

    specs = [
        LayerSpec("tokens", _seeded, dict(module=VocabParallelEmbedding, **table, **init(0)), call=_embed),
        LayerSpec("entry", _seeded, dict(module=InputEmbedding, config=config, **init(1))),
    ]
    for index in range(config.layers):
        # 0 to 2 are the embeddings and the output, tied or not, so that blocks are initialised equally in both cases
        kwargs = dict(module=block, config=config, recompute_core=recompute_core, **init(3 + index))
        if config.experts.in_layer(index):
            kwargs["axes"] = axes
        full = engine.recompute == "full"
        build = _seeded if config.block in BLOCKS else partial(build_own_block, name=f"block{index}")
        specs.append(LayerSpec(f"block{index}", build, kwargs, recompute=full, kind=config.attention.kind(index)))
    specs.append(LayerSpec("norm", Norm, dict(config=config, width=config.hidden, tp=tp), call=_plain))
    name, index, head = ("tokens", 0, _tied_head) if config.tied else ("output", 2, _head)
    shape = LogitShape(config.logit_multiplier, config.logit_cap, config.logits_fp32)
    specs.append(
        LayerSpec(
            name, _seeded, dict(module=VocabParallelEmbedding, **table, **init(index)), call=partial(head, shape=shape)
        )
    )
    custom = config.block not in BLOCKS  # user-defined blocks initialise their own weights
    return [
        # on the meta device, so that every process can list all layers and fill only its own
        replace(spec, number=number, on_meta=not (custom and spec.name.startswith("block")))
        for number, spec in enumerate(specs)
    ]


def check_blocks(specs: Sequence[LayerSpec]) -> None:
    """ConfigError if user-defined blocks are unsuitable. Builds two of them; a pipeline stage alone may build only one."""
    for spec in specs:
        if spec.name in ("block0", "block1"):
            spec.build()


def random(config: ModelConfig) -> bool:
    """Whether training uses random numbers: dropout, or a user-defined block that may."""
    return bool(config.dropout or config.attention.dropout or config.block not in BLOCKS)


def _seeded(module: Callable[..., nn.Module], seed: int, **kwargs: Any) -> nn.Module:
    return module(**kwargs, generator=torch.Generator().manual_seed(seed))


def _embed(table: nn.Module, ids: Tensor, _: AttentionMetadata) -> Tensor:
    return table(ids)


def _plain(module: nn.Module, x: Tensor, _: AttentionMetadata) -> Tensor:
    return module(x)


def _head(table: nn.Module, x: Tensor, _: AttentionMetadata, shape: LogitShape) -> Head:
    assert isinstance(table, VocabParallelEmbedding)
    return Head(x, table.weight, table.vocab_size, table.tp, table.rows, table.main_grads.get("weight"), shape)


def _tied_head(table: nn.Module, x: Tensor, metadata: AttentionMetadata, shape: LogitShape) -> Head:
    head = _head(table, x, metadata, shape)  # if accumulated in place, the input embedding completes the gradient
    return head if head.main_grad is None else head._replace(weight=head.weight.detach())


class InputEmbedding(TensorParallelModule):
    """Position embeddings, embedding norm and dropout: [t, B, C] -> [t, B, C]."""

    def __init__(self, config: ModelConfig, generator: torch.Generator, tp: Axis):
        super().__init__(tp)
        self.dropout = config.dropout
        kind = POSITIONS[config.positions]
        shape = (config.context, config.hidden)
        initial = InitSpec.normal(Placement(shape), config.init_std, generator)
        self.table = self.optional_parameter("table", initial, kind.learned)
        self.fixed: Tensor | None
        self.register_buffer("fixed", kind.table(*shape) if kind.table else None, persistent=False)
        self.norm = Norm(config, config.hidden, tp) if config.embed_norm else None

    def forward(self, x: Tensor, metadata: AttentionMetadata) -> Tensor:
        """[t, B, C] -> [t, B, C]."""
        table = self.fixed if self.table is None else self.replicated(self.table)
        if table is not None:
            mine = slice(self.tp.rank * len(x), (self.tp.rank + 1) * len(x))
            positions = metadata.positions
            rows = table[mine, None] if positions is None else F.embedding(positions.t()[mine], table)
            # added in the compute type; the fp32 table would promote the whole residual stream to fp32
            x = x + rows.to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        if self.training:
            x = dropout(x, self.dropout, metadata.keys, 0, self.tp.rank, metadata.part)
        return x


class Block(nn.Module):
    """A transformer block, attention and MLP with residual connections: [t, B, C] -> [t, B, C]."""

    def __init__(
        self,
        config: ModelConfig,
        recompute_core: bool,
        generator: torch.Generator,
        tp: Axis,
        axes: ExpertAxes | None = None,
    ):
        """``axes``: the axes that divide the MLP's experts; None: a dense MLP."""
        super().__init__()
        self.dropout = config.dropout
        self.rank = tp.rank
        self.multiplier = config.residual_multiplier

        def norm(*orders: str) -> nn.Module:
            return Norm(config, config.hidden, tp) if config.norm_order in orders else nn.Identity()

        self.norm1 = norm("pre", "sandwich")
        self.attention = Attention(config, recompute_core, generator, tp)
        self.post_norm1 = norm("post", "sandwich")
        self.norm2 = norm("pre", "sandwich")
        self.mlp = MLP(config, generator, tp) if axes is None else ExpertMLP(config, generator, tp, axes)
        self.post_norm2 = norm("post", "sandwich")

    def forward(self, x: Tensor, metadata: AttentionMetadata) -> Tensor:
        """[t, B, C] -> [t, B, C]."""
        y = self.attention(self.norm1(x), metadata)
        x = self._add(x, self.post_norm1(y), metadata, 0)
        y = self.norm2(x)
        y = self.mlp(y, metadata) if isinstance(self.mlp, ExpertMLP) else self.mlp(y)
        return self._add(x, self.post_norm2(y), metadata, 1)

    def _add(self, x: Tensor, y: Tensor, metadata: AttentionMetadata, site: int) -> Tensor:
        if self.training:
            y = dropout(y, self.dropout, metadata.keys, site, self.rank, metadata.part)
        return x + scaled(y, self.multiplier)
