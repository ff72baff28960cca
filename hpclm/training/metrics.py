"""The metrics of a run: metrics.jsonl, TensorBoard, log lines, and a progress bar on a terminal.

A thread writes them, so that the training loop does not wait for disk or terminal.
"""

import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.base.errors import unread
from hpclm.base.log import LIVE
from hpclm.base.progress import ProgressBar
from hpclm.base.side_path import SidePath
from hpclm.checkpoint import Progress
from hpclm.config import EngineConfig, LogConfig, ModelConfig
from hpclm.model import count
from hpclm.rundir import metrics_file
from hpclm.rundir.rows import Row, finite
from hpclm.rundir.summary import RunSummary
from hpclm.training.expert_load import ExpertLoad
from hpclm.training.tensorboard import TensorBoard

log = logging.getLogger(__name__)
MAX_QUEUED = 1000  # calls in the thread's queue; the training loop waits while it is full
IDLE = 1.0  # seconds without work after which the thread calls ``idle``
NOTABLE_WAIT = (
    0.05  # fraction of the step time spent waiting for data, or for callbacks, above which the log line shows it
)


class Meter:
    """Writes the metrics of each step, in a thread; use it as a context manager."""

    def __init__(
        self,
        out: Path,
        config: LogConfig,
        begin: Progress,
        total: int | None,
        speed: "Speed",
        summary: RunSummary,
        experts: ExpertLoad | None = None,
        read_of_datasets: Callable[[int], dict[str, int]] = lambda samples: {},
    ):
        """``begin``: the progress that the run resumes from. ``total``: the run's last step, if known. ``read_of_datasets``: see
        RunData."""
        self.out = out
        self.every = config.every
        self.start = begin.step
        self.total = total
        self.speed = speed
        self.summary = summary
        self.losses: dict[str, float | None] = {}
        """Losses on held-out data by part, at the step that the run resumes from."""
        self._file = metrics_file.appended(out, summary.is_mine)
        self.path = self._file.path
        self._rows = SidePath(f"{self.path} cannot be written")
        self._scores = metrics_file.NewScores(out)
        self._copied = set[Any]()  # keys of the scores that metrics.jsonl has
        self._experts = experts
        self._read_of_datasets = read_of_datasets
        self._board = TensorBoard(out, begin) if config.tensorboard else None
        self._display = SidePath("the progress of the run cannot be shown")
        self._open = ExitStack()
        self._writer = WriterThread(idle=summary.tick)
        self._unlogged: list[dict[str, Any]] = []
        """Rows since the last log line."""
        self._warned: set[str] = set()

    def __enter__(self) -> "Meter":
        self.summary.resume(self._resumed())
        self._open.callback(self._close)
        self._rows.attempt(self._file.flush)
        if self._board:
            self._board.start()
        self._bar = self._open.enter_context(ProgressBar(self.total, initial=self.start, desc="step ", unit=""))
        try:
            metrics_file.forget_beside_after(self.out, self.start)
        except OSError as error:
            log.warning("%s cannot be rewritten: %s; training continues", error.filename, error.strerror)
        for row in self._scores.rows():
            if metrics_file.scores_key(row) not in self._copied:
                self._scored(row)
        self._open.enter_context(self._writer)
        return self

    def _resumed(self) -> Iterator[Row]:
        """Remove the rows after the step that the run resumes from. Yields the other rows, and notes their losses and scores."""
        try:
            for row in metrics_file.forget_after(self.out, self.start):
                if "tasks" in row:
                    self._copied.add(metrics_file.scores_key(row))
                elif "validation_loss" in row and row["step"] == self.start:
                    self.losses[row.get("part", "valid")] = row["validation_loss"]
                yield row
        except OSError as error:
            raise unread(error, self.path, "move it away, or choose another out") from error

    def __exit__(self, *ending: Any) -> None:
        self._open.__exit__(*ending)

    def _close(self) -> None:
        if self._board:
            self._board.close()
        try:
            self._file.close()
        except OSError as error:
            log.warning("could not flush the last rows of %s: %s", self.path, error.strerror)
        if self._experts:
            self._experts.close()

    def step(
        self, step: int, samples: int, measured: dict[str, Any], expert_tokens: NDArray[np.float64] | None = None
    ) -> dict[str, Any]:
        """Record a step; returns its row. ``samples``: consumed so far. ``measured``: the step's other fields, such as batch_size and
        step_seconds. ``expert_tokens``: see ExpertLoad.step."""
        row = {"step": step, "samples": samples, "time": round(time.time(), 3), **measured}
        row |= self.speed(int(measured["batch_size"]), measured["step_seconds"])
        self._writer(lambda: self._step(dict(row), expert_tokens))
        return row

    def _step(self, row: dict[str, Any], expert_tokens: NDArray[np.float64] | None) -> None:
        step = row["step"]
        if self._experts:
            self._experts.step(expert_tokens)
            if step % self.every == 0 or step == self.total:
                row |= self._experts.logged(row, last=step == self.total)
        if step % self.every == 0 or step == self.total:
            row |= self._read_of_datasets(row["samples"])
        self._write(row)
        self.summary.measured(row)
        self._warn(row)
        self._unlogged.append(row)
        loss, lr, *speed = step_figures(row)
        self._bar.beside = (loss, *speed, lr)
        self._display.attempt(self._bar.update)
        if step % self.every == 0 or step == self.total or step == self.start + 1:
            self._log(step)

    def _write(self, row: dict[str, Any], part: str = "") -> None:
        """Write a row of metrics.jsonl, and its scalars for TensorBoard. ``part``: see TensorBoard.row."""
        row = finite(row)
        # the file keeps rows that it cannot write
        self._rows.attempt(lambda: self._file.write(json.dumps(row) + "\n"), now=True)
        if self._board:
            self._board.row(row, part)

    def _warn(self, row: dict[str, Any]) -> None:
        """Warn once if the loss mask excludes every token of a step, or of a micro-batch with loss_norm=microbatch."""
        empty = row.get("empty_micro_batches")
        if is_without_loss(row) and "step" not in self._warned:
            self._warned.add("step")
            log.warning(
                "step %d has no loss: the loss mask excludes every token of the batch, so only momentum and weight decay move the weights. "
                "A larger batch.global_size avoids such steps. Later ones are counted in the log, and have counted_tokens 0 in %s",
                row["step"],
                self.path.name,
            )
        elif empty and "micro-batch" not in self._warned:
            self._warned.add("micro-batch")
            log.warning(
                "step %d: the loss mask excludes every token of %d micro-batches of one replica. With batch.loss_norm=microbatch, the "
                "loss is the mean over micro-batches, and these count as 0, as in Megatron; batch.loss_norm=token gives the mean over "
                "tokens. Later steps have empty_micro_batches in %s",
                row["step"],
                empty,
                self.path.name,
            )

    def _log(self, step: int) -> None:
        """Write a log line with the means over the steps since the last one."""
        rows = self._unlogged
        self._unlogged = []
        seconds = sum(row["step_seconds"] for row in rows)
        mean = rows[-1] | self.speed(sum(row["batch_size"] for row in rows), seconds)
        losses = [row["loss"] for row in rows if not is_without_loss(row)]
        if losses:
            mean |= {"loss": sum(losses) / len(losses), "counted_tokens": None}
        mean["step_seconds"] = seconds / len(rows)
        mean["data_fraction"] = sum(row["data_seconds"] for row in rows) / seconds
        mean["callback_seconds"] = sum(row.get("callback_seconds", 0.0) for row in rows) / len(rows)
        log.info("%s", step_line(rows, mean, self.total, first=step == self.start + 1), extra=LIVE)
        if self._board:
            self._board.flush()
        for scored in self._scores.rows():
            self._scored(scored)

    def _scored(self, row: dict[str, Any]) -> None:
        """Record an earlier checkpoint's scores on tasks, measured by hpclm evaluate --follow."""
        self._write(row)
        for task, figures in row["tasks"].items():
            shown = [f"{name} {value:.4f}" for name, value in figures.items() if value is not None]
            log.info("step %d  %s  %s", row["step"], task, "  ".join(shown))
            for name, value in figures.items():
                if self._board:
                    self._board.scalar(f"tasks/{task} {name}", value, row)

    def evaluated(
        self,
        step: int,
        samples: int,
        loss: float,
        part: str,
        bits: float | None = None,
        of_average: float | None = None,
    ) -> None:
        """Record a loss on held-out data, its perplexity and, if known, bits per byte. ``bits``: see sources.bits_per_byte.
        ``of_average``: the loss of the average of the weights; None without optim.ema."""
        row = {"step": step, "samples": samples, "time": round(time.time(), 3), "part": part}
        row |= {"validation_loss": loss, "validation_perplexity": perplexity(loss)}
        if bits is not None:
            row["validation_bits_per_byte"] = bits * loss
        if of_average is not None:
            row["validation_loss_ema"] = of_average
        self._writer(lambda: self._evaluated(row))

    def _evaluated(self, row: dict[str, Any]) -> None:
        name = row["part"].removeprefix("valid").removeprefix("/")
        self._write(row, name)
        self.summary.measured(row)
        line = evaluation_line(row["step"], row["validation_loss"], name, row.get("validation_bits_per_byte"))
        if "validation_loss_ema" in row:
            line += f"  with averaged weights {row['validation_loss_ema']:.4f}"
        log.info("%s", line)

    def flush(self) -> None:
        """Wait until everything is written. An error of the writing thread is raised here, or by the next step."""
        self._writer.flush()


class Speed:
    """Tokens per second, and the fraction of the device's peak FLOPs that the model uses: MFU, and HFU with recomputation."""

    def __init__(self, model: ModelConfig, engine: EngineConfig, peak_flops: float | None):
        """``peak_flops``: bf16 peak of all devices together, in FLOP/s; None if unknown."""
        self.context = model.context
        self.peak = peak_flops
        if peak_flops and engine.fp8:
            self.peak = peak_flops * count.fp8_gain(model)
        self.flops = count.flops_per_token(model)
        self.recomputed = count.recompute_flops(model, engine.recompute)

    def __call__(self, samples: int, seconds: float) -> dict[str, float]:
        """The speed at which ``samples`` samples take ``seconds``, as fields of metrics.jsonl."""
        rate = samples * self.context / seconds
        figures = {"tokens_per_second": rate}
        if self.peak:
            figures["mfu"] = rate * self.flops / self.peak
            if self.recomputed:
                figures["hfu"] = rate * (self.flops + self.recomputed) / self.peak
        return figures


def step_figures(row: Mapping[str, Any]) -> list[str]:
    """Loss, learning rate, tokens per second and, if known, MFU."""
    loss = "no loss" if is_without_loss(row) else f"loss {row['loss']:.4f}"
    parts = [loss, f"lr {row['lr']:.3g}", f"{row['tokens_per_second']:,.0f} tokens/s"]
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.1%}")
    return parts


def is_without_loss(row: Mapping[str, Any]) -> bool:
    """Whether the loss mask excluded every token of the step."""
    return row.get("counted_tokens") == 0


def step_line(
    rows: Sequence[Mapping[str, Any]], mean: Mapping[str, Any], total: int | None, first: bool = False
) -> str:
    """The log line for the steps in ``rows``. ``mean``: the last row, with the mean loss and speed of all.

    ``total``: the last step of the run, if known. ``first``: the first step of an attempt may compile, so its time predicts nothing.
    """
    parts = step_figures(mean)
    if len(rows) > 1 and not is_without_loss(mean):
        parts[0] = f"mean {parts[0]}"
    without_loss = sum(map(is_without_loss, rows))
    if without_loss:
        parts[0] += f" ({without_loss} of {len(rows)} steps without a token that counts)"
    waiting = mean.get("data_fraction", 0)
    if waiting > NOTABLE_WAIT:
        parts.append(f"{waiting:.0%} waiting for data")
    in_callbacks = mean.get("callback_seconds", 0.0)
    if in_callbacks > NOTABLE_WAIT * mean["step_seconds"]:
        parts.append(f"{in_callbacks:.3f} s/step in callbacks")
    parts.append(f"{mean['step_seconds']:.3f} s/step")
    if total and not first:
        parts.append(f"{_clock((total - mean['step']) * mean['step_seconds'])} left")
    number = f"{mean['step']}/{total}" if total else mean["step"]
    return "  ".join([f"step {number}", *parts])


def evaluation_line(step: int, loss: float, part: str, bits_per_byte: float | None = None) -> str:
    """The log line of an evaluation. ``part``: the name of the held-out data; empty if there is only one part."""
    name = f"validation loss of {part}" if part else "validation loss"
    line = f"step {step}  {name} {loss:.4f}  perplexity {perplexity(loss):.2f}"
    return line if bits_per_byte is None else f"{line}  bits per byte {bits_per_byte:.4f}"


def perplexity(loss: float) -> float:
    """exp(loss), capped at exp(20), as in Megatron; NaN if the loss is NaN."""
    return math.exp(min(loss, 20.0))


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


class WriterThread:
    """Runs functions one after the other in a thread; use it as a context manager.

    If a function raises an error, the next call of this object raises it too, and later work is dropped.
    """

    def __init__(self, idle: Callable[[], None] = lambda: None) -> None:
        """``idle``: called after IDLE seconds without work; must not raise."""
        self._idle = idle
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_QUEUED)
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def __enter__(self) -> "WriterThread":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._work.put(None)
        self._thread.join()
        if error is None:
            self._check()

    def __call__(self, work: Callable[[], None]) -> None:
        """Queue ``work`` after everything queued before."""
        self._check()
        self._work.put(work)

    def flush(self) -> None:
        """Wait until the queue is empty."""
        self._work.join()
        self._check()

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _next(self) -> Callable[[], None] | None:
        while True:
            try:
                return self._work.get(timeout=IDLE)
            except queue.Empty:
                self._idle()

    def _run(self) -> None:
        for work in iter(self._next, None):
            try:
                if self._failed is None:
                    work()
            except Exception as error:
                self._failed = error
            finally:
                self._work.task_done()
