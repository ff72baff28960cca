"""A GPT as hpclm trains it, for transformers. This file belongs to the weights next to it; transformers has no class for their network.

Load the folder with ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)``. Only PyTorch and transformers are
needed. B sequences, T tokens of each, S including earlier ones, C hidden width, H query heads, G key/value heads, D width
of one head.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
}
GATED = ("swiglu", "geglu", "geglu_tanh")


SHAPE: dict[str, Any] = dict(
    vocab_size=50257,
    num_hidden_layers=12,
    hidden_size=768,
    num_attention_heads=12,
    num_key_value_heads=None,
    intermediate_size=3072,
    max_position_embeddings=1024,
    position_kind="learned",
    rotary_base=10000.0,
    norm_kind="layernorm",
    norm_eps=1e-5,
    hidden_act="gelu_tanh",
    use_bias=True,
    embed_norm=False,
    embed_scale=False,
    qk_norm=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    initializer_range=0.02,
    use_cache=True,
)
"""Keys of config.json; the defaults are GPT-2's 124M."""


class HpclmConfig(PretrainedConfig):
    """Shape of the network."""

    model_type = "hpclm"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 - transformers' name and type

    def __init__(self, **settings: Any):
        shape = {name: settings.pop(name, default) for name, default in SHAPE.items()}
        shape["num_key_value_heads"] = shape["num_key_value_heads"] or shape["num_attention_heads"]
        for name, value in shape.items():
            setattr(self, name, value)
        self.head_dim = shape["hidden_size"] // shape["num_attention_heads"]
        super().__init__(**settings)


class HpclmNorm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension."""

    def __init__(self, config: HpclmConfig, width: int):
        super().__init__()
        self.rms = config.norm_kind == "rmsnorm"
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.use_bias and not self.rms else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        if self.rms:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class HpclmAttention(nn.Module):
    """[B, T, C] -> [B, T, C]; the fused projection keeps each key/value head together with its queries."""

    def __init__(self, config: HpclmConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.dropout = config.attention_dropout
        self.width = config.head_dim
        self.groups = config.num_key_value_heads
        self.per_group = config.num_attention_heads // self.groups
        fused = (config.num_attention_heads + 2 * self.groups) * self.width
        self.qkv = nn.Linear(config.hidden_size, fused, config.use_bias)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, config.use_bias)
        self.q_norm = HpclmNorm(config, self.width) if config.qk_norm else None
        self.k_norm = HpclmNorm(config, self.width) if config.qk_norm else None

    def forward(self, x: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor] | None, past: Any) -> Tensor:
        """[B, T, C] -> [B, T, C]; ``mask`` [B or 1, H or 1, T, S] is added to the scores."""
        heads = self.qkv(x).unflatten(-1, (self.groups, self.per_group + 2, self.width))
        q, k, v = heads.split([self.per_group, 1, 1], 3)
        q, k, v = (z.flatten(2, 3).transpose(1, 2) for z in (q, k, v))  # [B, H or G, T, D]
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if turn is not None:
            q = _turned(q, *turn)
            k = _turned(k, *turn)
        if past is not None:
            k, v = past.update(k, v, self.layer)
        k, v = (z.repeat_interleave(self.per_group, 1) for z in (k, v))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return self.out(y.transpose(1, 2).flatten(2))


class HpclmBlock(nn.Module):
    """Attention and MLP, each normalised on the way in and added on the way out."""

    def __init__(self, config: HpclmConfig, layer: int):
        super().__init__()
        self.dropout = config.hidden_dropout
        self.activation = ACTIVATIONS[config.hidden_act]
        self.gated = config.hidden_act in GATED
        self.norm1 = HpclmNorm(config, config.hidden_size)
        self.attention = HpclmAttention(config, layer)
        self.norm2 = HpclmNorm(config, config.hidden_size)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size * (1 + self.gated), config.use_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, config.use_bias)

    def forward(self, x: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor] | None, past: Any) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        x = x + F.dropout(self.attention(self.norm1(x), mask, turn, past), self.dropout, self.training)
        y = self.up(self.norm2(x))
        if self.gated:
            gate, y = y.chunk(2, -1)
            y = self.activation(gate) * y
        else:
            y = self.activation(y)
        return x + F.dropout(self.down(y), self.dropout, self.training)


class HpclmModel(nn.Module):
    """Embeddings to the activations before the output projection."""

    def __init__(self, config: HpclmConfig):
        super().__init__()
        self.config = config
        learned = config.position_kind == "learned"
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.embed_norm = HpclmNorm(config, config.hidden_size) if config.embed_norm else None
        self.blocks = nn.ModuleList(HpclmBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = HpclmNorm(config, config.hidden_size)

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, past: Any) -> Tensor:
        """[B, T, C] embeddings and [B, T] positions -> [B, T, C]; ``seen`` [B, S] is 0 for padding."""
        config = self.config
        if config.embed_scale:
            x = x * config.hidden_size**0.5
        if self.positions is not None:
            x = x + self.positions(positions)
        elif config.position_kind == "sinusoidal":
            x = x + sinusoids(positions, config.hidden_size).to(x.dtype)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        x = F.dropout(x, config.hidden_dropout, self.training)
        before = past.get_seq_length() if past is not None else 0
        mask = attention_mask(config, x, int(before), seen)
        turn = rotary(positions, config, x.dtype) if config.position_kind == "rope" else None
        for block in self.blocks:
            x = block(x, mask, turn, past)
        return self.norm(x)


class HpclmForCausalLM(PreTrainedModel, GenerationMixin):
    """The model with its logits, for transformers' Trainer and generate."""

    config_class = HpclmConfig
    base_model_prefix = "model"
    _no_split_modules = ["HpclmBlock"]  # noqa: RUF012 - transformers' name and type
    _supports_sdpa = True

    def __init__(self, config: HpclmConfig):
        super().__init__(config)
        self.model = HpclmModel(config)
        tied = config.tie_word_embeddings
        self.output: nn.Module | None = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0.0, self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.data.zero_()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of the tokens."""
        return self.model.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding of the tokens."""
        self.model.tokens = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The output projection; None if it is tied to the embedding."""
        return self.output

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output projection."""
        self.output = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        cache: Any = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """[B, T] ids -> [B, T, vocabulary] logits, or of the last ``logits_to_keep`` tokens; ``labels`` are shifted here.

        ``cache``: past_key_values, as transformers names them from 5.24 on.
        """
        if past_key_values is None:
            past_key_values = cache
        if use_cache is None:
            use_cache = self.config.use_cache
        x = inputs_embeds
        if x is None:
            x = self.model.tokens(input_ids)
        if past_key_values is None and use_cache and not self.training:
            past_key_values = DynamicCache()
        before = int(past_key_values.get_seq_length()) if past_key_values is not None else 0
        if position_ids is None and attention_mask is not None:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -x.shape[1] :]
        elif position_ids is None:
            position_ids = torch.arange(before, before + x.shape[1], device=x.device)[None]
        x = self.model(x, position_ids, attention_mask, past_key_values)
        if logits_to_keep:
            x = x[:, -logits_to_keep:]
        logits = F.linear(x, self.model.tokens.weight) if self.output is None else self.output(x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutputWithPast(loss, logits, past_key_values)  # the name of the third depends on the version


def attention_mask(config: HpclmConfig, x: Tensor, before: int, seen: Tensor | None) -> Tensor:
    """The terms that are added to the scores, [B or 1, H or 1, T, S], for x [B, T, C] after ``before`` tokens."""
    rows = torch.arange(before, before + x.shape[1], device=x.device)
    columns = torch.arange(before + x.shape[1], device=x.device)
    distance = columns[None, :] - rows[:, None]
    mask = torch.zeros(1, 1, *distance.shape, device=x.device)
    if config.position_kind == "alibi":
        mask = slopes(config.num_attention_heads, x.device)[None, :, None, None] * distance
    hidden = (distance > 0)[None, None]
    if seen is not None:
        hidden = hidden | (seen[:, None, None, : len(columns)] == 0)
    # finite, because otherwise rows of padding that see nothing would become NaN
    return mask.masked_fill(hidden, torch.finfo(x.dtype).min).to(x.dtype)


def slopes(heads: int, device: torch.device) -> Tensor:
    """[H] slopes: the scores fall by slope x distance (Press et al. 2022)."""
    power = 2 ** math.floor(math.log2(heads))
    values = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    values += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(values, device=device)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """[B, T] positions -> [B, T, width] as fairseq arranges them: sines, then cosines, from position 2."""
    half = width // 2
    steps = torch.arange(half, dtype=torch.float32, device=positions.device)
    angles = (positions[..., None].float() + 2) * torch.exp(steps * -(math.log(10000) / max(1, half - 1)))
    return torch.cat([angles.sin(), angles.cos()], -1)


def rotary(positions: Tensor, config: HpclmConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[B, T] positions -> cosines and sines [B, 1, T, D] (Su et al. 2021)."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device) / config.head_dim
    angles = positions[:, None, :, None].float() * (1.0 / config.rotary_base**steps)
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
