"""What a run tells while it trains: metrics.jsonl, TensorBoard, log lines, and a live line on a terminal."""

import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.config import EngineConfig, LogConfig, ModelConfig
from hpclm.errors import unread
from hpclm.log import LIVE
from hpclm.model import count
from hpclm.progress import ProgressBar
from hpclm.rundir import metric_names, metrics_file
from hpclm.rundir.rows import Row, finite
from hpclm.rundir.summary import RunSummary
from hpclm.side_path import SidePath
from hpclm.training import log_lines
from hpclm.training.expert_load import ExpertLoad
from hpclm.training.tensorboard import EventFile
from hpclm.training.writer import WriterThread

log = logging.getLogger(__name__)

# BigScience's names for the same scalars, so that their dashboards keep working.
TAGS = {
    "loss": "lm-loss-training/lm loss",
    "lr": "learning-rate/learning-rate",
    "batch_size": "batch-size/batch-size",
    "grad_norm": "grad-norm/grad-norm",
    "loss_scale": "loss-scale/loss-scale",
    "step_seconds": "iteration-time/iteration-time",
    "tokens_per_second": "iteration-time/tokens per second",
    "mfu": "iteration-time/mfu",
    "hfu": "iteration-time/hfu",
    "data_fraction": "iteration-time/fraction waiting for data",
    "forward_seconds": "time/forward-compute-time",
    "backward_seconds": "time/backward-compute-time",
    "forward_backward_seconds": "time/forward-backward-time",
    "optimizer_seconds": "time/optimizer-time",
    "data_seconds": "time/batch-generator-time",
    "validation_loss": "lm-loss-validation/lm loss validation",
    "validation_perplexity": "lm-loss-validation/lm loss validation ppl",
}
BOARD_SECONDS = 20.0  # that TensorBoard may lag behind, where log lines are further apart


class Meter:
    """Has a thread write what each step measured; use it as a context manager."""

    def __init__(
        self,
        out: Path,
        config: LogConfig,
        start: tuple[int, int],
        total: int | None,
        speed: "Speed",
        summary: RunSummary,
        experts: ExpertLoad | None = None,
    ):
        """``start``: the step and samples the run resumes from. ``total``: its last step, where that is known. ``experts``: None if the model
        has none."""
        self.every, (self.start, self.samples), self.total, self.speed = config.every, start, total, speed
        self.out, self._file = out, metrics_file.appended(out)
        self.path = self._file.path
        self.losses: dict[tuple[int, str], float | None] = {}
        """On held-out data, by step and part, since the run was resumed and of the step it was resumed from."""
        self._scores = metrics_file.NewScores(out)
        self.folder = out / "tensorboard" if config.tensorboard else None
        self.summary = summary
        self._experts = experts
        self._open, self._writer = ExitStack(), WriterThread(idle=summary.tick)
        self._since: list[dict[str, Any]] = []
        self._warned: set[str] = set()
        self._rows = SidePath(f"{self.path} cannot be written")
        self._boards: tuple[EventFile, EventFile] | None = None
        self._boards_written = time.monotonic()
        self._board_files = SidePath(f"TensorBoard's files in {self.folder} cannot be written")
        self._scalars = SidePath("a scalar cannot be written for TensorBoard")
        self._display = SidePath("the progress of the run cannot be shown")

    def __enter__(self) -> "Meter":
        copied = set[Any]()
        """The scores that metrics.jsonl has."""
        self.summary.resume(self._resumed(copied))
        self._open.callback(self._close)
        self._rows.attempt(self._file.flush)
        self._board_files.attempt(self._open_boards)
        self._bar = self._open.enter_context(ProgressBar(self.total, initial=self.start, desc="step ", unit=""))
        try:
            metrics_file.forget_beside_after(self.out, self.start)
        except OSError as error:
            log.warning("%s cannot be rewritten: %s; training continues", error.filename, error.strerror)
        for row in self._scores.rows():
            if metrics_file.scores_key(row) not in copied:
                self._scored(row)
        self._open.enter_context(self._writer)
        return self

    def _resumed(self, copied: set[Any]) -> Iterator[Row]:
        """The rows so far, without those past the step that the run resumes from; ``copied`` gets the keys of scores."""
        try:
            for row in metrics_file.forget_after(self.out, self.start):
                if "tasks" in row:
                    copied.add(metrics_file.scores_key(row))
                elif "validation_loss" in row and row["step"] == self.start:
                    self.losses[self.start, row.get("part", "valid")] = row["validation_loss"]
                yield row
        except OSError as error:
            raise unread(error, self.path, "move it away, or choose another out") from error

    def __exit__(self, *ending: Any) -> None:
        self._open.__exit__(*ending)

    def _close(self) -> None:
        self._flush_boards()
        for board in self._boards or ():
            board.close()
        try:
            self._file.close()
        except OSError as error:
            log.warning("could not flush the last rows of %s: %s", self.path, error.strerror)
        if self._experts:
            self._experts.close()

    def _open_boards(self) -> None:
        if self.folder is not None:
            # the samples in a separate folder, since TensorBoard hides what lies past a step whatever the tag counts
            by_step, by_samples = EventFile(self.folder, self.start), EventFile(self.folder / "samples", self.samples)
            self._boards = by_step, by_samples
            self._write_boards()

    def _write_boards(self) -> None:
        for board in self._boards or ():
            board.flush()

    def _flush_boards(self) -> None:
        """Write what TensorBoard lacks; it is lost where that fails."""
        self._boards_written = time.monotonic()
        if not self._board_files.attempt(self._write_boards):
            for board in self._boards or ():
                board.close()

    def step(
        self, step: int, samples: int, measured: dict[str, float], expert_tokens: NDArray[np.float64] | None = None
    ) -> None:
        """One step, its number and the samples consumed so far; ``measured`` has batch_size and step_seconds among others.
        ``expert_tokens``: as of ExpertLoad.step."""
        row = {"step": step, "samples": samples, "time": round(time.time(), 3), **measured}
        row |= self.speed(int(measured["batch_size"]), measured["step_seconds"])
        self._writer(lambda: self._step(row, expert_tokens))

    def _step(self, row: dict[str, Any], expert_tokens: NDArray[np.float64] | None) -> None:
        step = row["step"]
        if self._experts:
            self._experts.step(expert_tokens)
            if step % self.every == 0 or step == self.total:
                row |= self._experts.logged(row, last=step == self.total)
                self.summary.note_experts(self._experts.problems())
        self._write(row)
        self.summary.measured(row)
        self._warn(row)
        self._since.append(row)
        loss, lr, *speed = log_lines.figures(row)
        self._bar.beside = (loss, *speed, lr)
        self._display.attempt(self._bar.update)
        if step % self.every == 0 or step == self.total or step == self.start + 1:
            self._tell(step)

    def _warn(self, row: dict[str, Any]) -> None:
        """Warn once that a step, or with loss_norm=microbatch a micro-batch, has no token that counts."""
        step, empty = row["step"], row.get("empty_micro_batches")
        if log_lines.is_without_loss(row) and "step" not in self._warned:
            self._warned.add("step")
            log.warning(
                "step %d has no loss: by the loss mask no token of its batch counts; its gradients are 0, so only momentum and weight "
                "decay change the weights. A larger batch.global_size avoids such steps. Later ones are counted in the log, and have "
                "counted_tokens 0 in %s",
                step,
                self.path.name,
            )
        elif empty and "micro-batch" not in self._warned:
            self._warned.add("micro-batch")
            log.warning(
                "step %d: %d of the micro-batches of one replica have no token that counts in the loss. With "
                "batch.loss_norm=microbatch the loss is the mean of those of the micro-batches, in which these count as 0, as in Megatron; "
                "batch.loss_norm=token gives the mean over tokens. Later steps have empty_micro_batches in %s",
                step,
                empty,
                self.path.name,
            )

    def evaluated(self, step: int, samples: int, loss: float, part: str) -> None:
        """A loss on held-out data; perplexity is exp(loss), capped at exp(20), as in Megatron."""
        self.losses[step, part] = loss
        row = {"step": step, "samples": samples, "time": round(time.time(), 3), "part": part}
        row |= {"validation_loss": loss, "validation_perplexity": log_lines.perplexity(loss)}
        self._writer(lambda: self._evaluated(row))

    def _evaluated(self, row: dict[str, Any]) -> None:
        name = row["part"].removeprefix("valid").removeprefix("/")
        self._write(row, f" {name}" if name else "")
        self.summary.measured(row)
        log.info("%s", log_lines.evaluation_line(row["step"], row["validation_loss"], name))

    def _scored(self, row: dict[str, Any]) -> None:
        """Scores of an earlier checkpoint at tasks, which hpclm evaluate --follow has measured."""
        self._write(row)
        for task, figures in row["tasks"].items():
            shown = [f"{name} {value:.4f}" for name, value in figures.items() if value is not None]
            log.info("step %d  %s  %s", row["step"], task, "  ".join(shown))
            for name, value in figures.items():
                self._board(f"tasks/{task} {name}", value, row["step"], row["samples"])

    def end(self, state: str, ending: str, code: int) -> None:
        """Everything is written: have the run's summary say how it ends."""
        self.summary.end(state, ending, code)

    def flush(self) -> None:
        """Return once everything is written; an error of the thread that writes is raised here, or at the next step."""
        self._writer.flush()

    def validation(self, step: int) -> float | None:
        """The loss on held-out data at ``step``, where that was measured; of several parts the mean."""
        losses = [loss for (at, _), loss in self.losses.items() if at == step and loss is not None]
        return sum(losses) / len(losses) if losses and all(map(math.isfinite, losses)) else None

    def _tell(self, step: int) -> None:
        """The log line: means over the steps since the last one."""
        rows, self._since = self._since, []
        seconds = sum(row["step_seconds"] for row in rows)
        row = rows[-1] | self.speed(sum(r["batch_size"] for r in rows), seconds)
        if losses := [r["loss"] for r in rows if not log_lines.is_without_loss(r)]:
            row |= {"loss": sum(losses) / len(losses), "counted_tokens": None}
        row["data_fraction"] = sum(r["data_seconds"] for r in rows) / seconds
        steps = log_lines.Interval(rows, row, seconds, self.total, first=step == self.start + 1)
        log.info("%s", log_lines.step_line(steps), extra=LIVE)
        self._flush_boards()
        for scored in self._scores.rows():
            self._scored(scored)

    def _write(self, row: dict[str, Any], suffix: str = "") -> None:
        """A row of metrics.jsonl, and its scalars under their tags, each followed by ``suffix``."""
        row = finite(row)
        self._rows.attempt(lambda: self._file.write(json.dumps(row) + "\n"), now=True)  # it keeps what it cannot write
        if suffix and any(tag + suffix in TAGS.values() for tag in TAGS.values()):
            suffix = f" ({suffix.strip()})"  # of a part named "ppl"
        for key, tag in TAGS.items():
            self._board(tag + suffix, row.get(key), row["step"], row["samples"])
        for name, value in metric_names.reported(row).items():
            self._board(name, value, row["step"], row["samples"])
        if time.monotonic() - self._boards_written > BOARD_SECONDS:
            self._flush_boards()

    def _board(self, tag: str, value: float | None, step: int, samples: int) -> None:
        """A scalar of TensorBoard's, where there is one."""
        if self._boards and value is not None:
            by_step, by_samples = self._boards
            self._scalars.attempt(lambda: by_step.add(tag, value, step), now=True)
            self._scalars.attempt(lambda: by_samples.add(f"{tag} vs samples", value, samples), now=True)


class NullMeter(Meter):
    """A meter of a rank other than 0: writes nothing."""

    def __init__(self, losses: dict[tuple[int, str], float | None]):
        """``losses``: on held-out data, by step and part, as far as they are known."""
        self.losses = losses

    def __enter__(self) -> "NullMeter":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def step(
        self, step: int, samples: int, measured: dict[str, float], expert_tokens: NDArray[np.float64] | None = None
    ) -> None:
        """Does nothing; rank 0 logs it."""

    def evaluated(self, step: int, samples: int, loss: float, part: str) -> None:
        """Only remembers it; rank 0 logs it."""
        self.losses[step, part] = loss

    def end(self, state: str, ending: str, code: int) -> None:
        """Does nothing; rank 0 logs it."""

    def flush(self) -> None:
        """Nothing is written."""


class Speed:
    """Tokens a second, and the part of the device's peak that the model's own arithmetic uses: MFU, and HFU with what is
    computed again."""

    def __init__(self, model: ModelConfig, engine: EngineConfig, peak_flops: float | None):
        """``peak_flops``: in bf16, of all processes together; None if unknown."""
        self.context, self.peak = model.context, peak_flops
        if peak_flops and engine.fp8:
            self.peak = peak_flops * count.fp8_gain(model)
        self.flops, self.again = count.flops_per_token(model), count.recompute_flops(model, engine.recompute)

    def __call__(self, samples: int, seconds: float) -> dict[str, float]:
        """Figures of ``samples`` samples in ``seconds``."""
        rate = samples * self.context / seconds
        figures = {"tokens_per_second": rate}
        if self.peak:
            figures["mfu"] = rate * self.flops / self.peak
            if self.again:
                figures["hfu"] = rate * (self.flops + self.again) / self.peak
        return figures
