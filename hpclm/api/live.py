"""Train in this process. A notebook shows a live plot of the loss; elsewhere, training itself shows a progress bar."""

import contextvars
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from hpclm.base import extras
from hpclm.base.errors import ConfigError, HpclmError
from hpclm.config import RunConfig
from hpclm.launch import process
from hpclm.node import environment, threads
from hpclm.reporting import history, images
from hpclm.rundir import summary
from hpclm.rundir.state import span

EVERY = 1.0  # seconds between updates
MAX_TIME_FRACTION = 1 / 20  # largest fraction of the time that updates take


class LiveProgress:
    """A run's progress at one moment: a plot of its loss, or one line of text without matplotlib."""

    def __init__(self, out: Path, stop_at: int | None = None) -> None:
        self._line = f"{out}: starting"
        self._png: bytes | None = None
        try:
            run_history = history.read_history(out)
        except HpclmError as error:
            self._line = f"{out}: {error}"
            return
        if not run_history.recent:
            return
        row = run_history.recent[-1]
        loss = "none" if row.get("counted_tokens") == 0 else "not finite"
        if row["loss"] is not None:
            loss = f"{row['loss']:.4f}"
        ends = [end for end in (stop_at, summary.read_summary(out).get("steps")) if end]
        step = "/".join(map(str, [row["step"], *sorted(ends)[:1]]))
        self._line = f"{out}: step {step}, loss {loss}, {row['tokens_per_second']:,.0f} tokens/s"
        if ends and min(ends) > row["step"]:
            self._line += f", {span((min(ends) - row['step']) * (row.get('step_seconds') or 0))} left"
        if extras.missing("a live plot", "matplotlib") is None:
            self._png = images.loss_png(run_history, self._line)

    def __repr__(self) -> str:
        return self._line

    def _repr_png_(self) -> bytes | None:
        return self._png


def train(run: RunConfig, resume_step: int | None) -> None:
    """Train ``run`` in this process (see ``launch.process.in_this_process``), and show its progress."""
    check_main_thread("hpclm.train")
    with computing():
        if not in_notebook():
            process.in_this_process(run, resume_step)
            return
        with _shown(run):
            process.in_this_process(run, resume_step, quiet=True)


def check_main_thread(function: str) -> None:
    """ConfigError if this is not the main thread."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(f"{function} catches signals, so it must be called in the main thread")


@contextmanager
def computing() -> Iterator[None]:
    """Load PyTorch, and restore the state of this process after the block."""
    load_pytorch()
    from hpclm.node import process_state

    with process_state.preserved():
        yield


def load_pytorch() -> None:
    """Import PyTorch with hpclm's environment variables for OpenMP, which reads them now; then restore the caller's."""
    with environment.preserved():
        threads.set_openmp()
        import_module("torch")


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


@contextmanager
def _shown(run: RunConfig) -> Iterator[None]:
    """During the block, show the run's progress below the current cell."""
    from IPython.display import display

    out = Path(run.out)
    over = threading.Event()
    handle: Any = display(LiveProgress(out, run.stop_at), display_id=True)

    def update() -> None:
        wait = EVERY
        while not over.wait(wait):
            began = time.monotonic()
            handle.update(LiveProgress(out, run.stop_at))
            wait = max(EVERY, (time.monotonic() - began) / MAX_TIME_FRACTION)

    # the context makes the output of the thread appear below this cell
    thread = threading.Thread(target=contextvars.copy_context().run, args=(update,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        handle.update(LiveProgress(out, run.stop_at))
