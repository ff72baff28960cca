"""The loss mask of a dataset, PREFIX_loss: a dataset of equally long sequences, with 1 for each token that counts in the loss, else 0.

PREFIX.json stores the hash of the mask's tokens under "loss_mask", so that another dataset's mask is refused.
"""

from pathlib import Path

import numpy as np

from hpclm.base.errors import ConfigError
from hpclm.config import DataConfig
from hpclm.data.content import noted
from hpclm.data.indexed import IndexedDataset, files, sidecar

KEY = "loss_mask"  # in PREFIX.json
DTYPE = np.dtype(np.uint8)
SEQUENCES = 1 << 12  # sequences examined together
WITHOUT = "set data.loss_mask=ignore if all tokens count"


def prefix_of(prefix: str | Path) -> Path:
    """The prefix of the loss mask of dataset ``prefix``."""
    return Path(f"{prefix}_loss")


def exists(dataset: IndexedDataset) -> bool:
    """Whether ``dataset`` has a loss mask."""
    return files(prefix_of(dataset.prefix))[1].exists()


def opened(dataset: IndexedDataset, settings: DataConfig) -> IndexedDataset | None:
    """The loss mask of ``dataset``; None without one, or if the settings ignore it. ConfigError if the two do not match."""
    prefix = prefix_of(dataset.prefix)
    noted_hash = dataset.find(KEY, lambda: sidecar(dataset.prefix).get(KEY))
    there = exists(dataset)
    if settings.loss_mask == "ignore" or not (there or noted_hash or settings.loss_mask == "require"):
        return None
    if settings.order != "packed":
        raise ConfigError(f"dataset {dataset.prefix} has a loss mask, {prefix}; set data.order=packed, or {WITHOUT}")
    mask = IndexedDataset(prefix, dataset.facts)
    if mask.dtype != DTYPE:
        raise ConfigError(f"{prefix} is not a loss mask: it has {mask.dtype.name} tokens, not {DTYPE.name}; {WITHOUT}")
    content = mask.find("content", lambda: getattr(noted(prefix), "bin", None))
    if len(mask) != len(dataset) or not mask.find("fits", lambda: bool(np.array_equal(mask.sizes, dataset.sizes))):
        differ = f"its {len(mask)} sequences do not have the lengths of the dataset's {len(dataset)}"
    elif noted_hash and content and content != noted_hash:
        differ = f"{files(dataset.prefix)[2]} names another mask's hash"
    else:
        return mask
    raise ConfigError(f"{prefix} is not the loss mask of {dataset.prefix}: {differ}; preprocess again, or {WITHOUT}")


def without_counted(mask: IndexedDataset, span: range) -> int:
    """Number of sequences of ``span`` without a token that counts as a label; the first token of a sequence is not a label."""

    def count() -> int:
        counted = 0
        for begin in range(span.start, span.stop, SEQUENCES):
            sizes = mask.sizes[begin : min(begin + SEQUENCES, span.stop)].astype(np.int64)
            bounds = np.concatenate(([0], np.cumsum(sizes)))
            first = mask.place(begin)
            labels = np.flatnonzero(mask.flat[first : first + bounds[-1]] == 1)
            sequence = np.searchsorted(bounds, labels, "right") - 1
            counted += len(np.unique(sequence[labels > bounds[sequence]]))
        return len(span) - counted

    return mask.find(f"sequences {span.start} to {span.stop} without a token that counts", count)
