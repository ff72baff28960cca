"""When a run begins, decides whether data.split divides datasets between documents or inside documents (data.split_by)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from hpclm.config import RunConfig
from hpclm.data import loss_mask
from hpclm.data.corpus import SPLITS, divided, open_dataset
from hpclm.data.order import samples_in, split_bounds, split_parts
from hpclm.data.scan import SharedFacts

SplitBy = Literal["documents", "tokens"]


def resolved(run: RunConfig, begun: Callable[[], SplitBy | None] = lambda: None) -> RunConfig:
    """``run`` with data.split_by, if data.split divides its data.

    ``begun``: returns the value that the run has begun with, which it keeps; None for a new run. ConfigError if the data cannot be
    opened.
    """
    data = run.data
    if data.split_by or data.source != "indexed" or data.train or not (data.prefix or data.blend):
        return run
    return replace(run, data=replace(data, split_by=begun() or _chosen(run)))


def _chosen(run: RunConfig) -> SplitBy:
    """Returns "documents" in most cases. Returns "tokens" if documents can be divided and whole ones would leave less than one sample for
    training or for an evaluation."""
    data = run.data
    used = ["train"]
    if run.evaluate.every:
        used.append("valid")
    parts = [name for name, share in zip(SPLITS, split_parts(data.split), strict=True) if share and name in used]
    if data.break_mode:
        return "documents"
    short = False
    for prefix in divided(data).prefixes:
        dataset = open_dataset(prefix, SharedFacts())
        if loss_mask.opened(dataset, data) is not None:
            return "documents"
        bounds = dict(zip(SPLITS, split_bounds(data.split, len(dataset), data.order), strict=True))
        for name in parts:
            tokens = dataset.place(bounds[name][1]) - dataset.place(bounds[name][0])
            if data.order == "packed" or data.short_part == "repeat":
                short |= not tokens
            else:
                short |= not samples_in(tokens, run.model.context, data.keep_partial and name != "train")
    return "tokens" if short else "documents"
