"""Scores at tasks of lm-evaluation-harness while a run trains, whatever its layout.

All ranks write the weights to a folder in the run directory, and rank 0 reads them as the model of a single process.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpclm.checkpoint import CheckpointStore, Progress, Retention, inference
from hpclm.config import RunConfig
from hpclm.data import tokenizers
from hpclm.distributed.context import DistributedContext
from hpclm.engine import Engine, Shard
from hpclm.errors import HpclmError
from hpclm.interop.huggingface import special, tokenizer
from hpclm.training.metrics import Meter

if TYPE_CHECKING:
    from hpclm.inference.harness import Tasks

log = logging.getLogger(__name__)
FOLDER = ".tasks"  # in the run directory, while tasks are measured
OFTEN = 1.0  # seconds after which rank 0 lets the others ask for signals


class Weights:
    """An engine's weights without its optimizer state, as a store saves them."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def tensors(self) -> Iterator[Shard]:
        """This process's shards of the weights."""
        return (shard for shard in self.engine.tensors() if shard.name.startswith("model."))

    def scalars(self) -> dict[str, Any]:
        """Nothing is trained from these weights."""
        return {"optimizer_steps": 0, "loss_scale": None}


class TaskScores:
    """What measures a run's tasks; on every rank, though only rank 0 has them."""

    def __init__(self, config: RunConfig, context: DistributedContext, device: torch.device, dtype: torch.dtype):
        """ConfigError on every rank where a task, its data or the run's tokenizer cannot be loaded."""
        self.config, self.context, self.device, self.dtype = config, context, device, dtype
        self.folder = Path(config.out) / FOLDER
        found: list[Tasks] = []
        context.run_on_main(lambda: found.append(self._load()))
        self._tasks = found[0] if found else None

    def _load(self) -> "Tasks":
        from hpclm.inference.harness import Tasks, Wanted

        settings = self.config.evaluate
        self._clear()  # of an attempt that was killed
        tokenizers.of_run(self.config.data)
        wanted = Wanted(settings.tasks, settings.tasks_path, settings.tasks_samples, settings.tasks_shots)
        return Tasks(wanted)

    def measure(self, engine: Engine, progress: Progress, meter: Meter, warned: Callable[[], bool]) -> None:
        """Measure the model after a step, unless that is done or a signal warns.

        ``warned``: whether any rank was; all ask together, and get one answer.
        """
        if progress.step in meter.scored:
            return
        began = time.monotonic()
        self.context.run_on_main(self._clear)
        CheckpointStore(self.folder / "checkpoints", Retention(), {}, self.context).save(Weights(engine), progress)  # type: ignore[arg-type]
        scores = self._score(self._turns(warned)) if self.context.is_main else self._wait(warned)
        self.context.run_on_main(self._clear)
        if scores is not None:
            meter.at_tasks(progress.step, progress.samples, scores)
            log.info("tasks took %.0f s", time.monotonic() - began)

    def _clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait(self, warned: Callable[[], bool]) -> dict[str, dict[str, float]] | None:
        """Take turns with rank 0 until it is done; the scores are its own."""
        while True:
            done = self.context.all_gather(None, unlimited=True)[0]
            if done:
                return {}
            if warned():
                return None

    def _turns(self, warned: Callable[[], bool]) -> Callable[[], None]:
        """A function for rank 0 to call often: now and then all ask for signals; _Warned where there is one."""
        last = time.monotonic()

        def between() -> None:
            nonlocal last
            if time.monotonic() - last > OFTEN:
                self.context.all_gather(False, unlimited=True)
                if warned():
                    raise _Warned
                last = time.monotonic()

        return between

    def _score(self, between: Callable[[], None]) -> dict[str, dict[str, float]] | None:
        """The scores of the saved weights; None where a signal warned. A fault of a task is logged, and ends no training."""
        assert self._tasks is not None
        config = inference.alone(self.config)
        words = tokenizers.of_run(config.data)
        model, _ = inference.load_model(self.folder, config, None, self.device, self.dtype)
        begin = special.begin(Path(config.out), tokenizer.paths(config.data), words.eod)
        size = self.config.batch.micro_size or 1
        try:
            found = self._tasks.score(model.to(self.dtype), words, begin, size, between, errors=False)
            scores = found.scores
        except _Warned:
            return None
        except HpclmError:
            raise
        except Exception as error:
            log.exception("the tasks were not measured: %s: %s; training continues", type(error).__name__, error)
            scores = {}
        self.context.all_gather(True, unlimited=True)
        return scores


class _Warned(Exception):
    """A signal says that the run must exit."""
