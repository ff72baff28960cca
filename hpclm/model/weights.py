"""The weights of a network, defined once: shape, split, initial values, and use of each. Needs no PyTorch.

Modules create their parameters from these tables. Numbers of parameters, FLOPs, memory, and the matrices of optimizers are sums over them.
C hidden size.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from hpclm.config import ModelConfig
from hpclm.config.attention import AttentionConfig
from hpclm.config.experts import ExpertsConfig
from hpclm.config.layer import DenseMLP, Layer
from hpclm.parallel.placement import Fused, Placement, Use

Matrix = tuple[int, int]
"""Rows and columns."""
XIELU_ALPHA = 0.8  # of both alphas (Huang and Schlag 2024)
XIELU_BETA = 0.5  # slope at 0


@dataclass(frozen=True)
class Weight:
    """One weight: N(mean, std) at first, or ``mean`` everywhere if ``std`` is 0."""

    placement: Placement
    mean: float = 0.0
    std: float = 0.0
    chosen: int = 0
    """How many weights of a stack compute any one token."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole weight."""
        return self.placement.shape

    @property
    def stack(self) -> int:
        """Number of experts whose weights it stacks; 0 if it is not a stack."""
        return self.shape[0] if self.placement.stacked else 0

    @property
    def size(self) -> int:
        """Number of its parameters."""
        return math.prod(self.shape)

    @property
    def active(self) -> int:
        """Number of parameters that compute any one token."""
        return self.size // self.stack * self.chosen if self.stack else self.size

    @property
    def is_matrix(self) -> bool:
        """Whether it multiplies activations; false for biases, norms and sinks. A stack of matrices counts as one."""
        return self.placement.dimensions == 2

    @property
    def matrices(self) -> Sequence[Matrix]:
        """The matrices that it fuses; of a stack, those of one expert."""
        rows, columns = self.shape[-2:]
        fused = self.placement.fused
        return [(fused.groups * part, columns) for part in fused.rows] if fused else [(rows, columns)]

    def on(self, tensor: int, expert: int = 1) -> float:
        """Number of parameters on one of ``tensor`` tensor-parallel ranks, with experts divided over ``expert`` ranks."""
        return self.size / (1 if self.placement.dim is None else tensor) / (expert if self.stack else 1)


@dataclass(frozen=True)
class Table:
    """The weights of a module by name, and the tables of the modules inside it."""

    weights: Mapping[str, Weight]
    parts: Mapping[str, "Table"] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[str, Weight]]:
        """All weights, by names such as attention.qkv.weight."""
        yield from self.weights.items()
        for name, table in self.parts.items():
            for path, weight in table:
                yield f"{name}.{path}", weight


def _with_bias(weight: Weight, bias: Weight | None) -> Table:
    return Table({"weight": weight} if bias is None else {"weight": weight, "bias": bias})


def column_linear(
    config: ModelConfig, width: int, bias: bool, fused: Fused | None = None, inputs: int | None = None
) -> Table:
    """C, or ``inputs``, -> ``width``; tensor parallelism splits the rows."""
    weight = Weight(Placement((width, inputs or config.hidden), 0, fused), std=config.init_std)
    return _with_bias(weight, Weight(Placement((width,), 0, fused)) if bias else None)


def row_linear(config: ModelConfig, width: int, bias: bool) -> Table:
    """``width`` -> C at the end of a block's sublayer; tensor parallelism splits the columns."""
    weight = Weight(Placement((config.hidden, width), 1), std=residual_std(config))
    return _with_bias(weight, Weight(Placement((config.hidden,))) if bias else None)


def residual_std(config: ModelConfig) -> float:
    """Standard deviation of the weights at the end of a sublayer.

    The network has 2 x layers sublayers, each of which adds to the residual stream. Dividing by the root of their number keeps the
    variance of the stream independent of the depth (Radford et al. 2019).
    """
    return config.init_std / (2 * config.layers) ** 0.5


def whole_linear(config: ModelConfig, widths: tuple[int, ...], bias: bool) -> Table:
    """C -> matrices of these ``widths``, which every rank holds whole."""
    rows = sum(widths)
    weight = Weight(Placement((rows, config.hidden), fused=Fused(1, widths)), std=config.init_std)
    return _with_bias(weight, Weight(Placement((rows,))) if bias else None)


def norm(config: ModelConfig, width: int) -> Table:
    """A norm over ``width`` features, which every rank holds whole."""
    biased = config.bias and config.norm == "layernorm"
    return _with_bias(Weight(Placement((width,)), mean=1.0), Weight(Placement((width,))) if biased else None)


def vocabulary(config: ModelConfig, use: Use = "embedding") -> Table:
    """The token embedding, or the output projection."""
    placement = Placement((config.padded_vocab, config.hidden), 0, use=use)
    return Table({"weight": Weight(placement, std=config.init_std)})


def entry(config: ModelConfig) -> Table:
    """Learned positions, and the norm of the embedding."""
    weights = {}
    if config.positions == "learned":
        weights["table"] = Weight(Placement((config.context, config.hidden), use="embedding"), std=config.init_std)
    return Table(weights, {"norm": norm(config, config.hidden)} if config.embed_norm else {})


def attention(config: ModelConfig, mixer: AttentionConfig) -> Table:
    """Attention of a block. For each key/value head, qkv stores its query heads, its key and its value next to each other (Megatron's
    layout), so that a slice of its rows is a complete attention over fewer heads."""
    if mixer.latent.kv_rank:
        return latent_attention(config, mixer)
    width = config.head_width
    qkv_bias, out_bias, _ = config.biases
    group = (mixer.heads // mixer.groups * width, width, width)
    parts = {
        "qkv": column_linear(config, mixer.groups * sum(group), qkv_bias, Fused(mixer.groups, group)),
        "out": row_linear(config, mixer.heads * width, out_bias),
    }
    if mixer.qk_norm and mixer.qk_norm_span == "projection":
        for name, heads in {"q_norm": mixer.heads, "k_norm": mixer.groups}.items():
            parts[name] = Table({"weight": Weight(Placement((heads * width,), 0), mean=1.0)})
    elif mixer.qk_norm:
        parts |= {"q_norm": norm(config, width), "k_norm": norm(config, width)}
    return Table({"sinks": Weight(Placement((mixer.heads,), 0))} if mixer.sinks else {}, parts)


def latent_attention(config: ModelConfig, mixer: AttentionConfig) -> Table:
    """Latent attention of a block: q_a and kv_a lead to narrow vectors, q_b and kv_b from there to the heads. kv_a has
    the key with positions too, which all heads share. For each head, kv_b has its key without positions, then its value."""
    latent = mixer.latent
    qkv_bias, out_bias, _ = config.biases
    queries = mixer.heads * config.head_width
    group = (config.head_dim, config.value_width)
    parts = {
        "q_b": column_linear(config, queries, False, inputs=latent.q_rank),
        "kv_a": whole_linear(config, (latent.kv_rank, latent.rope_dim), qkv_bias),
        "kv_norm": norm(config, latent.kv_rank),
        "kv_b": column_linear(
            config, mixer.heads * sum(group), False, Fused(mixer.heads, group), inputs=latent.kv_rank
        ),
        "out": row_linear(config, config.attention_width, out_bias),
    }
    if latent.q_rank:
        parts |= {"q_a": whole_linear(config, (latent.q_rank,), qkv_bias), "q_norm": norm(config, latent.q_rank)}
    return Table({}, parts)


def mlp(config: ModelConfig, width: int) -> Table:
    """An MLP of inner ``width``. If gated, up has the rows of the gate, then those of the up projection."""
    bias = config.biases[2]
    parts = {}
    if config.activation == "xielu":
        means = {"alpha_p": XIELU_ALPHA, "alpha_n": XIELU_ALPHA - XIELU_BETA}
        parts["activation"] = Table(
            {name: Weight(Placement((1,)), mean=math.log(math.expm1(mean))) for name, mean in means.items()}
        )
    parts["up"] = column_linear(config, sum(branches(config, width)), bias, Fused(1, branches(config, width)))
    parts["down"] = row_linear(config, width, bias)
    return Table({}, parts)


def branches(config: ModelConfig, width: int) -> tuple[int, ...]:
    """Rows of the matrices that the first weight of an MLP of inner ``width`` fuses: gate and up, or up alone."""
    return (width, width) if config.gated else (width,)


def router(config: ModelConfig, experts: ExpertsConfig) -> Table:
    """The router of a block with experts. The bias on its choice is a buffer: no gradient moves it."""
    weight = Weight(Placement((experts.count, config.hidden)), std=config.init_std)
    return _with_bias(weight, Weight(Placement((experts.count,))) if experts.router_bias else None)


def stacked_experts(config: ModelConfig, experts: ExpertsConfig, split: bool = True, ranks: int = 1) -> Table:
    """All experts of a block. ``split``: whether tensor parallelism splits each. ``ranks``: data-parallel ranks that divide them."""
    inner = experts.ffn or config.ffn_width
    fused = Fused(1, branches(config, inner))
    rows = sum(fused.rows)

    def stack(shape: tuple[int, ...], dim: int | None, std: float = 0.0, fused: Fused | None = None) -> Weight:
        whole = (experts.count, *shape)
        placement = Placement(whole, dim if split else None, fused, data_ranks=ranks, stacked=True)
        return Weight(placement, std=std, chosen=experts.per_token)

    weights = {
        "up": stack((rows, config.hidden), 1, config.init_std, fused),
        "down": stack((config.hidden, inner), 2, residual_std(config)),
    }
    if config.biases[2]:
        weights |= {"up_bias": stack((rows,), 1, fused=fused), "down_bias": stack((config.hidden,), None)}
    return Table(weights)


NORMS = {
    "pre": ("norm1", "norm2"),
    "post": ("post_norm1", "post_norm2"),
    "sandwich": ("norm1", "post_norm1", "norm2", "post_norm2"),
}
"""model.norm_order -> the norms of a block."""


def block(config: ModelConfig, layer: Layer, split: bool = True, ranks: int = 1) -> Table:
    """A block. ``split``, ``ranks``: see stacked_experts()."""
    parts = {name: norm(config, config.hidden) for name in NORMS[config.norm_order]}
    parts["attention"] = attention(config, layer.mixer)
    if isinstance(layer.mlp, DenseMLP):
        parts["mlp"] = mlp(config, layer.mlp.width)
        return Table({}, parts)
    of_experts = {
        "router": router(config, layer.mlp),
        "experts": stacked_experts(config, layer.mlp, split, ranks),
    }
    if layer.mlp.shared_ffn:
        of_experts["shared"] = mlp(config, layer.mlp.shared_ffn)
    return Table({}, parts | {"mlp": Table({}, of_experts)})


def before_blocks(config: ModelConfig) -> Table:
    """The layers before the first block."""
    return Table({}, {"tokens": vocabulary(config), "entry": entry(config)})


def after_blocks(config: ModelConfig) -> Table:
    """The layers after the last block, without a tied output projection, which is the token embedding."""
    norms = {"norm": norm(config, config.hidden)}
    return Table({}, norms if config.tied else norms | {"output": vocabulary(config, "output")})


@lru_cache(maxsize=256)
def of_block(config: ModelConfig, layer: Layer, split: bool = True) -> Mapping[str, Weight]:
    """The weights of a block, by names such as attention.qkv.weight."""
    return dict(block(config, layer, split))
