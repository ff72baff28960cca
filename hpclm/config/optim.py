"""Settings of the optimizer and of fp16's loss scale."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypedDict

from hpclm.config.checks import typed
from hpclm.config.optimizers import OPTIMIZERS, READ_BY_SOME, optimizers_help, optimizers_with
from hpclm.config.section import Rule, Section, given, no_effect
from hpclm.config.setting import setting

_NAMES = (
    "constant linear cosine half_cosine inverse_sqrt wsd megatron1_linear megatron1_cosine megatron1_exponential "
    "fairseq_polynomial fairseq_cosine fairseq_inverse_sqrt"
)
SCHEDULES = {name: f"hpclm.optim.schedules:{name}" for name in _NAMES.split()}

FP16 = "engine.precision=fp16"
ENDLESS = ("constant", "fairseq_inverse_sqrt")
"""Schedules without an end, which ignore min_lr and schedule_length."""


class Group(TypedDict, total=False):
    """An entry of optim.groups."""

    match: str
    lr: Any
    weight_decay: Any


@dataclass(frozen=True)
class OptimConfig(Section, key="optim"):
    """Optimizer and learning-rate schedule."""

    name: str = setting("adamw", optimizers_help(), names=OPTIMIZERS)
    arguments: dict[str, Any] = setting({}, "Arguments of your own optimizer: {betas: [0.9, 0.99]}.")
    lr: float = setting(6e-4, "Peak learning rate.", at_least=0)
    min_lr: float = setting(6e-5, "Learning rate at the end of the schedule.", at_least=0)
    betas: tuple[float, float] = setting((0.9, 0.95), "Adam's betas.", at_least=0, less_than=1)
    eps: float = setting(1e-8, "Adam's epsilon.", at_least=0)
    weight_decay: float = setting(0.1, "Decoupled weight decay.", at_least=0)
    decayed: Literal["matrices", "non_embedding", "all"] = setting(
        "matrices",
        "Decay matrices (Megatron), matrices except embeddings (OLMo 2), or all (fairseq).",
        warn_without="optim.weight_decay",
    )
    groups: list[Group] = setting(
        [], "[{match: REGEX, lr: FACTOR, weight_decay: VALUE}] for weights with matching names; later entries win."
    )
    z_loss: float = setting(
        0.0, "Factor of the z-loss, log(Z)^2 of the softmax's normaliser Z (PaLM: 1e-4); logged separately.", at_least=0
    )
    momentum: float = setting(0.95, "Muon's momentum.", at_least=0, less_than=1, only_with=optimizers_with("momentum"))
    nesterov: bool = setting(True, "Nesterov momentum in Muon.", only_with=optimizers_with("nesterov"))
    newton_schulz_steps: int = setting(
        5, "Muon's Newton-Schulz iterations.", at_least=1, only_with=optimizers_with("newton_schulz_steps")
    )
    newton_schulz_type: Literal["bf16", "fp32"] = setting(
        "bf16",
        "Type of Muon's Newton-Schulz iterations, and of the matrices that ranks exchange for them.",
        only_with=optimizers_with("newton_schulz_type"),
    )
    adjust: Literal["match_rms_adamw", "original"] = setting(
        "match_rms_adamw",
        "Scale of Muon's updates of A x B matrices: 0.2 sqrt(max(A, B)), as large as AdamW's, or sqrt(max(1, A / B)).",
        only_with=optimizers_with("adjust"),
    )
    split: bool = setting(
        True,
        "Muon separates queries, keys, values, gate and up projections; false: as stored.",
        only_with=optimizers_with("split"),
    )
    qk_clip: float | None = setting(
        None,
        "Scale down queries and keys with an attention score above this (QK-clip; Kimi K2: 100).",
        more_than=0,
        only_with="not model.attention.qk_norm: the scores are bounded already",
    )
    ema: float | None = setting(
        None,
        "Decay per step of an exponential moving average of the weights, which is also evaluated: 0.999 averages about 1,000 "
        "steps; null: no average.",
        more_than=0,
        less_than=1,
    )
    clip: float = setting(1.0, "Maximum global gradient norm; 0: no clipping.", at_least=0)
    schedule: str = setting(
        "cosine",
        "constant, linear, cosine, inverse_sqrt, wsd (Megatron-core's); half_cosine (OLMo-core's); megatron1_linear, "
        "megatron1_cosine, megatron1_exponential (v1.1.5's); fairseq_polynomial, fairseq_cosine, fairseq_inverse_sqrt; or "
        "package.module:name (hpclm docs your-own-code).",
        names=SCHEDULES,
    )
    unit: Literal["steps", "samples"] = setting("steps", "Unit of warmup, schedule_length, period and wsd_decay.")
    warmup: float = setting(0, "Length of the linear warm-up; should be shorter than the budget.", at_least=0)
    warmup_fraction: float | None = setting(
        None, "Instead of warmup: a fraction of the schedule's length.", at_least=0, less_than=1
    )
    warmup_start: float | None = setting(
        None, "Learning rate of the first step (Megatron: 0); null: one increment above 0.", at_least=0
    )
    schedule_length: int | None = setting(None, "Length of the schedule; null: the whole budget.", at_least=1)
    power: float = setting(
        1.0, "Exponent of fairseq_polynomial.", more_than=0, only_with="optim.schedule=fairseq_polynomial|own"
    )
    period: int | None = setting(
        None,
        "Length of a period of fairseq_cosine, or of wsd, which then falls and begins again (WSD-S); null: one period to the end.",
        at_least=1,
        only_with="optim.schedule=fairseq_cosine|wsd|own",
    )
    restarts: bool = setting(
        False,
        "Restart fairseq_cosine after each period, with a tenth of the learning rates; false: stay at min_lr.",
        only_with="optim.schedule=fairseq_cosine|own",
    )
    wsd_decay: int | None = setting(
        None,
        "Length of wsd's final decay; null: a tenth of the schedule.",
        at_least=1,
        only_with="optim.schedule=wsd|own",
    )
    wsd_style: Literal["linear", "cosine", "exponential", "minus_sqrt", "inverse"] = setting(
        "linear",
        "Shape of wsd's final decay; inverse: 1 / learning rate rises linearly (WSD-S).",
        only_with="optim.schedule=wsd|own",
    )
    guard: Literal["none", "skip_step", "clip_update"] = setting(
        "none",
        "skip_step (OLMo 2): skip updates with a loss or gradient norm 6 standard deviations above the mean of "
        "128 steps. clip_update (Marin): limit updates to the mean norm and 3 deviations.",
    )
    nonfinite_limit: int = setting(
        20,
        "End the run (exit code 93) after this many consecutive steps with NaN or infinity.",
        at_least=1,
        unit="steps",
    )
    spike: float = setting(
        0.5,
        "A loss this many nats and 10 deviations above the median of 100 steps is a spike; checkpoints "
        "during a spike do not replace healthy ones. 0: off.",
        at_least=0,
        unit="nats",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda optim: optim.arguments and optim.name in OPTIMIZERS,
            lambda optim: (
                f"optim.arguments={optim.arguments} is for your own optimizer, optim.name=package.module:Name; the arguments of "
                f"optim.name={optim.name} are settings, such as optim.{next(iter(optim.arguments))}"
            ),
        ),
        Rule(lambda optim: [problem for entry in optim.groups for problem in _unusable(entry)]),
        Rule(
            lambda optim: optim.name not in OPTIMIZERS,
            lambda optim: [
                f"optim.{name}={typed(getattr(optim, name))} is not read by your own optim.name={optim.name}; it takes arguments in "
                f"'optim.arguments={{{name}: {typed(getattr(optim, name))}}}', if it has such a parameter"
                for name in READ_BY_SOME
                if optim.changed(name)
            ],
        ),
        Rule(
            lambda optim: not optim.lr and optim.schedule in SCHEDULES,
            "optim.lr=0 changes no weight, so nothing would be learned; set it to more than 0",
        ),
        Rule(
            lambda optim: optim.min_lr > optim.lr and optim.schedule not in ENDLESS,
            "{optim.min_lr} must not be more than {optim.lr}",
        ),
        Rule(
            lambda optim: optim.warmup_fraction is not None and optim.warmup,
            "{optim.warmup} and {optim.warmup_fraction} cannot be combined",
        ),
        Rule(
            lambda optim: optim.schedule in ("inverse_sqrt", "fairseq_inverse_sqrt") and not optim.warms_up,
            "{optim.schedule} needs a warm-up; set optim.warmup",
        ),
        Rule(
            lambda optim: optim.warmup_start is not None and optim.warmup_start > optim.lr,
            "{optim.warmup_start} must not be more than {optim.lr}",
        ),
        Rule(
            lambda optim: optim.warmup_start is not None and not optim.warms_up,
            "{optim.warmup_start} has no effect without optim.warmup",
        ),
        Rule(
            lambda optim: optim.schedule_length is not None and optim.warmup >= optim.schedule_length,
            lambda optim: (
                f"optim.warmup={optim.warmup:g} must be less than optim.schedule_length={optim.schedule_length}"
            ),
        ),
        Rule(
            lambda optim: optim.schedule_length is not None and optim.period is not None,
            "{optim.schedule_length} has no effect with {optim.period}",
        ),
        Rule(
            lambda optim: optim.wsd_style == "inverse" and not optim.min_lr,
            "{optim.wsd_style} cannot fall to {optim.min_lr}; set it to more than 0",
        ),
        Rule(lambda optim: filter(None, [optim.outlasting(None)])),
    )
    warnings: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda optim: optim.schedule in ENDLESS and optim.of_end,
            lambda optim: f"{no_effect(optim.of_end)} with optim.schedule={optim.schedule}, which has no end",
        ),
        Rule(
            lambda optim: optim.restarts and optim.period is None and optim.schedule_length is None,
            "optim.restarts=true has no effect without optim.period: the period is the whole budget",
        ),
    )

    @property
    def of_end(self) -> list[str]:
        """The settings about the end of a schedule that differ from their defaults, as key=value."""
        keys = ["optim.min_lr"]
        if self.warmup_fraction is None:
            keys.append("optim.schedule_length")
        return given(self, *keys)

    @property
    def warms_up(self) -> bool:
        """Whether the learning rate rises at first."""
        return bool(self.warmup or self.warmup_fraction)

    def outlasting(self, budget: int | None) -> str | None:
        """A problem if the warm-up and the final decay of wsd overlap, because the learning rate would jump.

        ``budget``: length of the run in ``unit``, if known; schedule_length and period override it.
        """
        length = self.period or self.schedule_length or budget
        if self.schedule != "wsd" or length is None:
            return None
        rise = self.warmup or (self.warmup_fraction or 0.0) * length
        decay = self.wsd_decay or max(1, length // 10)
        if rise >= length or rise + decay <= length:  # a run that ends during the warm-up only causes a warning
            return None
        whole = next((f"optim.{name}" for name in ("period", "schedule_length") if getattr(self, name)), "the budget")
        shown = f"optim.wsd_decay={decay}" if self.wsd_decay else f"the final decay of {decay} (a tenth)"
        return (
            f"the warm-up of {rise:g} + {shown} = {rise + decay:g} {self.unit} must be at most {whole}={length}: otherwise the "
            f"learning rate would jump; shorten them, or extend the budget"
        )


def _unusable(entry: Mapping[str, Any]) -> Iterator[str]:
    said = f"optim.groups: {entry}"
    pattern = entry.get("match")
    amounts = {name: value for name, value in entry.items() if name != "match"}
    if unknown := sorted(map(str, amounts.keys() - {"lr", "weight_decay"})):
        yield f"{said} has unknown {', '.join(unknown)}; an entry has match, and lr or weight_decay or both"
        return
    if not isinstance(pattern, str) or not amounts:
        yield f"{said} needs match, a regular expression, and lr or weight_decay or both"
        return
    try:
        if not all(0 <= float(value) < math.inf and not isinstance(value, bool) for value in amounts.values()):
            yield f"{said}: lr and weight_decay must be numbers of at least 0"
        re.compile(str(pattern))
    except (TypeError, ValueError):  # 1e-1 is text for YAML
        yield f"{said}: lr and weight_decay must be numbers of at least 0"
    except re.error as error:
        yield f"{said}: match is not a regular expression: {error}"


@dataclass(frozen=True)
class ScalerConfig(Section, key="scaler"):
    """The loss scale of fp16. It doubles after a window without overflow, and halves on overflow."""

    initial: float = setting(65536.0, "First loss scale.", more_than=0, only_with=FP16)
    window: int = setting(1000, "Steps without overflow until it doubles.", at_least=1, unit="steps", only_with=FP16)
    hysteresis: int = setting(2, "Overflows before it halves.", at_least=1, unit="overflows", only_with=FP16)
    consecutive: bool = setting(
        False,
        "Count only overflows in a row.",
        only_with=FP16,
        warn_without="scaler.hysteresis>1: every overflow halves the loss scale",
    )
    minimum: float = setting(
        1.0, "Lowest loss scale; overflows there count towards optim.nonfinite_limit.", more_than=0, only_with=FP16
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(lambda scaler: scaler.minimum > scaler.initial, "{scaler.initial} must be at least {scaler.minimum}"),
    )
