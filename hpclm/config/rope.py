"""Settings of rotary positions: the kinds of scaling, and the parameters of each."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpclm.base.registry import hint
from hpclm.config.checks import as_list
from hpclm.config.reading import number
from hpclm.config.section import Section
from hpclm.config.setting import setting

ROPE = "model.positions=rope"

KINDS: dict[str, tuple[str, str]] = {
    "linear": ("factor", ""),
    "dynamic": ("factor original_max_position_embeddings", ""),
    "yarn": (
        "factor original_max_position_embeddings",
        "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate",
    ),
    "llama3": ("factor original_max_position_embeddings low_freq_factor high_freq_factor", ""),
    "longrope": ("original_max_position_embeddings short_factor long_factor", "factor attention_factor"),
}
"""kind -> (required parameters, optional parameters), by their names in config.json."""
LISTS = ("short_factor", "long_factor")


@dataclass(frozen=True)
class RopeConfig(Section, key="model.rope"):
    """Rotary positions."""

    base: float = setting(10000.0, "Base of rotary frequencies.", more_than=1, only_with=ROPE)
    fraction: float = setting(
        1.0, "Rotated part of each head (GPT-NeoX's rotary_pct).", more_than=0, at_most=1, only_with=ROPE
    )
    scaling: dict[str, str] = setting(
        {},
        "Keys of rope_parameters in transformers: rope_type (linear, dynamic, yarn, llama3, longrope), factor, ...",
        only_with=ROPE,
    )
    window_base: float | None = setting(
        None, "Base of window layers; null: the same.", more_than=1, only_with=(ROPE, "model.attention.window")
    )
    window_scaled: bool = setting(
        True, "Scale window layers too.", only_with="model.attention.window", warn_without="model.rope.scaling"
    )


def parsed(scaling: Mapping[str, str]) -> dict[str, Any]:
    """The parameters as numbers, lists of numbers or booleans; `rope_type` stays text. ValueError for anything else."""
    return {name: _value(name, text) for name, text in scaling.items()}


def _value(name: str, text: str) -> Any:
    if name == "rope_type":
        return text
    value: Any = json.loads(text.lower()) if name in (*LISTS, "truncate") else number(text)
    if name == "truncate":
        right = isinstance(value, bool)
    else:
        parts = as_list(value)
        right = isinstance(value, list) == (name in LISTS) and all(type(part) in (int, float) for part in parts)
        right = right and all(0 < part < math.inf for part in parts)
    if not right:
        raise ValueError(name)
    return value


def scaling_problems(scaling: Mapping[str, str], rotated: int) -> Iterator[str]:
    """Problems with model.rope.scaling. ``rotated``: the number of rotated features per head."""
    if not scaling:
        return
    kind = scaling.get("rope_type", "")
    if kind not in KINDS:
        yield f"model.rope.scaling.rope_type={kind or 'null'} must be one of {', '.join(KINDS)}.{hint(kind, KINDS)}"
        return
    needs, may = (names.split() for names in KINDS[kind])
    names = set(scaling) - {"rope_type"}
    yield from (f"model.rope.scaling: {kind} needs {name}" for name in needs if name not in names)
    for name in sorted(names - {*needs, *may}):
        guess = hint(name, [*needs, *may])
        sentence = f"model.rope.scaling.{name} has no effect with rope_type={kind}"
        yield f"{sentence}.{guess}" if guess else sentence
    for name in sorted(names):
        try:
            value = parsed({name: scaling[name]})[name]
        except ValueError:
            yield f"model.rope.scaling.{name}={scaling[name]} must be {_kind(name)}"
            continue
        if name in LISTS and len(value) != rotated // 2:
            yield f"model.rope.scaling.{name} has {len(value)} numbers, but {rotated // 2} frequencies are scaled"
    low = number(scaling.get("low_freq_factor", "")) or 0
    high = number(scaling.get("high_freq_factor", "")) or 1
    if kind == "llama3" and names <= {*needs} and low >= high:
        yield "model.rope.scaling.low_freq_factor must be less than high_freq_factor"


def _kind(name: str) -> str:
    if name in LISTS:
        return "a list of numbers of more than 0, such as '[1.0, 1.5]'"
    return "true or false" if name == "truncate" else "a number of more than 0"
