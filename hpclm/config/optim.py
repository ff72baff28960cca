"""Settings of the optimizer and of fp16's loss scale."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from hpclm.config.checks import DOC, Checked, at_least, fraction
from hpclm.config.optimizers import OPTIMIZERS, described, without_effect
from hpclm.registry import problem

_NAMES = (
    "constant linear cosine inverse_sqrt wsd megatron1_linear megatron1_cosine megatron1_exponential "
    "fairseq_polynomial fairseq_cosine fairseq_inverse_sqrt"
)
SCHEDULES = {name: f"hpclm.optim.schedules:{name}" for name in _NAMES.split()}

ENDLESS = ("constant", "fairseq_inverse_sqrt")
"""Schedules without an end, to which min_lr and schedule_length mean nothing."""


@dataclass(frozen=True)
class OptimConfig(Checked):
    """Optimizer and learning-rate schedule."""

    name: str = field(default="adamw", metadata={DOC: described()})
    arguments: dict[str, Any] = field(default_factory=dict)
    """What an optimizer of your own is made with besides: {betas: [0.9, 0.99]}."""
    lr: float = 6e-4
    """Peak learning rate."""
    min_lr: float = 6e-5
    """Learning rate at the end of the schedule."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's betas."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    decayed: Literal["matrices", "non_embedding", "all"] = "matrices"
    """Decay matrices (Megatron), matrices except embeddings (OLMo 2), or all (fairseq)."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """[{match: REGEX, lr: FACTOR, weight_decay: VALUE}] for weights whose names match; later entries win."""
    z_loss: float = 0.0
    """Factor of the z-loss, log(Z)^2 of the softmax's normaliser Z (PaLM: 1e-4); logged separately."""
    momentum: float = 0.95
    """Muon's momentum."""
    nesterov: bool = True
    """Nesterov momentum in Muon."""
    newton_schulz_steps: int = 5
    """Muon's Newton-Schulz iterations."""
    newton_schulz_type: Literal["bf16", "fp32"] = "bf16"
    """Type of these iterations and of the matrices sent."""
    adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of Muon's updates of A x B matrices: 0.2 sqrt(max(A, B)), as large as AdamW's, or sqrt(max(1, A / B))."""
    split: bool = True
    """Muon separates queries, keys, values, gate and up projections; false: as stored."""
    qk_clip: float | None = None
    """Scale down queries and keys whose largest attention score exceeds this (QK-clip; Kimi K2: 100)."""
    clip: float = 1.0
    """Maximum global gradient norm; 0: none."""
    schedule: str = "cosine"
    """constant, linear, cosine, inverse_sqrt, wsd (Megatron-core's); megatron1_linear, megatron1_cosine,
    megatron1_exponential (v1.1.5's); fairseq_polynomial, fairseq_cosine, fairseq_inverse_sqrt; or package.module:name
    (hpclm docs your-own-code)."""
    unit: Literal["steps", "samples"] = "steps"
    """Unit of warmup, schedule_length, period and wsd_decay."""
    warmup: float = 0
    """Length of the linear warm-up; should be shorter than the budget."""
    warmup_fraction: float | None = None
    """Instead of warmup: a fraction of the schedule's length."""
    warmup_start: float | None = None
    """Learning rate of the first step (Megatron: 0); null: one increment above 0."""
    schedule_length: int | None = None
    """Length of the schedule; null: the whole budget."""
    power: float = 1.0
    """Exponent of fairseq_polynomial."""
    period: int | None = None
    """Length of a fairseq_cosine period; null: from the warm-up to the end."""
    restarts: bool = False
    """Restart fairseq_cosine after each period, with a tenth of the learning rates; false: stay at min_lr."""
    wsd_decay: int | None = None
    """Length of wsd's final decay; null: a tenth of the schedule."""
    wsd_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """Shape of wsd's final decay."""
    guard: Literal["none", "skip_step", "clip_update"] = "none"
    """skip_step (OLMo 2): skip updates whose loss or gradient norm is 6 standard deviations above the mean of 128 steps.
    clip_update (Marin): limit updates to the mean norm and 3 deviations."""
    nonfinite_limit: int = 20
    """Consecutive steps skipped for NaN or infinity that end the run (93)."""
    spike: float = 0.5
    """A loss this many nats and 10 deviations above the median of 100 steps is a spike; checkpoints in one do not
    replace healthy ones. 0: off."""

    def problems(self) -> Iterator[str]:
        """Invalid optimizer settings."""
        wrong = problem("optim.name", self.name, OPTIMIZERS)
        if wrong:
            yield wrong
        elif self.arguments and self.name in OPTIMIZERS:
            yield (
                f"optim.arguments={self.arguments} is for an optimizer of your own, optim.name=package.module:Name; those of "
                f"optim.name={self.name} are settings, such as optim.{next(iter(self.arguments))}"
            )
        amounts = ("lr", "min_lr", "eps", "weight_decay", "clip", "z_loss", "spike", "warmup", "warmup_start")
        yield from at_least(0, "optim", **{name: getattr(self, name) for name in amounts})
        counts = ("schedule_length", "period", "wsd_decay", "nonfinite_limit", "newton_schulz_steps")
        yield from at_least(1, "optim", **{name: getattr(self, name) for name in counts})
        if not (self.power > 0 and math.isfinite(self.power)):
            yield f"optim.power={self.power} must be more than 0 and finite"
        if not all(0 <= beta < 1 for beta in self.betas):
            yield f"optim.betas={list(self.betas)} must each be at least 0 and less than 1"
        for entry in self.groups:
            yield from _unusable(entry)
        yield from fraction("optim", momentum=self.momentum)
        if self.qk_clip is not None and not 0 < self.qk_clip < math.inf:
            yield f"optim.qk_clip={self.qk_clip} must be more than 0 and finite"
        for name, able in (
            () if problem("optim.name", self.name, OPTIMIZERS) else without_effect(self.name, self._changed)
        ):
            if self.name not in OPTIMIZERS:
                yield (
                    f"optim.{name}={getattr(self, name)} is not read by optim.name={self.name}, which is of your own; it takes such in "
                    f"'optim.arguments={{{name}: {getattr(self, name)}}}', if it has such a parameter"
                )
                continue
            yield f"optim.{name}={getattr(self, name)} has no effect with optim.name={self.name}; it applies to {', '.join(able)}"
        wrong = problem("optim.schedule", self.schedule, SCHEDULES)
        if wrong:
            yield wrong
        if not self.lr and self.schedule in SCHEDULES:
            yield "optim.lr=0 changes no weight, so nothing would be learned; set it to more than 0"
        if self.min_lr > self.lr and self.schedule not in ENDLESS:
            yield f"optim.min_lr={self.min_lr} must not be more than optim.lr={self.lr}"
        if self.warmup_fraction is not None:
            yield from fraction("optim", warmup_fraction=self.warmup_fraction)
            if self.warmup:
                yield f"optim.warmup={self.warmup} and optim.warmup_fraction={self.warmup_fraction} cannot be combined"
        warmed = self.warmup or self.warmup_fraction
        if self.schedule in ("inverse_sqrt", "fairseq_inverse_sqrt") and not warmed:
            yield f"optim.schedule={self.schedule} needs a warm-up; set optim.warmup"
        if self.warmup_start is not None and self.warmup_start > self.lr:
            yield f"optim.warmup_start={self.warmup_start} must not be more than optim.lr={self.lr}"
        if self.schedule_length is not None and self.warmup >= self.schedule_length:
            yield f"optim.warmup={self.warmup:g} must be less than optim.schedule_length={self.schedule_length}"
        if self.schedule_length is not None and self.period is not None:
            yield f"optim.schedule_length={self.schedule_length} has no effect with optim.period={self.period}"
        too_long = self.outlasting(None)
        if too_long:
            yield too_long
        if self.warmup_start is not None and not warmed:
            yield f"optim.warmup_start={self.warmup_start} has no effect without optim.warmup"
        owners = {
            "fairseq_polynomial": ("power",),
            "fairseq_cosine": ("period", "restarts"),
            "wsd": ("wsd_decay", "wsd_style"),
        }
        for schedule, names in owners.items():
            for name in names:
                if self._changed(name) and self.schedule != schedule and self.schedule in SCHEDULES:
                    yield f"optim.{name}={getattr(self, name)} has no effect with optim.schedule={self.schedule}; it applies to {schedule}"

    def outlasting(self, budget: int | None) -> str | None:
        """A problem if warm-up and final decay of wsd overlap, so that the learning rate would jump.

        ``budget``: length of the run in ``unit``, if known; schedule_length overrides it.
        """
        length = budget if self.schedule_length is None else self.schedule_length
        if self.schedule != "wsd" or length is None:
            return None
        rise = self.warmup or (self.warmup_fraction or 0.0) * length
        decay = self.wsd_decay or max(1, length // 10)
        if rise >= length or rise + decay <= length:  # a run that ends during the warm-up only causes a warning
            return None
        whole = "optim.schedule_length" if self.schedule_length is not None else "the budget"
        shown = f"optim.wsd_decay={self.wsd_decay}" if self.wsd_decay else f"the final decay of {decay} (a tenth)"
        return (
            f"the warm-up of {rise:g} + {shown} = {rise + decay:g} {self.unit} must be at most {whole}={length}: otherwise the "
            f"learning rate would jump; shorten them, or extend the budget"
        )


def _unusable(entry: dict[str, Any]) -> Iterator[str]:
    """What is wrong with an entry of optim.groups."""
    said, pattern = f"optim.groups: {entry}", entry.get("match")
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
class ScalerConfig(Checked):
    """Loss scale for fp16: doubles after a quiet window, halves on overflow."""

    initial: float = 65536.0
    """First loss scale."""
    window: int = 1000
    """Steps without overflow until it doubles."""
    hysteresis: int = 2
    """Overflows before it halves."""
    consecutive: bool = False
    """Count only overflows in a row."""
    minimum: float = 1.0
    """Lowest loss scale; overflows there count towards optim.nonfinite_limit."""

    def reset(self) -> str:
        """The words of a command line that return what was changed to the defaults."""
        changed = (entry for entry in fields(self) if getattr(self, entry.name) != entry.default)
        return " ".join(f"scaler.{entry.name}={json.dumps(entry.default)}" for entry in changed)

    def problems(self) -> Iterator[str]:
        """Invalid loss-scale settings."""
        yield from at_least(1, "scaler", window=self.window, hysteresis=self.hysteresis)
        if self.initial == math.inf:
            yield f"scaler.initial={self.initial} must be finite"
        elif not 0 < self.minimum <= self.initial:
            yield f"scaler.initial={self.initial} must be at least scaler.minimum={self.minimum}, which must be more than 0"
