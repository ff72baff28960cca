"""Whether a job's time limit leaves room for a step: otherwise it would be warned, requeued and warned again without training."""

import math
import re
from contextlib import suppress
from pathlib import Path

from hpclm.config.job import seconds_of
from hpclm.errors import ConfigError
from hpclm.node import slurm
from hpclm.node.processes import NoAnswerError
from hpclm.rundir import summary

SIGNAL = re.compile(r"(?:[A-Z]+:)?\w+@(\d+)")  # of #SBATCH --signal


def refuse_without_room(out: Path, script: str) -> None:
    """ConfigError if a job with ``script`` would be warned of its end before it could do a step of the run in ``out``, as far as the
    run's last start shows. Without a time limit of the job, that of its partition counts."""
    options = slurm.options_in(script)
    time, name = options.get("time") or "", "job.time"
    if not time:
        with suppress(NoAnswerError):
            there = slurm.env_for(slurm.clusters(options))
            partition, time = slurm.default_time(options.get("partition") or "", env=there)
            name = f"job.time is not set, and the default of partition {partition}"
    known = summary.read(out)
    start, step = known.get("start_seconds") or 0.0, known.get("step_seconds") or 0.0
    match = SIGNAL.match(options.get("signal") or "")
    warn = int(match[1]) if match else 0
    limit = _seconds(time)
    if limit - warn - start > step:
        return
    took = f", and the last start took {start:.0f} s or more before its first step" if start else ""
    step_text = f", which takes {step:.1f} s" if start and step else ""
    needed = math.ceil((warn + start + step) / 60) + 1
    raise ConfigError(
        f"{name}={time} leaves no room for a step: Slurm's warning comes job.warn_seconds={warn} s before the end{took}{step_text}; "
        f"set job.time to {needed} minutes or more, or a smaller job.warn_seconds that suffices for a save"
    )


def _seconds(time: str) -> float:
    """Seconds of a time limit; infinity for one that is missing or unknown."""
    try:
        return seconds_of(time) if time else math.inf
    except ValueError:  # of the user's own template
        return math.inf
