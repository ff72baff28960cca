"""Settings of the network."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hpclm.config.checks import Checked, at_least, at_most, fraction
from hpclm.registry import problem

BLOCKS = {"gpt": "hpclm.model.gpt:Block"}
MOST_LAYERS, WIDEST, LONGEST = 10_000, 1 << 24, 1 << 31
"""Limits that keep a wrong number from building layers for hours, and products of sizes within 64 bits."""


@dataclass(frozen=True)
class ModelConfig(Checked):
    """Shape of the network. The defaults are GPT-2's 124M."""

    vocab_size: int = 50257
    """Size of the tokenizer's vocabulary, without padding."""
    vocab_multiple: int = 128
    """Pad the embedding to a multiple of this, for speed; padding entries never get probability."""
    layers: int = 12
    """Transformer blocks."""
    hidden: int = 768
    """Hidden size."""
    heads: int = 12
    """Attention heads; hidden / heads is the size of a head."""
    kv_heads: int | None = None
    """Key and value heads for grouped-query attention; null: as many as heads."""
    ffn: int | None = None
    """Inner size of the MLP; null: 4 x hidden, or for gated activations 8/3 x hidden, rounded up to a multiple of 256."""
    context: int = 1024
    """Tokens in a sample, and the longest sequence that learned positions cover."""
    positions: Literal["learned", "sinusoidal", "rope", "alibi", "none"] = "learned"
    """Position embeddings. sinusoidal is fairseq's table (sines, then cosines, from position 2)."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies; only for positions=rope."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation before each sublayer and after the last block."""
    norm_eps: float = 1e-5
    """Added to the variance inside the norm."""
    activation: Literal["gelu", "gelu_tanh", "relu", "swiglu", "geglu"] = "gelu_tanh"
    """MLP non-linearity. gelu is the exact (erf) form; gelu_tanh the approximation that GPT-2 used; *glu are gated."""
    bias: bool = True
    """Biases in the linear layers and in LayerNorm."""
    tied: bool = True
    """Tie the output projection to the token embedding."""
    embed_norm: bool = False
    """A norm right after the embedding (BLOOM's --embed-layernorm)."""
    embed_scale: bool = False
    """Multiply token embeddings by sqrt(hidden), as fairseq does."""
    qk_norm: bool = False
    """Normalise queries and keys per head before the scores."""
    dropout: float = 0.0
    """Probability of zeroing an embedding or a sublayer's output in training."""
    attention_dropout: float = 0.0
    """Probability of zeroing an attention weight in training."""
    init_std: float = 0.02
    """Standard deviation of initial weights; output projections of attention and MLP use it / sqrt(2 x layers)."""
    block: str = "gpt"
    """Transformer block: gpt, or your own module as package.module:Name."""
    kernels: Literal["torch", "apex"] = "torch"
    """Norms on GPUs: PyTorch's operations, or NVIDIA apex's fused ones if apex is installed."""
    attention: Literal["auto", "cudnn", "flash", "flex", "math"] = "auto"
    """Attention's kernel on GPUs: cuDNN's, FlashAttention, FlexAttention, or plain matrix products (math, also on CPUs). auto:
    the fastest for the GPU and the shape, and FlexAttention for documents and ALiBi."""

    def problems(self) -> Iterator[str]:
        """Invalid model settings."""
        positive = dict(layers=self.layers, hidden=self.hidden, heads=self.heads, kv_heads=self.kv_heads, ffn=self.ffn)
        positive |= dict(vocab_size=self.vocab_size, vocab_multiple=self.vocab_multiple, context=self.context)
        wrong = list(at_least(1, "model", **positive))
        wrong += at_most(MOST_LAYERS, "model", layers=self.layers)
        wrong += at_most(WIDEST, "model", hidden=self.hidden, heads=self.heads, kv_heads=self.kv_heads, ffn=self.ffn)
        wrong += at_most(LONGEST, "model", vocab_size=self.vocab_size, vocab_multiple=self.vocab_multiple)
        wrong += at_most(LONGEST, "model", context=self.context)
        yield from wrong
        yield from at_least(0, "model", init_std=self.init_std, norm_eps=self.norm_eps)
        yield from fraction("model", dropout=self.dropout, attention_dropout=self.attention_dropout)
        if wrong:
            return
        if self.hidden % self.heads:
            yield f"model.hidden={self.hidden} must be a multiple of model.heads={self.heads}"
        elif self.positions == "rope" and self.head_width % 2:
            yield f"model.positions=rope needs an even head width; hidden / heads = {self.head_width}"
        if self.heads % self.groups:
            yield f"model.heads={self.heads} must be a multiple of model.kv_heads={self.kv_heads}"
        if self.positions == "sinusoidal" and self.hidden % 2:
            yield f"model.positions=sinusoidal needs an even model.hidden, not {self.hidden}"
        if self.rope_base != 10000.0 and self.positions != "rope":
            yield f"model.rope_base={self.rope_base} has no effect with model.positions={self.positions}"
        elif not 1 < self.rope_base < math.inf:
            yield f"model.rope_base={self.rope_base} must be more than 1 and finite"
        wrong_block = problem("model.block", self.block, BLOCKS)
        if wrong_block:
            yield wrong_block

    def unsplit(self, tensor: int) -> Iterator[str]:
        """Sizes that cannot be divided over ``tensor`` processes."""
        sizes = {"model.heads": self.heads, "the MLP's inner width (model.ffn)": self.ffn_width}
        sizes |= {"model.context": self.context, "the padded vocabulary (model.vocab_multiple)": self.padded_vocab}
        for name, size in sizes.items():
            if size % tensor:
                yield f"{name}={size} must be a multiple of parallel.tensor={tensor}"
        if self.groups % tensor and not self.heads % tensor:
            yield (
                f"model.kv_heads={self.groups} must be a multiple of parallel.tensor={tensor}: each process needs whole "
                f"key/value heads; lower parallel.tensor to a divisor of {self.groups}"
            )

    @property
    def groups(self) -> int:
        """Key/value heads."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def gated(self) -> bool:
        """Whether the MLP is gated."""
        return self.activation in ("swiglu", "geglu")

    @property
    def ffn_width(self) -> int:
        """Inner width of the MLP."""
        if self.ffn:
            return self.ffn
        return -(-8 * self.hidden // (3 * 256)) * 256 if self.gated else 4 * self.hidden

    @property
    def padded_vocab(self) -> int:
        """Rows of the token embedding."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
