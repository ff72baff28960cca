"""Names of metrics in metrics.jsonl: those of hpclm, and those that the user's blocks, engines and optimizers report."""

from collections.abc import Mapping
from typing import Any

RESERVED = frozenset(
    (
        "step",
        "samples",
        "time",
        "loss",
        "grad_norm",
        "skipped",
        "guarded",
        "z_loss",
        "lr",
        "loss_scale",
        "batch_size",
        "memory",
    )
    + (
        "data_fraction",
        "tokens_per_second",
        "mfu",
        "hfu",
        "spiking_since",
        "training_loss",
        "validation_loss",
        "validation_perplexity",
    )
    + ("part", "tasks", "counted_tokens", "empty_micro_batches")
)
"""hpclm's names in a row, besides those that end in _seconds or begin with qk_."""
EXPERT_FIGURES = ("expert_load_max", "expert_entropy", "dead_experts")
"""Figures of each layer with experts. In a row, a slash and the name of the block follow."""
MEASURED = frozenset(("z_loss", "guarded"))
"""Those of hpclm's that only some runs have, and that are reported as the user's are."""
CURVES = 60
"""Metrics of the user that a report draws, at most."""


def is_reserved(name: str) -> bool:
    """Whether nothing else may be reported under ``name``."""
    return name in RESERVED or name.endswith(("_seconds", "/")) or name.startswith("qk_") or is_of_experts(name)


def is_of_experts(name: str) -> bool:
    """Whether hpclm measures this of the experts of a layer."""
    return name.partition("/")[0] in (*EXPERT_FIGURES, "expert_tokens")


def is_users(name: str, value: Any) -> bool:
    """Whether a field of a row is a number that the user's code has reported."""
    return not is_reserved(name) and (value is None or type(value) in (int, float))


def reported(row: Mapping[str, Any]) -> dict[str, float | None]:
    """The numbers of a row with names that not every run has."""
    if "part" in row or "tasks" in row:
        return {}
    of_some_runs = (name for name in row if name in MEASURED or name.startswith("qk_") or is_of_experts(name))
    return {name: row[name] for name in (*of_some_runs, *(n for n, value in row.items() if is_users(n, value)))}
