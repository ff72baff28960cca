"""Position embeddings: sinusoidal, rotary (Su et al. 2021) and ALiBi (Press et al. 2022). Rotary embeddings support the
scalings that transformers' rope_parameters define for longer contexts.

T tokens in a sequence, B sequences, H heads of this process, D size of one head.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpclm.config import ModelConfig
from hpclm.config.rope import RopeConfig, parsed
from hpclm.parallel.mesh import SINGLE, Axis

FAIRSEQ_FIRST = 2  # fairseq counts positions from padding_idx + 1 = 2

Rates = tuple[Tensor, float]
"""[rotated features / 2] radians per position, and the factor of their cosines and sines."""


class PositionKind(NamedTuple):
    """How a model encodes positions."""

    table: Callable[[int, int], Tensor] | None = None
    """(context, hidden) -> table to add to the embeddings."""
    slopes: Callable[..., Tensor] | None = None
    """(heads, device, tp) -> [H] slopes: scores fall by slope x distance."""


def alibi_slopes(heads: int, device: torch.device, tp: Axis = SINGLE) -> Tensor:
    """[H] ALiBi slopes of this process's heads out of ``heads`` (Press et al. 2022)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]  # the paper's rule for other counts
    local = heads // tp.size
    return torch.tensor(slopes[tp.rank * local : (tp.rank + 1) * local], device=device)


def rotary(
    positions: Tensor, config: ModelConfig, rope: RopeConfig, length: int = 0, rates: Rates | None = None
) -> tuple[Tensor, Tensor]:
    """[T, B] positions -> cosines and sines [T, B, 1, rotated features] (Su et al. 2021, the half-rotation of Llama).

    ``rope``: the settings of the layer. ``length``: tokens of the sequences, on which some scalings depend. ``rates``: the result of
    rotary_rates(), if already computed.
    """
    rate, factor = rates or rotary_rates(config, rope, length, positions.device)
    # fp32 for any activations: an angle of a thousand radians has no fraction left in bf16
    angles = positions[..., None, None].float() * rate
    angles = torch.cat([angles, angles], -1)
    if factor == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * factor, angles.sin() * factor


def rotary_rates(config: ModelConfig, rope: RopeConfig, length: int, device: torch.device) -> Rates:
    """The frequencies of a layer with ``rope``, and the factor of their cosines and sines."""
    return frequencies(config.rotated, rope.base, rope.scaling, config.context, length, device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to x [T, B, H, D], or to its first features if there are fewer cosines."""
    rotated = cos.shape[-1]
    x, rest = (x, None) if rotated == x.shape[-1] else (x[..., :rotated], x[..., rotated:])
    first, second = x.chunk(2, -1)
    y = x * cos + torch.cat([-second, first], -1) * sin
    return y if rest is None else torch.cat([y, rest], -1)


def sinusoids(length: int, width: int) -> Tensor:
    """[length, width] fixed positions (Vaswani et al. 2017) as fairseq arranges them: sines, then cosines, from position 2.

    Computed on the CPU even if the model is built on the meta device.
    """
    half = width // 2
    steps = torch.arange(half, dtype=torch.float32, device="cpu")
    rates = torch.exp(steps * -(math.log(10000) / max(1, half - 1)))
    places = torch.arange(FAIRSEQ_FIRST, FAIRSEQ_FIRST + length, dtype=torch.float32, device="cpu")
    angles = places[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


def frequencies(
    width: int, base: float, scaling: Mapping[str, str], context: int, length: int, device: torch.device
) -> tuple[Tensor, float]:
    """[width / 2] radians per position, and the factor of cosines and sines.

    ``length``: tokens of the sequences, for scalings that depend on it (dynamic, longrope). ``context``: model.context.
    """
    given = parsed(scaling)
    kind = given.get("rope_type")
    factor = given.get("factor", 1.0)
    original = given.get("original_max_position_embeddings", context)
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    if kind == "dynamic" and length > original:  # NTK-aware, for the current length (bloc97, emozilla 2023)
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
        attention_factor: float = given.get("attention_factor", scale)
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device=device) * base**steps), attention_factor
    return plain, 1.0


def scaling_length(scaling: Mapping[str, str], context: int, length: int) -> int:
    """The shortest length with the same frequencies as ``length`` tokens; 0 if the frequencies do not depend on the length, or
    ``length`` is within the original context."""
    kind = scaling.get("rope_type")
    if kind not in ("dynamic", "longrope"):
        return 0
    original: int = parsed(scaling).get("original_max_position_embeddings", context)
    if length <= original:
        return 0
    return length if kind == "dynamic" else math.floor(original) + 1


def _yarn(plain: Tensor, base: float, width: int, original: int, given: Mapping[str, Any]) -> Tensor:
    """YaRN (Peng et al. 2023): fast frequencies stay, slow ones are divided by the factor, with a ramp between."""

    def index(turns: float) -> float:
        """Index of the frequency that turns this often over the original context."""
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = index(given.get("beta_fast", 32))
    high = index(given.get("beta_slow", 1))
    if given.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, width - 1)
    if low == high:  # if high is below low, fast and slow are swapped, as in transformers
        high += 0.001
    places = torch.arange(len(plain), dtype=torch.float32, device=plain.device)
    slow = ((places - low) / (high - low)).clamp(0, 1)
    return plain / given["factor"] * slow + plain * (1 - slow)


def _temperature(given: Mapping[str, Any]) -> float:
    """The factor of cosines and sines in YaRN."""
    factor = given["factor"]
    if given.get("attention_factor"):
        return float(given["attention_factor"])
    if given.get("mscale", 0) and given.get("mscale_all_dim", 0):
        return mscale(factor, given["mscale"]) / mscale(factor, given["mscale_all_dim"])
    return mscale(factor, 1.0)


def mscale(factor: float, weight: float) -> float:
    """The factor of queries and keys in YaRN, for positions scaled by ``factor``."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(plain: Tensor, original: int, given: Mapping[str, Any]) -> Tensor:
    """Llama 3.1 (Grattafiori et al. 2024): slow frequencies are divided by the factor, with a ramp between."""
    low = given["low_freq_factor"]
    high = given["high_freq_factor"]
    turns = original * plain / (2 * math.pi)  # over the original context
    fast = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / given["factor"] * (1 - fast) + plain * fast


POSITIONS = {
    "learned": PositionKind(),
    "sinusoidal": PositionKind(table=sinusoids),
    "rope": PositionKind(),
    "alibi": PositionKind(slopes=alibi_slopes),
    "none": PositionKind(),
}
