"""The figures on the load of experts in metrics: EXPERT_FIGURES of metric_names.py, for each layer."""

import numpy as np
from numpy.typing import NDArray


def layer_figures(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of [L, E] tokens, none of them of a layer without any: [3, L], for each layer the largest load of an expert, in units of the mean;
    the entropy of the shares, divided by that of equal ones; and how many experts have none."""
    experts = counts.shape[1]
    shares = counts / counts.sum(1, keepdims=True)
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(1)
    relative = entropy / np.log(experts) if experts > 1 else np.ones(len(counts))
    return np.stack([shares.max(1) * experts, relative, (counts == 0).sum(1)])
