"""Settings of the network."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import ClassVar, Literal

from hpclm.config.attention import LAYER_KINDS, AttentionConfig
from hpclm.config.checks import typed
from hpclm.config.experts import ExpertsConfig
from hpclm.config.latent import MAX_WIDTH
from hpclm.config.layer import DenseMLP, Layer
from hpclm.config.rope import RopeConfig, scaling_problems
from hpclm.config.section import Rule, Section
from hpclm.config.setting import setting

BLOCKS = {"gpt": "hpclm.model.gpt:Block"}
GATED = ("swiglu", "geglu", "geglu_tanh", "swiglu_clamped")
"""Values of model.activation whose MLPs have a gate."""
MAX_LAYERS = 10_000
MAX_TOKENS = 1 << 31
"""The limits stop a mistyped number from building layers for hours, and keep products of sizes within 64 bits."""


@dataclass(frozen=True)
class ModelConfig(Section, key="model"):
    """The network; defaults: GPT-2's 124M."""

    vocab_size: int = setting(50257, "Vocabulary of the tokenizer, without padding.", at_least=1, at_most=MAX_TOKENS)
    vocab_multiple: int = setting(
        128, "Pad the embedding to a multiple of this; padding gets no probability.", at_least=1, at_most=MAX_TOKENS
    )
    layers: int = setting(12, "Transformer blocks.", at_least=1, at_most=MAX_LAYERS)
    hidden: int = setting(768, "Hidden size.", at_least=1, at_most=MAX_WIDTH)
    ffn: int | None = setting(
        None,
        "Inner size of the MLP; null: 4 x hidden; gated: 8/3 x hidden, rounded up to a multiple of 256.",
        at_least=1,
        at_most=MAX_WIDTH,
    )
    context: int = setting(1024, "Tokens of a sample.", at_least=1, at_most=MAX_TOKENS, unit="tokens")
    positions: Literal["learned", "sinusoidal", "rope", "alibi", "none"] = setting(
        "learned", "Position embeddings; sinusoidal is fairseq's table."
    )
    norm: Literal["layernorm", "rmsnorm"] = setting("layernorm", "Normalisation.")
    norm_order: Literal["pre", "post", "sandwich"] = setting(
        "pre",
        "Normalise inputs of sublayers (pre), outputs before the residual (post, OLMo 2), or both (sandwich, Gemma 2).",
    )
    norm_eps: float = setting(1e-5, "Epsilon of the norms.", at_least=0)
    activation: Literal[
        "gelu", "gelu_tanh", "relu", "relu2", "xielu", "swiglu", "geglu", "geglu_tanh", "swiglu_clamped"
    ] = setting(
        "gelu_tanh",
        "gelu is exact, gelu_tanh GPT-2's, relu2 squared, xielu learned (Huang and Schlag 2024); *glu are gated, "
        "swiglu_clamped is gpt-oss's.",
    )
    bias: bool = setting(True, "Biases of linear layers and LayerNorm.")
    mlp_bias: bool | None = setting(None, "Biases of the MLP; null: as model.bias.")
    tied: bool = setting(True, "Tie output projection and token embedding.")
    embed_norm: bool = setting(False, "Norm after the embedding (BLOOM).")
    embed_scale: bool = setting(False, "Multiply token embeddings by sqrt(hidden) (fairseq).")
    embed_multiplier: float = setting(1.0, "Factor of token embeddings (Granite).", more_than=0)
    residual_multiplier: float = setting(1.0, "Factor of each sublayer's output (Granite).", more_than=0)
    logit_multiplier: float = setting(1.0, "Factor of the logits (1 / Granite's logits_scaling).", more_than=0)
    logit_cap: float | None = setting(None, "Logits become cap x tanh(logit / cap) (Gemma 2).", more_than=0)
    logits_fp32: bool = setting(False, "Compute logits in fp32.", warn_without="engine.precision!=fp32")
    dropout: float = setting(0.0, "Dropout of embeddings and sublayers.", at_least=0, less_than=1)
    init_std: float = setting(
        0.02, "Standard deviation of initial weights; output projections: / sqrt(2 x layers).", at_least=0
    )
    block: str = setting("gpt", "gpt, or your own module, package.module:Name.", names=BLOCKS)
    freeze: list[str] = setting(
        [], "Weights that are not trained, by name or pattern: [tokens.*, 'block[0-5].*'] (hpclm docs finetune)."
    )
    kernels: Literal["torch", "apex"] = setting("torch", "Norms on GPUs: PyTorch's, or NVIDIA apex's if installed.")
    attention: AttentionConfig = AttentionConfig()
    rope: RopeConfig = RopeConfig()
    experts: ExpertsConfig = ExpertsConfig()

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda model: model.splits_unevenly,
            "{model.hidden} must be a multiple of {model.attention.heads}, or set model.attention.head_dim",
        ),
        Rule(
            lambda model: model.positions == "rope" and not model.splits_unevenly and not model.rotates_pairs,
            lambda model: (
                f"model.positions=rope rotates an even number of features; model.rope.fraction={model.rope.fraction:g} of a head "
                f"of {model.head_width} is {model.rotated}"
            ),
        ),
        Rule(
            lambda model: model.positions == "sinusoidal" and model.hidden % 2,
            lambda model: f"model.positions=sinusoidal needs an even model.hidden, not {model.hidden}",
        ),
        Rule(
            lambda model: model.positions != "rope" and model.attention.omits_positions,
            "{model.attention.pattern}: layers without positions need model.positions=rope in the others",
        ),
        Rule(lambda model: scaling_problems(model.rope.scaling, model.rotated)),
        Rule(
            lambda model: (
                model.attention.qk_norm_span == "projection"
                and not (model.attention.qk_norm and model.norm == "rmsnorm")
            ),
            "model.attention.qk_norm_span=projection needs model.attention.qk_norm=true and model.norm=rmsnorm",
        ),
        Rule(
            lambda model: model.attention.latent.kv_rank and model.rope.fraction != 1,
            "{model.rope.fraction} has no effect with {model.attention.latent.kv_rank}: model.attention.latent.rope_dim features are rotated",
        ),
        Rule(
            lambda model: model.experts.count and model.block != "gpt",
            "{model.experts.count} has no effect with {model.block}, which has its own MLP",
        ),
        Rule(
            lambda model: model.experts.count and model.experts.has_known_kinds and model.dense_layers == model.layers,
            "{model.experts.count} has no effect: no layer of {model.experts.pattern} is of kind experts",
        ),
        Rule(
            lambda model: model.experts.count and model.activation == "xielu",
            "model.activation=xielu is not supported with model.experts.count: all experts of a layer would share its two weights",
        ),
    )

    warnings: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda model: model.unused_kinds,
            lambda model: (
                f"model.attention.pattern={typed(model.attention.pattern)}: with model.layers={model.layers} no layer is of kind "
                f"{', '.join(model.unused_kinds)}"
            ),
        ),
        Rule(
            lambda model: model.attention.window is not None and model.attention.window >= model.context,
            "{model.attention.window} has no effect with {model.context}: no sample is longer",
        ),
        Rule(
            lambda model: model.positions == "rope" and all(layer.rope is None for layer in model.blocks),
            "model.rope.base and the other settings of rotary positions have no effect: none of the layers has positions",
        ),
        Rule(
            lambda model: (
                model.rotates
                and not model.rotates_in_windows
                and (model.rope.window_base is not None or not model.rope.window_scaled)
            ),
            "model.rope.window_base and model.rope.window_scaled have no effect: no layer with a window has positions",
        ),
        Rule(
            lambda model: (
                model.rotates == model.rotates_in_windows and model.rope.window_base and model.rope.changed("base")
            ),
            "{model.rope.base} has no effect: all layers with positions have windows, and use {model.rope.window_base}",
        ),
        Rule(
            lambda model: model.rotates and model.rope.scaling and not any(rope.scaling for rope in model.rotates),
            "model.rope.scaling has no effect with {model.rope.window_scaled}: all layers with positions have windows",
        ),
        Rule(
            lambda model: model.experts.count and "dense" in model.experts.pattern and not model.dense_layers,
            "{model.experts.pattern}: with {model.layers} no layer is of kind dense",
        ),
        Rule(
            lambda model: not model.bias and model.norm == "rmsnorm" and model.sets_all_biases,
            "model.bias=false has no effect: model.attention.qkv_bias, model.attention.out_bias and model.mlp_bias are set, and rmsnorm has none",
        ),
    )

    @cached_property
    def blocks(self) -> tuple[Layer, ...]:
        """The layers in order, as values."""
        kinds = [(self.attention.kind(n), self.experts.in_layer(n)) for n in range(self.layers)]
        made = {kind: self._block(*kind) for kind in dict.fromkeys(kinds)}
        return tuple(made[kind] for kind in kinds)

    def _block(self, kind: str, with_experts: bool) -> Layer:
        windowed, positions = LAYER_KINDS[kind]
        rope = None
        if self.positions == "rope" and positions:
            base = self.rope.window_base or self.rope.base if windowed else self.rope.base
            scaling = self.rope.scaling if self.rope.window_scaled or not windowed else {}
            rope = RopeConfig(base, self.rope.fraction, scaling)
        mlp: DenseMLP | ExpertsConfig = DenseMLP(self.ffn_width)
        if with_experts:
            mlp = replace(self.experts, ffn=self.expert_width)
        return Layer(self.attention, self.attention.window if windowed else None, rope, mlp)

    def patterns(self, numbers: Sequence[int]) -> dict[str, list[str]]:
        """The settings of a network of these blocks."""
        patterns = {"attention.pattern": [self.attention.kind(number) for number in numbers]}
        if self.experts.count:
            patterns["experts.pattern"] = [self.experts.kind(number) for number in numbers]
        return patterns

    @property
    def unused_kinds(self) -> list[str]:
        """The kinds of attention in the pattern that no layer has."""
        used = {self.attention.kind(number) for number in range(self.layers)}
        return [kind for kind in dict.fromkeys(self.attention.pattern) if kind not in used]

    def freezes(self, name: str) -> bool:
        """Whether ``freeze`` matches the name of a weight."""
        return any(fnmatchcase(name, pattern) for pattern in self.freeze)

    @property
    def rotates(self) -> list[RopeConfig]:
        """The rotary positions of the layers that have them."""
        return [layer.rope for layer in self.blocks if layer.rope]

    @property
    def rotates_in_windows(self) -> list[RopeConfig]:
        """The same of the layers with a window."""
        return [layer.rope for layer in self.blocks if layer.rope and layer.window]

    @property
    def sets_all_biases(self) -> bool:
        """Whether no linear layer takes its bias from model.bias."""
        return None not in (self.attention.qkv_bias, self.attention.out_bias, self.mlp_bias)

    @property
    def dense_layers(self) -> int:
        """Number of blocks with a dense MLP."""
        return sum(not self.experts.in_layer(layer) for layer in range(self.layers))

    @property
    def expert_width(self) -> int:
        """Inner width of an expert."""
        return self.experts.ffn or self.ffn_width

    @property
    def head_dim(self) -> int:
        """Width of one head; in latent attention, of its queries and keys without positions."""
        return self.attention.head_dim or self.hidden // self.attention.heads

    @property
    def head_width(self) -> int:
        """Width of the queries and keys of one head."""
        latent = self.attention.latent
        return self.head_dim + latent.rope_dim if latent.kv_rank else self.head_dim

    @property
    def value_width(self) -> int:
        """Width of the values of one head."""
        return self.attention.latent.value_dim or self.head_dim

    @property
    def attention_width(self) -> int:
        """Width of the outputs of all heads together."""
        return self.attention.heads * self.value_width

    @property
    def core_width(self) -> float:
        """Width of a head's scores and outputs, on average, times the number of heads: what the products of attention's core cost."""
        return self.attention.heads * (self.head_width + self.value_width) / 2

    @property
    def kv_width(self) -> int:
        """Width of the keys and values of all heads together."""
        return self.attention.groups * (self.head_width + self.value_width)

    @property
    def splits_unevenly(self) -> bool:
        """Whether the hidden size cannot be divided over the heads."""
        return self.attention.head_dim is None and self.hidden % self.attention.heads != 0

    @property
    def rotates_pairs(self) -> bool:
        """Whether rotary positions rotate an even number of features, at most the width of a head."""
        return self.rotated % 2 == 0 and 0 < self.rotated <= self.head_width

    @property
    def rotated(self) -> int:
        """Features of a head that rotary positions turn."""
        latent = self.attention.latent
        return latent.rope_dim if latent.kv_rank else int(self.head_width * self.rope.fraction)

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        """Whether (queries, keys and values; attention's output projection; the MLP) have biases."""
        given = self.attention.qkv_bias, self.attention.out_bias, self.mlp_bias
        qkv, out, mlp = (self.bias if bias is None else bias for bias in given)
        return qkv, out, mlp

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies its inner activations by a gate."""
        return self.activation in GATED

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
