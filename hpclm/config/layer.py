"""The layers of a network as values."""

from dataclasses import dataclass

from hpclm.config.attention import AttentionConfig
from hpclm.config.experts import ExpertsConfig
from hpclm.config.rope import RopeConfig


@dataclass(frozen=True)
class DenseMLP:
    """An MLP that computes every token."""

    width: int
    """Inner width."""


@dataclass(frozen=True)
class Layer:
    """One transformer block. Blocks with equal values are built, compiled and planned alike."""

    mixer: AttentionConfig
    """Heads and scores; its pattern concerns the network, not the layer."""
    window: int | None
    """Tokens that a token attends to, itself included; None: all before it."""
    rope: RopeConfig | None
    """Base and scaling of this layer's rotary positions; None: queries and keys are not rotated."""
    mlp: DenseMLP | ExpertsConfig
    """For experts, their inner width (ffn) is never None here."""

    @property
    def experts(self) -> ExpertsConfig | None:
        """The experts that take the place of the MLP; None: a dense MLP."""
        return self.mlp if isinstance(self.mlp, ExpertsConfig) else None
