"""The metrics of a run: metrics.jsonl, TensorBoard, log lines, and a live line on a terminal.

A thread writes them, so that the training loop waits for no disk and no terminal.
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

from hpclm.config import EngineConfig, LogConfig, ModelConfig
from hpclm.errors import unread
from hpclm.log import LIVE
from hpclm.model import count
from hpclm.progress import ProgressBar
from hpclm.rundir import metrics_file
from hpclm.rundir.rows import Row, finite
from hpclm.rundir.summary import RunSummary
from hpclm.side_path import SidePath
from hpclm.training.expert_load import ExpertLoad
from hpclm.training.tensorboard import TensorBoard

log = logging.getLogger(__name__)
MAX_WAITING = 1000  # calls that may wait for the thread; then the training loop waits too
IDLE = 1.0  # seconds without work after which the thread calls ``idle``
NOTABLE_WAIT = 0.05  # fraction of the step time spent waiting for data, above which the log line says so


class Meter:
    """Writes the metrics of each step, in a thread; use it as a context manager."""

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
        """``start``: the step and samples the run resumes from. ``total``: its last step, if that is known. ``experts``: None if the model
        has none."""
        self.out = out
        self.every = config.every
        self.start = start[0]
        self.total = total
        self.speed = speed
        self.summary = summary
        self.losses: dict[tuple[int, str], float | None] = {}
        """On held-out data, by part, at the step that the run resumes from."""
        self._file = metrics_file.appended(out)
        self.path = self._file.path
        self._rows = SidePath(f"{self.path} cannot be written")
        self._scores = metrics_file.NewScores(out)
        self._experts = experts
        self._board = TensorBoard(out, start) if config.tensorboard else None
        self._display = SidePath("the progress of the run cannot be shown")
        self._open = ExitStack()
        self._writer = WriterThread(idle=summary.tick)
        self._since: list[dict[str, Any]] = []
        """Rows since the last log line."""
        self._warned: set[str] = set()

    def __enter__(self) -> "Meter":
        copied = set[Any]()
        """The scores that metrics.jsonl has."""
        self.summary.resume(self._resumed(copied))
        self._open.callback(self._close)
        self._rows.attempt(self._file.flush)
        if self._board:
            self._board.begin()
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
        if self._board:
            self._board.close()
        try:
            self._file.close()
        except OSError as error:
            log.warning("could not flush the last rows of %s: %s", self.path, error.strerror)
        if self._experts:
            self._experts.close()

    def step(
        self, step: int, samples: int, measured: dict[str, float], expert_tokens: NDArray[np.float64] | None = None
    ) -> None:
        """One step, its number and the samples consumed so far; ``measured`` has batch_size and step_seconds among others.
        ``expert_tokens``: see ExpertLoad.step."""
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
        loss, lr, *speed = step_figures(row)
        self._bar.beside = (loss, *speed, lr)
        self._display.attempt(self._bar.update)
        if step % self.every == 0 or step == self.total or step == self.start + 1:
            self._tell(step)

    def _warn(self, row: dict[str, Any]) -> None:
        """Warn once that a step, or with loss_norm=microbatch a micro-batch, has no token that counts."""
        step, empty = row["step"], row.get("empty_micro_batches")
        if is_without_loss(row) and "step" not in self._warned:
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
        row = {"step": step, "samples": samples, "time": round(time.time(), 3), "part": part}
        row |= {"validation_loss": loss, "validation_perplexity": perplexity(loss)}
        self._writer(lambda: self._evaluated(row))

    def _evaluated(self, row: dict[str, Any]) -> None:
        name = row["part"].removeprefix("valid").removeprefix("/")
        self._write(row, name)
        self.summary.measured(row)
        log.info("%s", evaluation_line(row["step"], row["validation_loss"], name))

    def _scored(self, row: dict[str, Any]) -> None:
        """Scores of an earlier checkpoint at tasks, which hpclm evaluate --follow has measured."""
        self._write(row)
        for task, figures in row["tasks"].items():
            shown = [f"{name} {value:.4f}" for name, value in figures.items() if value is not None]
            log.info("step %d  %s  %s", row["step"], task, "  ".join(shown))
            for name, value in figures.items():
                if self._board:
                    self._board.scalar(f"tasks/{task} {name}", value, row)

    def end(self, state: str, ending: str, code: int, over: bool) -> None:
        """Everything is written: have the run's summary say how it ends. Arguments: see ``RunSummary.end``."""
        self.summary.end(state, ending, code, over)

    def flush(self) -> None:
        """Return once everything is written; an error of the thread that writes is raised here, or at the next step."""
        self._writer.flush()

    def _tell(self, step: int) -> None:
        """The log line: means over the steps since the last one."""
        rows, self._since = self._since, []
        seconds = sum(row["step_seconds"] for row in rows)
        row = rows[-1] | self.speed(sum(r["batch_size"] for r in rows), seconds)
        if losses := [r["loss"] for r in rows if not is_without_loss(r)]:
            row |= {"loss": sum(losses) / len(losses), "counted_tokens": None}
        row["step_seconds"] = seconds / len(rows)
        row["data_fraction"] = sum(r["data_seconds"] for r in rows) / seconds
        log.info("%s", step_line(rows, row, self.total, first=step == self.start + 1), extra=LIVE)
        if self._board:
            self._board.flush()
        for scored in self._scores.rows():
            self._scored(scored)

    def _write(self, row: dict[str, Any], part: str = "") -> None:
        """A row of metrics.jsonl, and its scalars for TensorBoard; ``part``: see TensorBoard.row."""
        row = finite(row)
        self._rows.attempt(lambda: self._file.write(json.dumps(row) + "\n"), now=True)  # it keeps what it cannot write
        if self._board:
            self._board.row(row, part)


class Speed:
    """Tokens per second, and the fraction of the device's peak FLOPs that the model uses: MFU, and HFU with recomputation."""

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


def step_figures(row: Mapping[str, Any]) -> list[str]:
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


def step_line(
    rows: Sequence[Mapping[str, Any]], mean: Mapping[str, Any], total: int | None, first: bool = False
) -> str:
    """The log line of the steps in ``rows``. ``mean``: the last row, with the mean loss and speed of all. ``total``: the last step of the
    run, if that is known. ``first``: this is the first step of an attempt, which may compile, so its time predicts nothing."""
    parts, waiting = step_figures(mean), mean.get("data_fraction", 0)
    if without := sum(map(is_without_loss, rows)):
        parts[0] += f" ({without} of {len(rows)} steps without a token that counts)"
    if waiting > NOTABLE_WAIT:
        parts.append(f"{waiting:.0%} waiting for data")
    parts.append(f"{mean['step_seconds']:.3f} s/step")
    if total and not first:
        parts.append(f"{_clock((total - mean['step']) * mean['step_seconds'])} left")
    of = f"/{total}" if total else ""
    return "  ".join([f"step {mean['step']}{of}", *parts])


def evaluation_line(step: int, loss: float, part: str) -> str:
    """The log line of an evaluation; ``part``: the name of the held-out data, if there are several parts."""
    of = f" of {part}" if part else ""
    return f"step {step}  validation loss{of} {loss:.4f}  perplexity {perplexity(loss):.2f}"


def perplexity(loss: float) -> float:
    """exp(loss), capped at exp(20), as in Megatron; NaN if the loss is."""
    return math.exp(min(loss, 20.0))


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


class WriterThread:
    """Makes calls one after the other in a thread; use it as a context manager.

    If one raises an error, the next call to this object raises it, and later work is dropped.
    """

    def __init__(self, idle: Callable[[], None] = lambda: None) -> None:
        """``idle``: called after a while without work; must not raise."""
        self._idle = idle
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
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
        """Return once everything is done."""
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
        while (work := self._next()) is not None:
            try:
                if self._failed is None:
                    work()
            except Exception as error:
                self._failed = error
            finally:
                self._work.task_done()
