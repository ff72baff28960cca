"""Roll a run back to an older checkpoint: newer ones are set aside, not deleted.

A checkpoint becomes checkpoints/.rolled-back-step-00000040, and its lines of metrics.jsonl move to
metrics.rolled-back-1.jsonl. Every operation is idempotent, so the next attempt completes a rollback that was interrupted.
"""

import logging
from contextlib import suppress
from pathlib import Path

from hpclm import files
from hpclm.checkpoint import directory, resumable
from hpclm.errors import ConfigError
from hpclm.rundir import metrics_file, submissions

log = logging.getLogger(__name__)


def carry_out(out: Path) -> int | None:
    """Carry out a pending rollback in the run directory ``out``, whose lease this process holds; the step, or None."""
    step = submissions.rollback(out)
    if step is None:
        return None
    folder = out / "checkpoints"
    directory.restore(folder)  # otherwise a replaced checkpoint would reappear later
    saved = {int(path.name[5:]): path for path in directory.steps(folder)}
    if step not in saved:
        raise ConfigError(
            f"{out / submissions.ROLLBACK} asks to resume from step {step}, but {folder} has "
            f"{resumable.listed([*saved.values()])}; remove that file, or ask for another step with --from"
        )
    for number in sorted(saved, reverse=True):
        if number > step:
            directory.put_away(saved[number], "rolled-back", f"a later start went back to step {step}")
    files.sync(folder)
    files.write_text(folder / "latest", saved[step].name + "\n")
    with suppress(FileNotFoundError):
        metrics_file.move_after(out / metrics_file.NAME, step)
    submissions.withdraw_rollback(out)
    newer = ", ".join(f"step {number}" for number in sorted(saved) if number > step) or "nothing, it is the newest"
    log.warning("rolling back to step %d as requested by --from; set aside: %s", step, newer)
    return step
