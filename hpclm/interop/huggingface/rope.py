"""Rotary positions in a config.json: rope_theta and rope_scaling, or rope_parameters since transformers 5."""

from collections.abc import Iterator

from hpclm.interop.huggingface.family import Json


def base(tree: Json, key: str = "rope_theta") -> float:
    """Base of the wavelengths."""
    return float(_parameters(tree).get("rope_theta", tree.get(key, 10000.0)))


def turned(tree: Json, part: str = "partial_rotary_factor", absent: float = 1.0) -> Iterator[str]:
    """What in the rotary positions is not ours: scaled wavelengths, or a part of each head left as it is.

    ``absent``: what the absence of ``part`` means.
    """
    parameters = _parameters(tree)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        yield f"rope_type={kind}, and hpclm's rotary positions are not scaled"
    factor = parameters.get("partial_rotary_factor", tree.get(part, absent))
    if factor != 1.0:
        yield f"{part}={factor}, and hpclm turns every feature of a head"


def _parameters(tree: Json) -> Json:
    return tree.get("rope_parameters") or tree.get("rope_scaling") or {}
