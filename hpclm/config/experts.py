"""Settings of a mixture of experts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hpclm.config.section import Rule, Section
from hpclm.config.setting import setting

EXPERTS = "model.experts.count"
MLP_KINDS = ("experts", "dense")
MAX_EXPERTS = 1 << 15  # hpclm.parallel.dispatch sorts the experts' indices as 16-bit integers
"""The limit stops a mistyped number from allocating weights for hours."""
COEFFICIENTS = (
    "experts.balance_bias",
    "experts.balance_sequence",
    "experts.balance_step",
    "experts.balance_micro_batch",
    "experts.router_z_loss",
)


def _with_experts(broken: Callable[[Any], Any], sentence: str | Callable[[Any], str]) -> Rule:
    return Rule(lambda experts: experts.count and broken(experts), sentence)


@dataclass(frozen=True)
class ExpertsConfig(Section, key="model.experts"):
    """A mixture of experts: a router chooses some of a layer's MLPs for each token."""

    count: int = setting(
        0,
        "Experts per layer, each an MLP (mixture of experts); 0: all MLPs are dense.",
        at_least=0,
        at_most=MAX_EXPERTS,
    )
    per_token: int = setting(2, "Experts that compute each token (top-k).", at_least=1, only_with=EXPERTS)
    ffn: int | None = setting(None, "Inner size of an expert; null: as model.ffn.", at_least=1, only_with=EXPERTS)
    shared_ffn: int = setting(
        0,
        "Total inner size of the shared experts, which compute every token; 0: no shared experts.",
        at_least=0,
        only_with=EXPERTS,
    )
    pattern: list[str] = setting(
        ["experts"],
        "MLPs of the layers, repeated: experts or dense; or a list with one entry per layer.",
        only_with=EXPERTS,
    )
    router_score: Literal["softmax", "sigmoid"] = setting(
        "softmax", "How router logits become scores.", only_with=EXPERTS
    )
    router_normalize: bool = setting(
        True, "Divide the scores of a token's experts by their sum; must be false with per_token=1.", only_with=EXPERTS
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
    router_top_groups: int = setting(
        1, "Number of groups in which a token chooses experts.", at_least=1, only_with=EXPERTS
    )
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
        only_with=(EXPERTS, "model.experts.router_choice_bias: it moves that bias"),
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

    rules: ClassVar[tuple[Rule, ...]] = (
        _with_experts(
            lambda experts: not experts.has_known_kinds,
            f"{{model.experts.pattern}} must be a list of {' and '.join(MLP_KINDS)}",
        ),
        _with_experts(
            lambda experts: experts.per_token > experts.count,
            "{model.experts.per_token} must be from 1 to {model.experts.count}",
        ),
        _with_experts(
            lambda experts: experts.per_token == 1 < experts.count and experts.router_normalize,
            "model.experts.per_token=1 needs model.experts.router_normalize=false (norm_topk_prob in config.json): one score divided "
            "by itself is 1, so the router would get no gradient from the loss",
        ),
        _with_experts(
            lambda experts: experts.count % experts.router_groups,
            "{model.experts.router_groups} must be a divisor of {model.experts.count}",
        ),
        _with_experts(
            lambda experts: experts.router_top_groups > experts.router_groups,
            "{model.experts.router_top_groups} must be from 1 to {model.experts.router_groups}",
        ),
        _with_experts(
            lambda experts: (
                experts.count % experts.router_groups == 0
                and experts.count // experts.router_groups < 2 <= experts.router_groups
            ),
            "{model.experts.router_groups} leaves one expert in a group; groups are chosen by the sum of their two best scores",
        ),
        _with_experts(
            lambda experts: experts.count >= experts.per_token > experts.choices > 0,
            lambda experts: (
                f"model.experts.per_token={experts.per_token} is more than the {experts.choices} experts of "
                f"model.experts.router_top_groups={experts.router_top_groups} groups"
            ),
        ),
    )

    def kind(self, layer: int) -> str:
        """Kind of the MLP of a block, of MLP_KINDS."""
        return self.pattern[layer % len(self.pattern)]

    def in_layer(self, layer: int) -> bool:
        """Whether the MLP of a block consists of experts."""
        return self.count > 0 and self.has_known_kinds and self.kind(layer) == "experts"

    @property
    def has_known_kinds(self) -> bool:
        """Whether the pattern is a list of MLP_KINDS."""
        return bool(self.pattern) and {*self.pattern} <= {*MLP_KINDS}

    @property
    def choices(self) -> int:
        """Experts that a token chooses from; 0 if the groups do not divide the experts."""
        if self.count % self.router_groups or self.router_top_groups > self.router_groups:
            return 0
        return self.router_top_groups * (self.count // self.router_groups)
