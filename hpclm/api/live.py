"""Train in this process, with a live plot of the loss in a notebook. Elsewhere training itself shows a progress bar."""

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
MAX_TIME_FRACTION = 1 / 20  # of the time, that updates may take


class Snapshot:
    """A run's progress: its loss as a picture, or as one line where nothing can draw it."""

    def __init__(self, out: Path, stop_at: int | None = None) -> None:
        self._line = f"{out}: starting"
        self._png: bytes | None = None
        try:
            read = history.read(out)
        except HpclmError as error:
            self._line = f"{out}: {error}"
            return
        if read.recent:
            row = read.recent[-1]
            without = "none" if row.get("counted_tokens") == 0 else "not finite"
            loss = without if row["loss"] is None else f"{row['loss']:.4f}"
            ends = [end for end in (stop_at, summary.read_summary(out).get("steps")) if end]
            total = min(ends, default=None)
            of = f"/{total}" if total else ""
            self._line = f"{out}: step {row['step']}{of}, loss {loss}, {row['tokens_per_second']:,.0f} tokens/s"
            if total and total > row["step"]:
                self._line += f", {span((total - row['step']) * (row.get('step_seconds') or 0))} left"
            if extras.missing("a live plot", "matplotlib") is None:
                self._png = images.loss_png(read, self._line)

    def __repr__(self) -> str:
        return self._line

    def _repr_png_(self) -> bytes | None:
        return self._png


def train(run: RunConfig, resume_step: int | None) -> None:
    """Train ``run``, as ``launch.process.in_this_process`` does."""
    check_main_thread("hpclm.train")
    with computing():
        if not in_notebook():
            process.in_this_process(run, resume_step)
            return
        with _shown(run):
            process.in_this_process(run, resume_step, quiet=True)


def check_main_thread(function: str) -> None:
    """ConfigError if this is another thread."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(f"{function} catches signals, so it must be called in the main thread")


@contextmanager
def computing() -> Iterator[None]:
    """Load PyTorch, and leave this process as it was when the block ends."""
    load_pytorch()
    from hpclm.node import process_state

    with process_state.preserved():
        yield


def load_pytorch() -> None:
    """Import PyTorch. OpenMP reads its variables at the import; afterwards they are the caller's again."""
    with environment.preserved():
        threads.set_openmp()
        import_module("torch")


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


@contextmanager
def _shown(run: RunConfig) -> Iterator[None]:
    """During the block, show the run's progress in the cell that runs."""
    from IPython.display import display

    out, over = Path(run.out), threading.Event()
    handle: Any = display(Snapshot(out, run.stop_at), display_id=True)

    def update() -> None:
        wait = EVERY
        while not over.wait(wait):
            began = time.monotonic()
            handle.update(Snapshot(out, run.stop_at))
            wait = max(EVERY, (time.monotonic() - began) / MAX_TIME_FRACTION)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(update,), daemon=True)  # of this cell
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        handle.update(Snapshot(out, run.stop_at))
