"""The phases of a run with data.order=per_dataset, and how much it has read of each dataset."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hpclm.base.metric_names import SAMPLES_OF, TOKENS_OF
from hpclm.config.checks import typed
from hpclm.rundir.rows import Row, fits


def tokens_read(rows: Iterable[Row]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Steps and tokens of each dataset, by its name. ``rows``: of steps."""
    by_name: dict[str, dict[int, int]] = {}
    for row in rows:
        for field, tokens in row.items():
            if field.startswith(TOKENS_OF) and fits(tokens, int):
                by_name.setdefault(field.removeprefix(TOKENS_OF), {})[row["step"]] = tokens
    return {
        name: (np.array([*steps], float), np.array([*steps.values()], float)) for name, steps in sorted(by_name.items())
    }


def facts(rows: Iterable[Row], settings: Mapping[str, Any]) -> dict[str, str]:
    """The phases that have begun, and how much has been read of each dataset, by title. ``settings``: of the run, by dotted key."""
    listed = sorted((row for row in rows if fits(row.get("phase"), int)), key=lambda row: row["step"])
    if not listed:
        return {}
    last = listed[-1]
    tokens = {name: int(values[-1]) for name, (_, values) in tokens_read(listed).items()}
    total = sum(tokens.values()) or 1
    read = (
        f"{name}: {count:,} tokens ({count / total:.1%}) in {last.get(SAMPLES_OF + name, 0):,} samples"
        for name, count in tokens.items()
    )
    begins = {0: 1} | {row["phase"]: row.get("phase_begin", 0) + 1 for row in listed}
    entries = settings.get("data.phases") or []
    ends = [*(begin - 1 for begin in [*begins.values()][1:]), last["step"]]
    phases = []
    for (phase, begin), end in zip(begins.items(), ends, strict=True):
        changed = "as the settings say"
        if 0 < phase <= len(entries):
            changed = " ".join(f"{key}={typed(value)}" for key, value in entries[phase - 1].items())
        phases.append(f"{phase}, steps {begin:,} to {end:,}: {changed}")
    return {"phases": "; ".join(phases), "read of each dataset": "; ".join(read)}
