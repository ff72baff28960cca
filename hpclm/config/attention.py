"""Settings of attention."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from hpclm.config.latent import MAX_WIDTH, LatentConfig
from hpclm.config.section import Rule, Section
from hpclm.config.setting import setting

LAYER_KINDS = {"full": (False, True), "window": (True, True), "nope": (False, False), "window_nope": (True, False)}
"""Names in model.attention.pattern -> whether such a layer has a window, and whether it has positions."""


@dataclass(frozen=True)
class AttentionConfig(Section, key="model.attention"):
    """Heads and scores of attention, and the kernel that computes it."""

    kernel: Literal["auto", "cudnn", "flash", "flex", "math"] = setting(
        "auto", "Attention kernel on GPUs; math: plain matrix products; auto: the fastest for GPU and shape."
    )
    heads: int = setting(12, "Attention heads.", at_least=1, at_most=MAX_WIDTH)
    head_dim: int | None = setting(None, "Head size; null: hidden / heads.", at_least=1, at_most=MAX_WIDTH)
    kv_heads: int | None = setting(
        None, "Key/value heads (grouped-query attention); null: same as heads.", at_least=1, at_most=MAX_WIDTH
    )
    pattern: list[str] = setting(
        ["full"],
        "Attention of the layers, repeated: full, window, nope (no positions), window_nope; [window, window, "
        "window, full] in OLMo 3.",
    )
    window: int | None = setting(
        None, "Tokens that a token attends to in layers with a window, itself included.", at_least=1, unit="tokens"
    )
    qkv_bias: bool | None = setting(None, "Biases of queries, keys and values; null: as model.bias.")
    out_bias: bool | None = setting(None, "Bias of attention's output; null: as model.bias.")
    qk_norm: bool = setting(False, "Normalise queries and keys.")
    qk_norm_span: Literal["head", "projection"] = setting(
        "head", "Normalise each head (Qwen 3), or all heads together (OLMo 2)."
    )
    score_scale: float | None = setting(None, "Factor of attention scores; null: 1 / sqrt(head size).", more_than=0)
    score_cap: float | None = setting(None, "Scores become cap x tanh(score / cap) (Gemma 2).", more_than=0)
    sinks: bool = setting(False, "A learned logit per head in the softmax of the scores (gpt-oss).")
    dropout: float = setting(0.0, "Dropout of attention weights.", at_least=0, less_than=1)
    latent: LatentConfig = LatentConfig()

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda attention: attention.heads % attention.groups,
            "{model.attention.heads} must be a multiple of {model.attention.kv_heads}",
        ),
        Rule(
            lambda attention: not attention.has_known_kinds,
            f"{{model.attention.pattern}} must be a list of {', '.join(LAYER_KINDS)}",
        ),
        Rule(
            lambda attention: attention.has_windows and attention.window is None,
            "{model.attention.pattern} needs model.attention.window, the tokens that its layers with a window attend to",
        ),
        Rule(
            lambda attention: attention.window is not None and not attention.has_windows and attention.has_known_kinds,
            "{model.attention.window} has no effect: no layer of {model.attention.pattern} is of kind window",
        ),
        Rule(
            lambda attention: attention.needs_scores and attention.kernel in ("cudnn", "flash"),
            lambda attention: (
                f"model.attention.kernel={attention.kernel} does not support "
                f"{' and '.join(f'model.attention.{name}' for name in attention.needs_scores)}; leave model.attention.kernel=auto"
            ),
        ),
        Rule(
            lambda attention: attention.latent.kv_rank and attention.without_latent,
            lambda attention: (
                f"model.attention.latent.kv_rank={attention.latent.kv_rank} does not support "
                f"{' and '.join(f'model.attention.{name}' for name in attention.without_latent)}"
            ),
        ),
        Rule(
            lambda attention: attention.latent.kv_rank and attention.latent.rope_dim % 2,
            "{model.attention.latent.rope_dim} must be even: rotary positions turn pairs of features",
        ),
    )

    def kind(self, layer: int) -> str:
        """The kind of attention in a block, one of LAYER_KINDS."""
        return self.pattern[layer % len(self.pattern)]

    @property
    def groups(self) -> int:
        """Number of key/value heads."""
        return self.kv_heads or self.heads

    @property
    def without_latent(self) -> list[str]:
        """The settings in use that latent attention does not have."""
        return [name for name in ("kv_heads", "qk_norm", "sinks") if getattr(self, name)]

    @property
    def has_known_kinds(self) -> bool:
        """Whether the pattern is a list of LAYER_KINDS."""
        return bool(self.pattern) and {*self.pattern} <= {*LAYER_KINDS}

    @property
    def has_windows(self) -> bool:
        """Whether a layer of the pattern has a window."""
        return any(LAYER_KINDS[kind][0] for kind in self.pattern if kind in LAYER_KINDS)

    @property
    def omits_positions(self) -> bool:
        """Whether a layer of the pattern has no positions."""
        return any(not LAYER_KINDS[kind][1] for kind in self.pattern if kind in LAYER_KINDS)

    @property
    def needs_scores(self) -> list[str]:
        """The active settings that cuDNN and FlashAttention do not support, or not in all their versions."""
        names = [name for name in ("score_cap", "sinks", "window") if getattr(self, name)]
        return [*names, "latent.kv_rank"] if self.latent.kv_rank else names
