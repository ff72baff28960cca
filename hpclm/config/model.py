"""Settings of the network."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from hpclm.config import rope
from hpclm.config.experts import MAX_EXPERTS
from hpclm.config.experts import RULES as OF_EXPERTS
from hpclm.config.section import Rule, Section
from hpclm.config.setting import setting

BLOCKS = {"gpt": "hpclm.model.gpt:Block"}
EXPERTS = "model.experts"
ROPE = "model.positions=rope"
LAYER_KINDS = ("full", "window", "nope", "window_nope")
MAX_LAYERS, MAX_WIDTH, MAX_TOKENS = 10_000, 1 << 24, 1 << 31
"""Limits that keep a wrong number from building layers for hours, and products of sizes within 64 bits."""


@dataclass(frozen=True)
class ModelConfig(Section, key="model"):
    """The network; defaults: GPT-2's 124M."""

    vocab_size: int = setting(50257, "Vocabulary of the tokenizer, without padding.", at_least=1, at_most=MAX_TOKENS)
    vocab_multiple: int = setting(
        128, "Pad the embedding to a multiple of this; padding gets no probability.", at_least=1, at_most=MAX_TOKENS
    )
    layers: int = setting(12, "Transformer blocks.", at_least=1, at_most=MAX_LAYERS)
    hidden: int = setting(768, "Hidden size.", at_least=1, at_most=MAX_WIDTH)
    heads: int = setting(12, "Attention heads.", at_least=1, at_most=MAX_WIDTH)
    head_dim: int | None = setting(None, "Head size; null: hidden / heads.", at_least=1, at_most=MAX_WIDTH)
    kv_heads: int | None = setting(
        None, "Key/value heads (grouped-query attention); null: same as heads.", at_least=1, at_most=MAX_WIDTH
    )
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
    rope_base: float = setting(10000.0, "Base of rotary frequencies.", more_than=1, only_with=ROPE)
    rope_fraction: float = setting(
        1.0, "Rotated part of each head (GPT-NeoX's rotary_pct).", more_than=0, at_most=1, only_with=ROPE
    )
    rope_scaling: dict[str, str] = setting(
        {},
        "Keys of rope_parameters in transformers: rope_type (linear, dynamic, yarn, llama3, longrope), factor, ...",
        only_with=ROPE,
    )
    pattern: list[str] = setting(
        ["full"],
        "Attention of the layers, repeated: full, window, nope (no positions), window_nope; [window, window, "
        "window, full] in OLMo 3.",
    )
    window: int | None = setting(
        None, "Tokens that a window layer attends to, itself included.", at_least=1, unit="tokens"
    )
    window_rope_base: float | None = setting(
        None, "rope_base of window layers; null: the same.", more_than=1, only_with=(ROPE, "model.window")
    )
    window_rope_scaled: bool = setting(
        True, "Apply rope_scaling to window layers too.", only_with="model.window", warn_without="model.rope_scaling"
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
    qkv_bias: bool | None = setting(None, "Biases of queries, keys and values; null: same as bias.")
    out_bias: bool | None = setting(None, "Bias of attention's output; null: same as bias.")
    mlp_bias: bool | None = setting(None, "Biases of the MLP; null: same as bias.")
    tied: bool = setting(True, "Tie output projection and token embedding.")
    embed_norm: bool = setting(False, "Norm after the embedding (BLOOM).")
    embed_scale: bool = setting(False, "Multiply token embeddings by sqrt(hidden) (fairseq).")
    qk_norm: bool = setting(False, "Normalise queries and keys.")
    qk_norm_span: Literal["head", "projection"] = setting(
        "head", "Normalise each head (Qwen 3), or all heads together (OLMo 2)."
    )
    score_scale: float | None = setting(None, "Factor of attention scores; null: 1 / sqrt(head size).", more_than=0)
    score_cap: float | None = setting(None, "Scores become cap x tanh(score / cap) (Gemma 2).", more_than=0)
    attention_sinks: bool = setting(False, "A learned logit per head in the softmax of the scores (gpt-oss).")
    embed_multiplier: float = setting(1.0, "Factor of token embeddings (Granite).", more_than=0)
    residual_multiplier: float = setting(1.0, "Factor of each sublayer's output (Granite).", more_than=0)
    logit_multiplier: float = setting(1.0, "Factor of the logits (1 / Granite's logits_scaling).", more_than=0)
    logit_cap: float | None = setting(None, "Logits become cap x tanh(logit / cap) (Gemma 2).", more_than=0)
    logits_fp32: bool = setting(False, "Compute logits in fp32.", warn_without="engine.precision!=fp32")
    experts: int = setting(
        0,
        "Experts per layer, each an MLP (mixture of experts); 0: all MLPs are dense.",
        at_least=0,
        at_most=MAX_EXPERTS,
    )
    experts_per_token: int = setting(2, "Experts that compute each token (top-k).", at_least=1, only_with=EXPERTS)
    expert_ffn: int | None = setting(None, "Inner size of an expert; null: same as ffn.", at_least=1, only_with=EXPERTS)
    shared_ffn: int = setting(
        0,
        "Total inner size of the shared experts, which compute every token; 0: no shared experts.",
        at_least=0,
        only_with=EXPERTS,
    )
    mlp_pattern: list[str] = setting(
        ["experts"],
        "MLPs of the layers, repeated: experts or dense; or a list with one entry per layer.",
        only_with=EXPERTS,
    )
    router_score: Literal["softmax", "sigmoid"] = setting(
        "softmax", "How router logits become scores.", only_with=EXPERTS
    )
    router_normalize: bool = setting(
        True,
        "Divide the scores of a token's experts by their sum; must be false with experts_per_token=1.",
        only_with=EXPERTS,
    )
    router_scale: float = setting(
        1.0, "Factor of the chosen experts' scores (routed_scaling_factor).", more_than=0, only_with=EXPERTS
    )
    router_groups: int = setting(
        1,
        "Groups of experts; a token first chooses router_top_groups by the sum of a group's two best scores "
        "(DeepSeek-V3).",
        at_least=1,
        only_with=EXPERTS,
    )
    router_top_groups: int = setting(1, "Groups from which a token chooses experts.", at_least=1, only_with=EXPERTS)
    router_bias: bool = setting(False, "Bias of the router's logits (gpt-oss).", only_with=EXPERTS)
    router_choice_bias: bool = setting(
        False,
        "Add a bias, which no gradient moves, to the scores when experts are chosen, not when they are weighted "
        "(DeepSeek-V3).",
        only_with=EXPERTS,
    )
    balance_bias: float = setting(
        0.0,
        "Balance: how far a step moves the choice bias, up for experts with fewer tokens than the mean, down for others.",
        at_least=0,
        only_with=(EXPERTS, "model.router_choice_bias: it moves that bias"),
    )
    balance_sequence: float = setting(
        0.0, "Balance: coefficient of a loss over each sequence (DeepSeek-V3).", at_least=0, only_with=EXPERTS
    )
    balance_step: float = setting(
        0.0,
        "Balance: coefficient of a loss from the token counts of the previous step, over the global batch.",
        at_least=0,
        only_with=EXPERTS,
    )
    balance_micro_batch: float = setting(
        0.0,
        "Balance: coefficient of a loss over each micro-batch (Mixtral). Results depend on batch.micro_size, "
        "which a resumed run must keep.",
        at_least=0,
        only_with=EXPERTS,
    )
    router_z_loss: float = setting(
        0.0,
        "Coefficient of the square of the logarithm of the router's normaliser (Zoph et al. 2022).",
        at_least=0,
        only_with=EXPERTS,
    )
    dropout: float = setting(0.0, "Dropout of embeddings and sublayers.", at_least=0, less_than=1)
    attention_dropout: float = setting(0.0, "Dropout of attention weights.", at_least=0, less_than=1)
    init_std: float = setting(
        0.02, "Standard deviation of initial weights; output projections: / sqrt(2 x layers).", at_least=0
    )
    block: str = setting("gpt", "gpt, or your own module, package.module:Name.", names=BLOCKS)
    kernels: Literal["torch", "apex"] = setting("torch", "Norms on GPUs: PyTorch's, or NVIDIA apex's if installed.")
    attention: Literal["auto", "cudnn", "flash", "flex", "math"] = setting(
        "auto", "Attention kernel on GPUs; math: plain matrix products; auto: the fastest for GPU and shape."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda model: model.splits_unevenly,
            "{model.hidden} must be a multiple of {model.heads}, or set model.head_dim",
        ),
        Rule(
            lambda model: model.positions == "rope" and not model.splits_unevenly and not model.rotates_pairs,
            lambda model: (
                f"model.positions=rope rotates an even number of features; model.rope_fraction={model.rope_fraction:g} of a head "
                f"of {model.head_width} is {model.rotated}"
            ),
        ),
        Rule(lambda model: model.heads % model.groups, "{model.heads} must be a multiple of {model.kv_heads}"),
        Rule(
            lambda model: model.positions == "sinusoidal" and model.hidden % 2,
            lambda model: f"model.positions=sinusoidal needs an even model.hidden, not {model.hidden}",
        ),
        Rule(
            lambda model: not model.pattern or {*model.pattern} - {*LAYER_KINDS},
            f"{{model.pattern}} must be a list of {', '.join(LAYER_KINDS)}",
        ),
        Rule(
            lambda model: model.has_windows and model.window is None,
            "{model.pattern} needs model.window, the tokens that its layers with a window attend to",
        ),
        Rule(
            lambda model: model.window is not None and not model.has_windows and {*model.pattern} <= {*LAYER_KINDS},
            "{model.window} has no effect: no layer of {model.pattern} is of kind window",
        ),
        Rule(
            lambda model: model.positions != "rope" and any("nope" in kind for kind in model.pattern),
            "{model.pattern}: layers without positions need model.positions=rope in the others",
        ),
        Rule(lambda model: rope.problems(model.rope_scaling, model.rotated)),
        Rule(
            lambda model: model.qk_norm_span == "projection" and not (model.qk_norm and model.norm == "rmsnorm"),
            "model.qk_norm_span=projection needs model.qk_norm=true and model.norm=rmsnorm",
        ),
        Rule(
            lambda model: model.needs_scores and model.attention in ("cudnn", "flash"),
            lambda model: (
                f"model.attention={model.attention} does not support {' and '.join(f'model.{name}' for name in model.needs_scores)}; "
                "leave model.attention=auto"
            ),
        ),
        Rule(
            lambda model: model.attention_dropout and (model.score_cap or model.attention_sinks),
            "{model.attention_dropout} is not supported with model.score_cap or model.attention_sinks",
        ),
        *OF_EXPERTS,
    )

    def kind(self, layer: int) -> str:
        """Kind of attention of a block, of LAYER_KINDS."""
        return self.pattern[layer % len(self.pattern)]

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of a block consists of experts."""
        return self.experts > 0 and self.mlp_pattern[layer % len(self.mlp_pattern)] == "experts"

    @property
    def dense_layers(self) -> int:
        """Blocks whose MLP is dense."""
        return sum(not self.has_experts(layer) for layer in range(self.layers))

    @property
    def expert_width(self) -> int:
        """Inner width of an expert."""
        return self.expert_ffn or self.ffn_width

    def window_of(self, kind: str) -> int | None:
        """Tokens that a block of this kind attends to; None: all before it."""
        return self.window if "window" in kind else None

    @property
    def needs_scores(self) -> list[str]:
        """The settings that change scores or their softmax, which the kernels of cuDNN and FlashAttention cannot do."""
        return [name for name in ("score_cap", "attention_sinks", "window") if getattr(self, name)]

    @property
    def groups(self) -> int:
        """Key/value heads."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_width

    @property
    def splits_unevenly(self) -> bool:
        """Whether the hidden size cannot be divided over the heads."""
        return self.head_dim is None and self.hidden % self.heads != 0

    @property
    def rotates_pairs(self) -> bool:
        """Whether rotary positions turn an even number of features, at most all of a head."""
        return self.rotated % 2 == 0 and 0 < self.rotated <= self.head_width

    @property
    def has_windows(self) -> bool:
        """Whether a layer of the pattern has a window."""
        return any("window" in kind for kind in self.pattern)

    @property
    def rotated(self) -> int:
        """Features of a head that rotary positions turn."""
        return int(self.head_width * self.rope_fraction)

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        """Whether q, k and v, attention's output projection and the MLP have biases."""
        given = self.qkv_bias, self.out_bias, self.mlp_bias
        qkv, out, mlp = (self.bias if bias is None else bias for bias in given)
        return qkv, out, mlp

    @property
    def gated(self) -> bool:
        """Whether the MLP is gated."""
        return "glu" in self.activation

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
