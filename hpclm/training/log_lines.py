"""The log line of a step and of an evaluation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NOTABLE_WAIT = 0.05  # part of the step time spent waiting for data from which the log line says so


@dataclass(frozen=True)
class Interval:
    """The steps since the last line."""

    rows: Sequence[Mapping[str, Any]]
    mean: Mapping[str, Any]
    """The last row, with the mean loss and speed of all."""
    seconds: float
    total: int | None
    """The last step of the run, where that is known."""
    first: bool = False
    """Whether this is the first step of an attempt, which may compile: how long it took says nothing of those to come."""

    @property
    def step(self) -> int:
        """The last step."""
        return int(self.mean["step"])

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.seconds / len(self.rows)


def figures(row: Mapping[str, Any]) -> list[str]:
    """Loss, learning rate and speed."""
    loss = "no loss" if is_without_loss(row) else f"loss {row['loss']:.4f}"
    parts = [loss, f"lr {row['lr']:.3g}"]
    parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.1%}")
    return parts


def is_without_loss(row: Mapping[str, Any]) -> bool:
    """Whether no token of the step counted in the loss."""
    return row.get("counted_tokens") == 0


def step_line(steps: Interval) -> str:
    """The line of some steps."""
    parts, waiting = figures(steps.mean), steps.mean.get("data_fraction", 0)
    if without := sum(map(is_without_loss, steps.rows)):
        parts[0] += f" ({without} of {len(steps.rows)} steps without a token that counts)"
    if waiting > NOTABLE_WAIT:
        parts.append(f"{waiting:.0%} waiting for data")
    parts.append(f"{steps.step_seconds:.3f} s/step")
    if steps.total and not steps.first:
        parts.append(f"{_clock((steps.total - steps.step) * steps.step_seconds)} left")
    of = f"/{steps.total}" if steps.total else ""
    return "  ".join([f"step {steps.step}{of}", *parts])


def evaluation_line(step: int, loss: float, part: str) -> str:
    """The line of an evaluation; ``part``: of which data, where there are several."""
    of = f" of {part}" if part else ""
    return f"step {step}  validation loss{of} {loss:.4f}  perplexity {perplexity(loss):.2f}"


def perplexity(loss: float) -> float:
    """exp(loss), capped at exp(20), as in Megatron; NaN where the loss is."""
    return math.exp(min(loss, 20.0))


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
