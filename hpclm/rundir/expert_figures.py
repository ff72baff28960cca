"""The figures on the load of experts in metrics: EXPERT_FIGURES of metric_names.py, for each layer."""

import numpy as np
from numpy.typing import NDArray


def layer_figures(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """``counts``: tokens per layer and expert, [L, E]; every layer has at least one token.

    Returns [3, L]: the largest load of an expert as a multiple of the mean, the normalised entropy, and the number of idle experts.
    """
    experts = counts.shape[1]
    shares = counts / counts.sum(1, keepdims=True)
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(1)
    relative = np.ones(len(counts))
    if experts > 1:
        relative = entropy / np.log(experts)
    return np.stack([shares.max(1) * experts, relative, (counts == 0).sum(1)])
