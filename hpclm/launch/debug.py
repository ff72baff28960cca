"""Find mistakes fast, with one process in the foreground: small data, few steps, anomaly detection, a debugger."""

import faulthandler
import logging
import math
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

from hpclm import config as settings
from hpclm.base import folders, paths
from hpclm.base.errors import ConfigError, HpclmError
from hpclm.base.terminal import say
from hpclm.config import DataConfig, RunConfig
from hpclm.config.fields import as_word
from hpclm.config.section import default_of
from hpclm.config.setting import declared
from hpclm.launch.phases import PhaseEnds
from hpclm.launch.schedulers import current_job
from hpclm.rundir import metrics_file
from hpclm.rundir.lease import Lease

log = logging.getLogger(__name__)

MARK = "debug"  # a file that marks the directory of a debug run
STEPS = 5
BUDGET = 1000  # largest number of steps, so that the order of the data is computed quickly
MICRO = 2


def run(changed: RunConfig, changes: list[str], train: Callable[[RunConfig], int], pdb: bool = False) -> int:
    """Call ``train`` in this process with the settings ``changed``; returns its exit code.

    ``changes``: the settings that debugging changes, to be printed. The run directory is OUT-debug, and is emptied first. ``pdb``: on a
    terminal, open the debugger at an exception that is not an HpclmError.
    """
    print("debug: one process, in the foreground, with these settings changed:", file=sys.stderr)
    for change in changes:
        say(f"  {change}", file=sys.stderr)
    out = Path(changed.out)
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise ConfigError(f"{out} is not the directory of a debug run, and would be overwritten; choose another out=")
    folders.private_folder(out, "run directory")
    with Lease(out, job=current_job(changed.job.cluster)):  # another debug run may be in it
        (out / MARK).touch()
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
        (out / "checkpoints.saved").unlink(missing_ok=True)
        (out / metrics_file.NAME).unlink(missing_ok=True)
    settings.dump(changed, out / "config.yaml")
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # so that the operation that fails on a GPU raises the error itself
    faulthandler.enable()
    phases = PhaseEnds(out)
    from torch.autograd import set_detect_anomaly

    try:
        with set_detect_anomaly(True, check_nan=changed.engine.precision != "fp16"):  # in fp16, overflows are normal
            code = train(changed)
            while phases.another(code):
                code = train(changed)
        if not code:
            say("debug: no mistake found; the same command without --debug trains the run", file=sys.stderr)
        return code
    except HpclmError:
        raise
    except Exception as error:
        if not pdb:
            raise
        traceback.print_exc()
        if sys.stdin is None or not (sys.stdin.isatty() and sys.stdout.isatty()):
            log.error("--pdb needs a terminal, so no debugger was started")
            return 1
        from pdb import post_mortem

        post_mortem(error.__traceback__)
        return 1


def overrides(config: RunConfig) -> list[str]:
    """The settings for debugging, as key=value words."""
    micro = min(config.batch.micro_size or MICRO, MICRO)
    budget = min(config.budget.steps or BUDGET, BUDGET)
    values: dict[str, object] = {
        "out": paths.literal(f"{Path(config.out)!s}-debug"),
        "stop_at": min(config.stop_at or STEPS, STEPS, budget),
        "job.nodes": 1,
        "job.gpus": 1,
        "parallel.expert": 1,
        "batch.micro_size": micro,
        "batch.global_size": 2 * micro,
        "batch.rampup": None,
        **{f"budget.{name}": None for name in ("samples", "tokens", "epochs", "hours")},
        "budget.steps": budget,
        "data.workers": 0,
        "engine.compile": False,
        "evaluate.every": STEPS if config.evaluate.every else 0,
        "evaluate.batches": 1,
        "checkpoint.every": 0,
        "checkpoint.resume": "auto",
        "log.every": 1,
        "cluster.hang_minutes": 0.0,  # a person in the debugger may take any time
    }
    optim = config.optim
    has_length = optim.period or optim.schedule_length
    if optim.schedule == "wsd" and not has_length:  # warm-up and decay may be longer than the budget
        share = 1 - (optim.warmup_fraction or 0)
        longest = (math.ceil(2 * steps / share) for steps in (optim.warmup, optim.wsd_decay or 0))
        values["optim.schedule_length"] = max(BUDGET, *longest)
    if _is_missing(config.data):
        reset = {"data.source", "data.tokenizer"}
        for field in fields(DataConfig):
            needs = {condition.key for condition in declared(field).only_with}
            if needs & reset:
                reset.add(f"data.{field.name}")
                values[f"data.{field.name}"] = default_of(field)
        values["data.source"] = "synthetic"
    return [f"{key}={as_word(value)}" for key, value in values.items() if value != attrgetter(key)(config)]


def _is_missing(data: DataConfig) -> bool:
    """Whether files of the settings' datasets are missing."""
    paths = [Path(f"{prefix}{end}") for prefix in data.prefixes() for end in (".bin", ".idx")]
    return data.source == "indexed" and not (paths and all(path.is_file() for path in paths))
