"""Rotary frequencies (Su et al. 2021) and their scaling for longer contexts, as transformers' rope_parameters describe it."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hpclm.config import rope


def frequencies(
    width: int, base: float, scaling: Mapping[str, str], context: int, length: int, device: torch.device
) -> tuple[Tensor, float]:
    """[width / 2] radians per position, and the factor of cosines and sines.

    ``length``: tokens of the sequences, for the scalings that depend on it (dynamic, longrope). ``context``: the longest.
    """
    given = rope.parsed(scaling)
    kind, factor = given.get("rope_type"), given.get("factor", 1.0)
    original = given.get("original_max_position_embeddings", context)
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    if kind == "dynamic" and length > original:  # NTK-aware, by the length at hand (bloc97, emozilla 2023)
        base *= (factor * length / original - factor + 1) ** (width / (width - 2))
    plain = 1.0 / base**steps
    if kind == "linear":  # Chen et al. 2023
        return plain / factor, 1.0
    if kind == "yarn":
        return _yarn(plain, base, width, original, given), _temperature(given)
    if kind == "llama3":
        return _llama3(plain, original, given), 1.0
    if kind == "longrope":  # Ding et al. 2024
        factors = given["long_factor" if length > original else "short_factor"]
        factor = given.get("factor", context / original)
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        own: float = given.get("attention_factor", scale)
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device=device) * base**steps), own
    return plain, 1.0


def scaling_length(scaling: Mapping[str, str], context: int, length: int) -> int:
    """The shortest length with the frequencies of ``length`` tokens; 0 where those do not depend on it, or are not scaled yet."""
    kind = scaling.get("rope_type")
    if kind not in ("dynamic", "longrope"):
        return 0
    original: int = rope.parsed(scaling).get("original_max_position_embeddings", context)
    if length <= original:
        return 0
    return length if kind == "dynamic" else math.floor(original) + 1


def _yarn(plain: Tensor, base: float, width: int, original: int, given: Mapping[str, Any]) -> Tensor:
    """YaRN (Peng et al. 2023): fast frequencies stay, slow ones are divided by the factor, with a ramp between."""

    def index(turns: float) -> float:
        """Of the frequency that turns this often over the original context."""
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = index(given.get("beta_fast", 32)), index(given.get("beta_slow", 1))
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0  # with high below low, as transformers computes it, fast and slow change places
    places = torch.arange(len(plain), dtype=torch.float32, device=plain.device)
    slow = ((places - low) / (high - low)).clamp(0, 1)
    return plain / given["factor"] * slow + plain * (1 - slow)


def _temperature(given: Mapping[str, Any]) -> float:
    """Factor of cosines and sines in YaRN."""

    def of(weight: float) -> float:
        return 1.0 if given["factor"] <= 1 else 0.1 * weight * math.log(given["factor"]) + 1.0

    both = given.get("mscale", 0) and given.get("mscale_all_dim", 0)
    scale: float = given.get("attention_factor") or (
        of(given["mscale"]) / of(given["mscale_all_dim"]) if both else of(1.0)
    )
    return scale


def _llama3(plain: Tensor, original: int, given: Mapping[str, Any]) -> Tensor:
    """Llama 3.1 (Grattafiori et al. 2024): slow frequencies are divided by the factor, with a ramp between."""
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    turns = original * plain / (2 * math.pi)  # over the original context
    fast = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / given["factor"] * (1 - fast) + plain * fast
