"""optim.guard: keep outliers from changing the weights much, by what the steps before had. The host waits for nothing, and all ranks
decide alike, because they have the same losses and norms.

skip_step is SkipStep of OLMo 2 (OLMo et al. 2025; OLMo-core's SkipStepOptimizer): mean and deviation of 128 steps, 6 sigma, from 63
steps on. clip_update is what Marin trains with (Levanter's ClipUpdateNormConfig): 3 sigma of the norms of updates before they are
multiplied by the learning rate, from 64 steps on. Values that are not finite do not count.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hpclm.engine.step import GlobalNorm

STEPS = 128


class UpdateGuard:
    """optim.guard=none."""

    name, columns = "none", 0
    sigma, min_steps, correction = 0.0, 0, 0
    lr = 0.0
    """Of the current step."""
    held_back: Tensor | float = 0.0
    """1 if the last update was skipped, though loss and gradients were finite."""
    counted: Tensor | None = None
    """Of the current step: tokens that count in the loss; without any its loss and gradients say nothing. None: not known."""

    def __init__(self, norm: GlobalNorm, device: torch.device):
        """``norm``: of what each process updates."""
        self.norm, self.weights = norm, norm.weights
        rows = STEPS if self.columns else 0
        self.window = torch.full((rows, self.columns), torch.nan, dtype=torch.float64, device=device)
        """[rows, columns]: what is compared, of the last steps; NaN where it does not count."""
        self.metrics: dict[str, Tensor] = {}
        """``guarded``: 1 if the last update was skipped or limited."""

    @contextmanager
    def around(self, loss: Tensor, norm: Tensor, bad: Tensor) -> Iterator[Tensor]:
        """Update inside this context, unless what it yields is 1. ``norm``: of the gradients; ``bad``: 1 if they are not finite."""
        yield bad

    def limits(self, values: Tensor) -> Tensor:
        """What [columns] values may be at most by the steps before; then they enter the window."""
        finite = self.window.isfinite()
        count = finite.sum(0)
        mean = self.window.where(finite, 0.0).sum(0) / count
        variance = (self.window - mean).square().where(finite, 0.0).sum(0) / (count - self.correction)
        values = values.double()
        # the values enter after their limits are computed: an outlier must not raise its own limit
        self.window = torch.cat([self.window[1:], values.where(values.isfinite(), torch.nan)[None]])
        return torch.where(count >= self.min_steps, mean + self.sigma * variance.sqrt(), torch.inf)

    def scalars(self) -> dict[str, Any]:
        """The window, as JSON."""
        rows = [[value if value == value else None for value in row] for row in self.window.tolist()]
        return {"guard": {"name": self.name, "window": rows}}

    def form(self, saved: Any) -> Any:
        """What a saved scalar must look like: an empty window; another guard's is not read."""
        name = saved.get("name") if isinstance(saved, dict) else None
        if name in [other for other in GUARDS if other != self.name]:
            return saved
        return {"name": self.name if name == self.name else {}, "window": [[None] * self.columns] * len(self.window)}

    def load(self, scalars: dict[str, Any]) -> None:
        """Set the window to a saved one, or empty it if there is none of this guard."""
        saved = scalars.get("guard") or {}
        self.window.fill_(torch.nan)
        if self.columns and saved.get("name") == self.name:
            rows = [[torch.nan if value is None else value for value in row] for row in saved["window"]]
            self.window.copy_(torch.tensor(rows, dtype=torch.float64))


class SkipStep(UpdateGuard):
    """optim.guard=skip_step."""

    name, columns = "skip_step", 2
    sigma, min_steps, correction = 6.0, 63, 1

    @contextmanager
    def around(self, loss: Tensor, norm: Tensor, bad: Tensor) -> Iterator[Tensor]:
        """As UpdateGuard's; also 1 for an outlier."""
        values = torch.stack([loss.double(), norm.double()])
        if self.counted is not None:
            values = values.where(self.counted > 0, torch.nan)
        # comparisons with NaN are false, so a step without counted tokens is no outlier; one that is not finite counts
        # as bad only
        outlier = (values > self.limits(values)).any().float() * (1 - bad)
        self.metrics, self.held_back = {"guarded": outlier}, outlier
        yield bad + outlier


class ClipUpdate(UpdateGuard):
    """optim.guard=clip_update; needs a copy of the weights during an update."""

    name, columns = "clip_update", 1
    sigma, min_steps, correction = 3.0, 64, 0

    @contextmanager
    def around(self, loss: Tensor, norm: Tensor, bad: Tensor) -> Iterator[Tensor]:
        """As UpdateGuard's; then takes back a part of the update if it is too large."""
        weights = [weight.parameter.detach() for weight in self.weights]
        # the norm of an update is known only after it
        back = [weight.clone() for weight in weights]
        yield bad
        torch._foreach_sub_(back, weights)
        size = self.norm(back) / self.lr
        size = size.where(bad == 0, torch.nan)[None]
        limit = self.limits(size)
        clipped = (size > limit).float()
        part = torch.where(clipped > 0, 1 - limit / size, 0.0).float()
        for weight, change in zip(weights, back, strict=True):
            weight.add_(change * part)
        self.metrics = {"guarded": clipped[0]}


GUARDS: dict[str, type[UpdateGuard]] = {kind.name: kind for kind in (UpdateGuard, SkipStep, ClipUpdate)}
