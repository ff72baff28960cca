"""One process of a trial. It trains like ``hpclm train``, and leaves its record, or its failure, in a file."""

import os
import pickle
import random
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hpclm import config
from hpclm.base import files, log
from hpclm.base.errors import ConfigError, ExitCode, HpclmError
from hpclm.distributed import context as distributed
from hpclm.distributed.bootstrap import World
from hpclm.node.job import OwnJob
from hpclm.training.loop import TrainingLoop
from hpclm.training.opening import open_run
from hpclm.training.start import RunStart
from hpclm.trials import direct
from hpclm.trials.record import Record, begin, end

NO_CODE = "<"


@dataclass(frozen=True)
class Failure:
    """How a process failed."""

    text: str
    refused: bool
    """Whether hpclm itself refused the trial."""


@dataclass(frozen=True)
class TrialStart:
    """The arguments of one start of a trial's processes."""

    settings: tuple[str, ...]
    out: Path
    """The run directory; the processes leave their files beside it."""
    processes: int
    secret: str
    kill_at: int | None = None
    reads_samples: bool = False
    """Whether to record samples of the training data."""

    def file(self, rank: int) -> Path:
        """The file for the record or failure of the process ``rank``."""
        return self.out.with_name(f"{self.out.name}-{rank}-{self.secret[:8]}.pickle")


def train(start: TrialStart, rank: int) -> int:
    """Train as process ``rank`` of a start; returns the exit code."""
    world = World("selftest", rank, start.processes, rank, start.processes, start.secret)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.size}
    for name, number in numbers.items():  # torchrun sets them, and the user's code may read them
        os.environ[name] = str(number)
    # like a new process, a forked one must not have the state of its parent's random generators
    random.seed()
    np.random.seed()
    torch.seed()
    torch.set_num_threads(1)
    log.setup(rank)
    settings = config.load(None, [*start.settings, f"out={start.out}"])
    record = Record()
    try:
        with distributed.join(world, settings.cluster, OwnJob()) as context:
            try:
                with open_run(RunStart(settings, processes=world.size), context) as run:
                    if start.reads_samples:
                        record.samples = direct.digests(run.data.source, settings.model.context)
                    loop = TrainingLoop(run)
                    begin(loop, record, start.kill_at)
                    context.exit_code = loop.train()
                    end(loop, record)
            except BaseException as error:
                _leave(start, rank, failure_of(error))
                raise
            _leave(start, rank, record)
            return context.exit_code
    except HpclmError as error:
        return error.exit_code
    except SystemExit as error:  # from a rank other than 0: the error is the same on all ranks
        return error.code if isinstance(error.code, int) else ExitCode.FAILED
    except BaseException:
        traceback.print_exc()
        return ExitCode.FAILED


def failure_of(error: BaseException) -> Failure:
    """The error that ended a process, with its place in the user's code."""
    if isinstance(error, HpclmError):
        return Failure(str(error), isinstance(error, ConfigError))
    text = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    of_user = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame)]
    if of_user:
        last = of_user[-1]
        text += f" ({Path(last.filename).name}:{last.lineno}, in {last.name})"
    return Failure(text, False)


def _is_users(frame: traceback.FrameSummary) -> bool:
    """Whether a frame belongs neither to hpclm, nor to a library, nor to Python."""
    if frame.filename.startswith((str(Path(__file__).parents[1]), NO_CODE)):
        return False
    return not any(part in frame.filename for part in ("site-packages", "dist-packages", "/lib/python"))


def _leave(start: TrialStart, rank: int, what: Record | Failure) -> None:
    files.write_bytes(start.file(rank), pickle.dumps(what))
