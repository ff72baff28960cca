"""Scores each checkpoint of a run once at tasks, as soon as it is published, during the run and after it."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpclm.base import files
from hpclm.base.errors import ExitCode, HpclmError
from hpclm.checkpoint import directory
from hpclm.checkpoint.manifest import BadCheckpoint
from hpclm.data import tokenizer_folder
from hpclm.inference import run_model, run_settings
from hpclm.inference.harness import Tasks
from hpclm.node.job import OwnJob
from hpclm.node.preemption import WARNINGS, Preemption
from hpclm.preprocess import run_text
from hpclm.preprocess.run_text import RunText
from hpclm.rundir import metrics_file
from hpclm.rundir.lease import Lease
from hpclm.rundir.state import StateOf

log = logging.getLogger(__name__)
POLL = 10.0  # seconds between checks for new checkpoints
OVER = ("done", "stopped", "exited", "failed", "ended")
"""Statuses of a run that no process trains or will train."""


class FollowInterrupted(Exception):
    """A signal arrived before the scores were complete."""


class Follower:
    """Scores the checkpoints of the run in ``out`` that scores.jsonl lacks. Only one process does so for a run: it holds scores.lock."""

    def __init__(self, out: Path, overrides: list[str], tasks: Tasks, batch: int):
        """``overrides``: key=value, on top of the run's settings. ``batch``: number of texts read together."""
        self.out = out
        self.overrides = overrides
        self.config = run_settings.inference_settings(out, overrides)
        self.tasks = tasks
        self.batch = batch
        self.text = run_text.of_run(out, self.config.data, self.config.model.vocab_size)
        self.compute = run_model.place(self.config)
        self._scored = {row.get("checkpoint") for row in self._rows()}

    def _rows(self) -> Iterator[dict[str, object]]:
        names = set(self.tasks.names)
        return (row for row in metrics_file.NewScores(self.out).rows() if names <= set(row["tasks"]))

    def score_new(self, interrupted: Callable[[], bool]) -> int:
        """Score new checkpoints, oldest first; returns their number. Raises FollowInterrupted between batches if ``interrupted`` is true."""
        count = 0
        for folder in directory.steps(self.out / "checkpoints"):
            name = digest(folder)
            if name and name not in self._scored:
                count += self._score(folder, name, interrupted)
                self._scored.add(name)
        return count

    def until_the_end(self, state_of: StateOf, job: OwnJob) -> int:
        """Score checkpoints until the run has ended. Returns the exit code, 85 after a signal. ``job``: the job of this process."""
        with Preemption() as preemption:

            def interrupted() -> bool:
                return any(preemption.seconds(number.name) for number in WARNINGS)

            try:
                while True:
                    status = state_of(
                        self.out
                    )  # read before the checkpoints, so that none is missed after the run has ended
                    self.score_new(interrupted)
                    if status.name in OVER:
                        break
                    wait(POLL, interrupted)
            except FollowInterrupted:
                log.info("interrupted; the same command scores the remaining checkpoints")
                return ExitCode.REQUEUE
            if status.name == "done":
                with Lease(self.out, job=job):  # the run had not copied the last rows when it ended
                    metrics_file.copy_scores(self.out)
        log.info("%s is %s, and its checkpoints are scored: %s/scores.jsonl", self.out, status.name, self.out)
        if status.name == "done":
            log.info("hpclm sync %s sends the last scores to the run's sinks", files.typed(self.out))
        return ExitCode.DONE

    def _text(self) -> RunText:
        """The run's text; the folder of its tokenizer is written when the run begins, perhaps after this process."""
        folder = tokenizer_folder.of_run(self.out, self.config.data)
        return run_text.of_folder(folder, self.config.model.vocab_size, self.text.tokenizer)

    def _score(self, folder: Path, name: str, interrupted: Callable[[], bool]) -> bool:
        def check_interrupt() -> None:
            if interrupted():
                raise FollowInterrupted

        check_interrupt()
        began = time.monotonic()
        try:
            manifest = directory.verified(folder)
            config = run_settings.inference_settings(self.out, self.overrides, folder)
            model, progress = run_model.load_checkpoint(
                folder, manifest, config, self.text.tokenizer.fingerprint, self.compute
            )
        except (BadCheckpoint, HpclmError) as error:  # deleted meanwhile, or damaged, which the run itself reports
            log.warning("%s is not scored: %s", folder.name, error)
            return False
        try:
            tasks, _ = self.tasks.score(
                model.to(self.compute.dtype), self._text(), self.batch, check_interrupt, errors=False
            )
        except (HpclmError, FollowInterrupted):
            raise
        except Exception as error:  # a task's own code may fail in any way
            log.exception("%s is not scored: %s: %s", folder.name, type(error).__name__, error)
            return False
        if digest(folder) not in (name, None):  # another attempt has saved this step again
            return False
        metrics_file.append_scores(self.out, progress.step, progress.samples, time.time(), tasks, name)
        for task, row in tasks.items():
            shown = "  ".join(f"{metric} {value:.4f}" for metric, value in row.items())
            log.info("step %d  %s  %s  (%.0f s)", progress.step, task, shown, time.monotonic() - began)
        return True


def digest(folder: Path) -> str | None:
    """A name of the checkpoint in ``folder`` that no other checkpoint of the same step has; None if it is gone."""
    try:
        hashed = hashlib.sha256()
        with files.reader(folder / "MANIFEST.json") as file:
            while block := file.read(1 << 20):
                hashed.update(block)
        return hashed.hexdigest()[:16]
    except OSError:
        return None


def wait(seconds: float, interrupted: Callable[[], bool]) -> None:
    """Wait for ``seconds``; raises FollowInterrupted after a signal."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if interrupted():
            raise FollowInterrupted
        time.sleep(min(0.2, seconds))
