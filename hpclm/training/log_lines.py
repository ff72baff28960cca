"""The log line of a step and of an evaluation, in hpclm's own words or as other projects' scripts expect it (log.style)."""

import math
from collections.abc import Callable, Mapping, Sequence
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
    skipped: int
    """Steps among them that did not change the weights."""
    per_epoch: float
    """Samples of one pass over the training data."""

    @property
    def step(self) -> int:
        """The last step."""
        return int(self.mean["step"])

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.seconds / len(self.rows)


def words(row: Mapping[str, Any]) -> str:
    """Loss, learning rate and speed."""
    parts = [f"loss {row['loss']:.4f}", f"lr {row['lr']:.3g}"]
    parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.1%}")
    if row.get("data_fraction", 0) > NOTABLE_WAIT:
        parts.append(f"{row['data_fraction']:.0%} waiting for data")
    return "  ".join(parts)


def own(steps: Interval) -> str:
    """As hpclm says it."""
    of, left = "", ""
    if steps.total:
        of, left = f"/{steps.total}", f"  {_clock((steps.total - steps.step) * steps.step_seconds)} left"
    return f"step {steps.step}{of}  {words(steps.mean)}  {steps.step_seconds:.3f} s/step{left}"


def own_evaluation(step: int, loss: float, part: str) -> list[str]:
    """As hpclm says it."""
    of = f" of {part}" if part else ""
    return [f"step {step}  validation loss{of} {loss:.4f}  perplexity {perplexity(loss):.2f}"]


def megatron(steps: Interval) -> str:
    """As Megatron-LM's training_log prints it."""
    row = steps.mean
    nan = sum(not math.isfinite(each["loss"]) for each in steps.rows)
    parts = [
        f" iteration {steps.step:8d}/{steps.total or 0:8d}",
        f"consumed samples: {row['samples']:12d}",
        f"elapsed time per iteration (ms): {steps.step_seconds * 1000:.1f}",
        f"learning rate: {row['lr']:.6E}",
        f"global batch size: {int(row['batch_size']):5d}",
        f"lm loss: {row['loss']:.6E}",
        f"loss scale: {row['loss_scale']:.1f}",
        f"grad norm: {row['grad_norm']:.3f}",
        f"number of skipped iterations: {steps.skipped:3d}",
        f"number of nan iterations: {nan:3d}",
    ]
    return " | ".join(parts) + " |"


def megatron_evaluation(step: int, loss: float, part: str) -> list[str]:
    """As Megatron-LM's evaluate_and_print_results prints it, between two rules."""
    where = f"iteration {step}{f' on {part}' if part else ''}"
    text = f" validation loss at {where} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    rule = "-" * (len(text) + 1)
    return [rule, text, rule]


def fairseq(steps: Interval) -> str:
    """As fairseq's train_inner logs it with --log-format simple; its losses are in bits."""
    row, bits = steps.mean, steps.mean["loss"] / math.log(2)
    batch = int(row["batch_size"])
    size = max(1, math.ceil(steps.per_epoch / batch)) if math.isfinite(steps.per_epoch) else steps.total or steps.step
    before = max(0, row["samples"] - batch)
    epoch = int(before / steps.per_epoch) + 1
    number = int((before - (epoch - 1) * steps.per_epoch) / batch) + 1 if math.isfinite(steps.per_epoch) else steps.step
    rate = row["tokens_per_second"]
    stats = {
        "loss": f"{bits:.3f}",
        "ppl": f"{_power(bits):.2f}",
        "wps": f"{rate:.1f}",
        "ups": f"{1 / steps.step_seconds:.2f}",
        "wpb": f"{rate * steps.step_seconds:.1f}",
        "bsz": f"{batch:g}",
        "num_updates": f"{steps.step}",
        "lr": f"{row['lr']:g}",
        "gnorm": f"{row['grad_norm']:.3f}",
        "loss_scale": f"{row['loss_scale']:g}",
        "train_wall": f"{steps.seconds:.0f}",
    }
    said = ", ".join(f"{name}={value}" for name, value in stats.items())
    return f"| INFO | train_inner | epoch {epoch:03d}:  {number:5d} / {size:d} {said}"


def fairseq_evaluation(step: int, loss: float, part: str) -> list[str]:
    """As fairseq's valid logs it."""
    bits, subset = loss / math.log(2), part or "valid"
    return [
        f"| INFO | valid | valid on '{subset}' subset | loss {bits:.3f} | ppl {_power(bits):.2f} | num_updates {step}"
    ]


STYLES: dict[str, tuple[Callable[[Interval], str], Callable[[int, float, str], list[str]]]] = {
    "hpclm": (own, own_evaluation),
    "megatron": (megatron, megatron_evaluation),
    "fairseq": (fairseq, fairseq_evaluation),
}
"""How a style says steps and evaluations, by the names of log.style."""


def perplexity(loss: float) -> float:
    """exp(loss), cut at exp(20) as the peers do; NaN where the loss is."""
    return math.exp(min(loss, 20.0))


def _power(bits: float) -> float:
    return 2.0 ** min(bits, 1000.0)


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
