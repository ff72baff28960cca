"""The user's own classes in the training loop (train.callbacks). Rank 0 calls them; all ranks agree on their requests (control.py)."""

import logging
import math
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpclm.base.errors import DivergedError
from hpclm.base.registry import class_check, function_check, lookup
from hpclm.base.side_path import cause
from hpclm.distributed.failure import shortened

log = logging.getLogger(__name__)
FAILED = "failed"  # the request to end the run because a callback has failed
METHODS = {"after_step": "metrics", "after_evaluation": "losses"}
"""The methods of a callback, and their argument besides the step."""


class Callback:
    """Base class of callbacks. Rank 0 makes a new one at each start of the run."""

    optional = False
    """Whether a failure is only a warning, after which the callback is not called again. Otherwise the run saves and ends."""

    def __init__(self, out: Path):
        """``out``: the run directory."""
        self.out = out

    def after_step(self, step: int, metrics: dict[str, float]) -> str | None:
        """Called after every step with the numbers of its row in metrics.jsonl, while the next step may be running.

        "save" and "stop" take effect within three steps. None requests nothing.
        """

    def after_evaluation(self, step: int, losses: dict[str, float]) -> str | None:
        """Called after an evaluation with the mean loss of each part of the held-out data. "save" and "stop" take effect at this step."""


def check(loaded: Any) -> str | None:
    """The problem with a class of train.callbacks, or None."""
    wrong = class_check(made_with=["out"], base=Callback)(loaded)
    if wrong:
        return wrong
    for name in dir(loaded):
        if name.startswith("after_") and name not in METHODS:
            return f"has {name}, which nothing calls; the methods are {' and '.join(METHODS)}"
    for name, argument in METHODS.items():
        wrong = function_check("self", "step", argument)(getattr(loaded, name))
        if wrong:
            return f"has {name}, which {wrong}"
    return None


def load(names: Sequence[str]) -> list[type[Callback]]:
    """The classes of train.callbacks; ConfigError if one cannot be loaded, or is not a callback."""
    return [lookup("train.callbacks", name, {}, check) for name in names]


class Callbacks:
    """The callbacks of a run, on rank 0, and their requests."""

    def __init__(self, names: Sequence[str], out: Path, evaluates: bool):
        """``evaluates``: whether the run does. DivergedError if a callback that is not optional cannot be made."""
        self.requests = set[str]()
        """Pending requests: "save", "stop", FAILED."""
        self.failure = ""
        """The first failure, for the message that ends the run."""
        self._seconds = 0.0
        self._callbacks: list[tuple[str, Callback]] = []
        for name, kind in zip(names, load(names), strict=True):
            with self._failures(name, "__init__", kind.optional):
                self._callbacks.append((name, kind(out)))
            if not evaluates and kind.after_evaluation is not Callback.after_evaluation:
                log.warning("the run has no evaluations, so after_evaluation of %s is never called", name)
        if self.failure:
            raise DivergedError(self.failure)

    def after_step(self, step: int, row: Mapping[str, Any]) -> None:
        """Call all callbacks after a step. ``row``: of metrics.jsonl."""
        self._call("after_step", step, {name: value for name, value in row.items() if isinstance(value, (int, float))})

    def after_evaluation(self, step: int, losses: Mapping[str, float | None]) -> None:
        """Call all callbacks after an evaluation. ``losses``: of each part; None if not finite."""
        self._call(
            "after_evaluation", step, {part: math.nan if loss is None else loss for part, loss in losses.items()}
        )

    def take_seconds(self) -> float:
        """Seconds in callbacks since the last call."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def _call(self, method: str, step: int, numbers: Mapping[str, float]) -> None:
        began = time.monotonic()
        for name, callback in [*self._callbacks]:
            with self._failures(name, f"{method} at step {step}", callback.optional):
                request = getattr(callback, method)(step, dict(numbers))
                if request not in (None, "save", "stop"):
                    raise ValueError(f"it returned {request!r}; it may return 'save', 'stop' or None")
                if request:
                    log.info("step %d: %s requests: %s", step, name, request)
                    self.requests.add(request)
        self._seconds += time.monotonic() - began

    @contextmanager
    def _failures(self, name: str, place: str, optional: bool) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # the user's code may do anything
            self._callbacks = [(other, callback) for other, callback in self._callbacks if other != name]
            text = f"train.callbacks: {name} failed in {place}: {cause(error)}"
            trace = shortened(traceback.format_exc())
            if optional:
                log.warning("%s; training continues without it\n  %s", text, trace)
                return
            log.error("%s\n  %s", text, trace)
            self.requests.add(FAILED)
            self.failure = self.failure or text
