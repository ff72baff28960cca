"""Muon (Jordan et al. 2024) for the matrices of the blocks, and AdamW for all other weights.

The arithmetic is that of torch.optim.Muon, bit for bit. A matrix is orthogonalised whole. If it is divided among processes, an exchange
gathers its update on one of them and returns the parts (hpclm.engine.matrix_exchange).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpclm.config import OptimConfig
from hpclm.config.optimizers import hidden_matrix
from hpclm.optim.adamw import AdamW, Scaled, bare, groups
from hpclm.optim.optimizers import Matrix, OptimizedWeight, WholeMatrices
from hpclm.parallel.placement import Fused

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Muon(Scaled, torch.optim.Optimizer):
    """Muon, with AdamW for the other weights; call share() before the first step."""

    add_param_group = bare(torch.optim.Optimizer.add_param_group)
    zero_grad = bare(torch.optim.Optimizer.zero_grad)

    def __init__(self, weights: Sequence[OptimizedWeight], optim: OptimConfig):
        self.optim = optim
        self.matrices = [weight for weight in weights if hidden_matrix(weight.placement)]
        others = groups([w for w in weights if not hidden_matrix(w.placement)], optim)
        self.adamw = AdamW(others, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
        matrix_groups = groups(self.matrices, optim)
        super().__init__([*self.adamw.param_groups, *matrix_groups], dict(lr=optim.lr))
        self.adamw.state = self.state
        self._group = {p: group for group in matrix_groups for p in group["params"]}

    def share(self, exchange: WholeMatrices) -> None:
        """Work on whole matrices through ``exchange``."""
        self.exchange = exchange

    def _parts(self, matrix: Matrix) -> Fused:
        """The matrices that are orthogonalised one by one."""
        return (matrix.fused if self.optim.split else None) or Fused(1, (matrix.shape[0],))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of all weights, without a closure; does not synchronise with the device."""
        self.adamw.grad_scale = self.grad_scale
        self.adamw.found_inf = self.found_inf
        self.adamw.step()
        skipped = self.found_inf.bool()
        for parameter in (weight.parameter for weight in self.matrices):
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
                state["step"] = torch.zeros_like(self.found_inf)
            state["step"] += 1 - self.found_inf
        for numbers in self.exchange.rounds:
            moved = [self._update(self.exchange.matrices[number], skipped) for number in numbers]
            for number, values in zip(numbers, self.exchange(numbers, moved, self._orthogonal), strict=True):
                self._apply(number, values, skipped)

    def _update(self, matrix: Matrix, skipped: Tensor) -> Tensor:
        """Add the gradient to the momentum; returns the update before orthogonalisation, in the type of the Newton-Schulz iterations."""
        kind = TYPES[self.optim.newton_schulz_type]
        momentum = self.optim.momentum
        parameter = matrix.weight.parameter
        gradient = matrix.of(parameter.grad) / self.grad_scale
        buffer = matrix.of(self.state[parameter]["momentum_buffer"])
        moved = buffer.lerp(gradient, 1 - momentum)
        # selected on the device; the host would have to wait to learn whether the step is skipped
        buffer.copy_(torch.where(skipped, buffer, moved))
        update = gradient.lerp(moved, momentum) if self.optim.nesterov else moved
        return update.to(kind)

    def _orthogonal(self, number: int, update: Tensor) -> Tensor:
        """[A, B] update -> [A, B]: the nearest orthogonal matrix, or the nearest one of each part."""
        steps = self.optim.newton_schulz_steps
        parts = self._parts(self.exchange.matrices[number])
        out = []
        for part in update.unflatten(0, (parts.groups, -1)).split(parts.rows, 1):
            matrix = newton_schulz(part.flatten(0, 1), steps)
            factor = self._ratio(matrix.shape) / self._ratio((parts.groups * parts.rows[0], matrix.shape[1]))
            out.append((matrix if factor == 1.0 else matrix * factor).unflatten(0, (parts.groups, -1)))
        return torch.cat(out, 1).flatten(0, 1)

    def _apply(self, number: int, direction: Tensor, skipped: Tensor) -> None:
        """Decay a matrix's values, and move them in ``direction``."""
        matrix = self.exchange.matrices[number]
        parameter = matrix.of(matrix.weight.parameter)
        columns = matrix.shape[1]
        group = self._group[matrix.weight.parameter]
        parts = self._parts(matrix)
        moved = parameter * (1 - group["lr"] * group["weight_decay"])
        moved.add_(direction.view_as(moved), alpha=-group["lr"] * self._ratio((parts.groups * parts.rows[0], columns)))
        parameter.copy_(torch.where(skipped, parameter, moved))

    def _ratio(self, shape: Sequence[int]) -> float:
        """optim.adjust for a matrix of this shape."""
        rows, columns = shape
        if self.optim.adjust == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """[A, B] -> approximately its orthogonal polar factor, with singular values between 0.7 and 1.2, in the type of ``x``.

    Quintic iterations (Jordan et al. 2024); eager, three products each.
    """
    tall = x.shape[0] > x.shape[1]
    (a, b, c) = COEFFICIENTS
    if tall:
        x = x.T  # so that ``square`` is the smaller of the two Gram matrices
    # the iteration converges for singular values up to 1, which the Frobenius norm bounds
    x = x / x.norm().clamp(min=EPS)
    for _ in range(steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
