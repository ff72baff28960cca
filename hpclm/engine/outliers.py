"""optim.guard: keep outlier steps from changing the weights much, judged by previous steps. The host never waits. All ranks agree,
because they have the same losses and norms.

skip_step is SkipStep of OLMo 2 (OLMo et al. 2025; OLMo-core's SkipStepOptimizer): mean and deviation of 128 steps, 6 sigma, after 63
steps. clip_update is Marin's rule (Levanter's ClipUpdateNormConfig): 3 sigma of the update norms before the learning rate, after 64
steps. Values that are not finite do not count.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hpclm.engine.step import GlobalNorm

STEPS = 128


class UpdateGuard:
    """optim.guard=none: lets every update pass."""

    name = "none"
    columns = 0
    sigma = 0.0
    min_steps = 0
    correction = 0
    lr = 0.0
    """The learning rate of the current step."""
    held_back: Tensor | float = 0.0
    """1 if the last update was skipped, though loss and gradients were finite."""
    counted: Tensor | None = None
    """Tokens of the current step that count in the loss; if 0, the loss and gradients mean nothing. None: unknown."""

    def __init__(self, norm: GlobalNorm, device: torch.device):
        """``norm``: the norm of the values that each process updates."""
        self.norm = norm
        self.weights = norm.weights
        rows = STEPS if self.columns else 0
        self.window = torch.full((rows, self.columns), torch.nan, dtype=torch.float64, device=device)
        """[rows, columns]: the compared values of the last steps; NaN where a value does not count."""
        self.metrics: dict[str, Tensor] = {}
        """``guarded``: 1 if the last update was skipped or limited."""

    @contextmanager
    def around(self, loss: Tensor, norm: Tensor, bad: Tensor) -> Iterator[Tensor]:
        """Update inside this context, unless it yields 1. ``norm``: norm of the gradients; ``bad``: 1 if they are not finite."""
        yield bad

    def limits(self, values: Tensor) -> Tensor:
        """Upper limits of the [columns] ``values``, from previous steps; then adds the values to the window."""
        finite = self.window.isfinite()
        count = finite.sum(0)
        mean = self.window.where(finite, 0.0).sum(0) / count
        variance = (self.window - mean).square().where(finite, 0.0).sum(0) / (count - self.correction)
        values = values.double()
        # the values enter only now: an outlier must not raise its own limit
        self.window = torch.cat([self.window[1:], values.where(values.isfinite(), torch.nan)[None]])
        return torch.where(count >= self.min_steps, mean + self.sigma * variance.sqrt(), torch.inf)

    def scalars(self) -> dict[str, Any]:
        """The window, as JSON."""
        rows = [[value if value == value else None for value in row] for row in self.window.tolist()]
        return {"guard": {"name": self.name, "window": rows}}

    def form(self, saved: Any) -> Any:
        """The expected form of a saved scalar: an empty window; another guard's window is ignored."""
        name = saved.get("name") if isinstance(saved, dict) else None
        if name in [other for other in GUARDS if other != self.name]:
            return saved
        return {"name": self.name if name == self.name else {}, "window": [[None] * self.columns] * len(self.window)}

    def load(self, scalars: dict[str, Any]) -> None:
        """Set the window to the saved one, or empty it if this guard saved none."""
        saved = scalars.get("guard") or {}
        self.window.fill_(torch.nan)
        if self.columns and saved.get("name") == self.name:
            rows = [[torch.nan if value is None else value for value in row] for row in saved["window"]]
            self.window.copy_(torch.tensor(rows, dtype=torch.float64))


class SkipStep(UpdateGuard):
    """optim.guard=skip_step: skips the update of an outlier."""

    name = "skip_step"
    columns = 2
    sigma = 6.0
    min_steps = 63
    correction = 1

    @contextmanager
    def around(self, loss: Tensor, norm: Tensor, bad: Tensor) -> Iterator[Tensor]:
        """See UpdateGuard.around; also yields 1 for an outlier."""
        values = torch.stack([loss.double(), norm.double()])
        if self.counted is not None:
            values = values.where(self.counted > 0, torch.nan)
        # comparisons with NaN are false, so a step without counted tokens is no outlier; a non-finite step
        # counts only as bad
        outlier = (values > self.limits(values)).any().float() * (1 - bad)
        self.metrics = {"guarded": outlier}
        self.held_back = outlier
        yield bad + outlier


class ClipUpdate(UpdateGuard):
    """optim.guard=clip_update; needs a copy of the weights during an update."""

    name = "clip_update"
    columns = 1
    sigma = 3.0
    min_steps = 64
    correction = 0

    @contextmanager
    def around(self, loss: Tensor, norm: Tensor, bad: Tensor) -> Iterator[Tensor]:
        """See UpdateGuard.around; afterwards takes back part of an update that is too large."""
        weights = [weight.parameter.detach() for weight in self.weights]
        # the norm of an update is known only after it
        back = [weight.clone() for weight in weights]
        yield bad
        if weights:  # a pipeline stage may train none
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
