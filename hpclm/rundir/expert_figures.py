"""Computes the figures of metrics.jsonl on the load of experts: EXPERT_FIGURES of metric_names.py, for each layer."""

import numpy as np
from numpy.typing import NDArray


def layer_figures(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Tokens per layer and expert [L, E] -> [3, L]: peak load / mean, normalised entropy, idle experts. Every layer needs at least one
    token."""
    experts = counts.shape[1]
    shares = counts / counts.sum(1, keepdims=True)
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(1)
    relative = np.ones(len(counts))
    if experts > 1:
        relative = entropy / np.log(experts)
    return np.stack([shares.max(1) * experts, relative, (counts == 0).sum(1)])
