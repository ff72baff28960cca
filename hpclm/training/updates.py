"""Whether an optimizer updates weights as AdamW does (Loshchilov and Hutter 2019).

Its state is fp32 in every compute type. So an update can be repeated from the state alone, and compared to a rounding of fp32, where
a comparison of two ways to compute has to allow what the type costs.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hpclm.config import OptimConfig
from hpclm.optim.optimizers import rate_and_decay

FLOOR = 2e-4  # relative; the order of operations changes an update in fp32 by less
ROUNDINGS = 4.0  # of a weight

State = Mapping[str, Tensor]
"""Values of a weight by its NAME, and of its moments as exp_avg of NAME and exp_avg_sq of NAME, once there are any."""


def misupdated(optim: OptimConfig, lr: float, shapes: Mapping[str, Sequence[int]], states: Sequence[State]) -> str:
    """The first weight that one of the updates between ``states``, the first of a run, has not changed as AdamW does; empty if none.

    ``shapes``: of the whole weights, by name.
    """
    for step in range(1, len(states)):
        for name, shape in shapes.items():
            if f"exp_avg of {name}" not in states[step]:  # which the comparison with plain steps reports
                continue
            _, decay = rate_and_decay(name, shape, optim)
            for what, off, allowed in _errors(optim, lr, decay, name, step, states[step - 1], states[step]):
                if not off <= allowed:
                    return f"update {step}: {what} of {name} is not AdamW's, by {off / allowed:.2g} times a rounding"
    return ""


def _errors(
    optim: OptimConfig, lr: float, decay: float, name: str, step: int, old: State, new: State
) -> Iterator[tuple[str, float, float]]:
    """Of the second moment and of the weight: the norm of the difference from AdamW's, and what rounding may make of it."""
    (beta1, beta2), eps = optim.betas, torch.finfo(torch.float32).eps
    relative = FLOOR + eps / (1 - beta2)
    first, second = f"exp_avg of {name}", f"exp_avg_sq of {name}"
    weight, m, v = (state.double() for state in (old[name], new[first], new[second]))
    m_old, v_old = (old[moment].double() if moment in old else torch.zeros_like(m) for moment in (first, second))
    gradient = (m - beta1 * m_old) / (1 - beta1)
    right = beta2 * v_old + (1 - beta2) * gradient.square()
    yield "exp_avg_sq", float((v - right).norm()), float(relative * right.norm())
    denominator = (v / (1 - beta2**step)).sqrt() + optim.eps
    change = -lr * (decay * weight + m / (1 - beta1**step) / denominator)
    off = new[name].double() - weight - change
    yield "the change", float(off.norm()), float(relative * change.norm() + ROUNDINGS * eps * weight.norm())
