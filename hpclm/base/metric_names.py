"""Names of metrics in metrics.jsonl: hpclm's own, and the names that the user's blocks, engines and optimizers report."""

from collections.abc import Mapping
from typing import Any

_OF_HPCLM = (
    "step samples time data_hash loss grad_norm skipped guarded z_loss lr loss_scale batch_size memory data_fraction tokens_per_second mfu hfu "
    "spiking_since training_loss validation_loss validation_loss_ema validation_perplexity validation_bits_per_byte part tasks "
    "counted_tokens empty_micro_batches phase phase_begin"
)
SAMPLES_OF = "samples_of/"
TOKENS_OF = "tokens_of/"
"""Before the name of a dataset, with data.order=per_dataset: the samples and tokens read of it so far."""
RESERVED = frozenset(_OF_HPCLM.split())
"""hpclm's names in a row. Names that end in _seconds or begin with qk_ are hpclm's too."""
EXPERT_FIGURES = ("expert_load_max", "expert_entropy", "dead_experts")
"""Figures of each layer with experts. In a row, a slash and the name of the block follow."""
MEASURED = frozenset(("z_loss", "guarded"))
"""hpclm's metrics that only some runs have. Reports show them like the user's metrics."""
CURVES = 60
"""The maximum number of the user's metrics that a report draws."""


def is_reserved(name: str) -> bool:
    """Whether ``name`` belongs to hpclm, so that the user's code must not report it."""
    if name in RESERVED or name.endswith(("_seconds", "/")):
        return True
    return name.startswith(("qk_", SAMPLES_OF, TOKENS_OF)) or is_of_experts(name)


def is_of_experts(name: str) -> bool:
    """Whether ``name`` is one of hpclm's metrics of the experts in a layer."""
    return name.partition("/")[0] in (*EXPERT_FIGURES, "expert_tokens")


def is_users(name: str, value: Any) -> bool:
    """Whether the field ``name`` of a row is a number that the user's code has reported."""
    return not is_reserved(name) and (value is None or type(value) in (int, float))


def reported(row: Mapping[str, Any]) -> dict[str, float | None]:
    """The metrics in a row that only some runs have: first hpclm's, then the user's."""
    if "part" in row or "tasks" in row:
        return {}
    measured = [name for name in row if name in MEASURED or name.startswith(("qk_", TOKENS_OF)) or is_of_experts(name)]
    of_user = [name for name, value in row.items() if is_users(name, value)]
    return {name: row[name] for name in (*measured, *of_user)}
