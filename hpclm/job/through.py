"""Start a run's ranks through a launcher of somebody else's, mpirun or srun, with a guard around each of them."""

import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence

from hpclm import files
from hpclm.config import RunConfig
from hpclm.errors import REQUEUE
from hpclm.job import death, guard
from hpclm.job.death import End
from hpclm.job.foreground import launch
from hpclm.job.supervise import Manner, Process


def through(
    name: str,
    config: RunConfig,
    line: Callable[[Sequence[str]], Sequence[str]],
    program: Sequence[str],
    env: Mapping[str, str],
    shape: tuple[int, int, int],
    signals: Mapping[int, int],
    patience: tuple[float, float],
    notes: Sequence[str] = (),
    command: Sequence[str] = (),
    cluster: str = "local",
) -> int:
    """Run ``program`` on every rank through the launcher ``name``, in the foreground; gives the exit code.

    ``line`` makes the launcher's command out of a rank's. ``shape``: nodes, most processes on one, processes in all.
    ``signals``: what to send the launcher for which signal; ``patience``: seconds in which it
    ends the ranks by itself when one has failed, and then those it has to do so when it is told.
    """
    (nodes, each, count), (settle, grace) = shape, patience
    out = files.writable_folder(config.out, "run directory", mode=0o700).absolute()
    folder = files.writable_folder(out / "job" / f"ends-{secrets.token_hex(4)}", "job folder", mode=0o700)
    guarded = [sys.executable, "-u", "-m", "hpclm.job.guard", str(folder), *program]

    def failed() -> bool:
        return bool(failures(guard.ends(folder)))

    manner = Manner(signals, spoken=False, failed=failed, settle=settle, grace=grace)

    def conclude(code: int, say: Callable[[str, str], None]) -> int:
        found = guard.ends(folder)
        shutil.rmtree(folder, ignore_errors=True)
        return verdict(name, code, count, found, say)

    process = Process(name, tuple(line(guarded)), env)
    return launch(config, cluster, [process], nodes, each, manner, notes, command, conclude, name)


def failures(ends: Mapping[int, End]) -> dict[int, End]:
    """Those of ``ends`` that were none of a run's good ones."""
    return {rank: end for rank, end in ends.items() if end.code not in (0, REQUEUE)}


def verdict(name: str, code: int, count: int, ends: Mapping[int, End], say: Callable[[str, str], None]) -> int:
    """The exit code of a run of ``count`` ranks that ended with ``ends``, as far as known, and its launcher with ``code``."""
    failed = failures(ends)
    if death.again(ends.values()):
        return REQUEUE
    if failed:
        first, *others = failed.values()
        if first.code < 0:  # its guard has told
            return 128 - first.code
        for text in death.summary([first, *(end for end in others if end.code == first.code)], (), 0):
            say(text, "E")
        return first.code
    if code and len(ends) < count:
        missing = count - len(ends)
        say(f"{name} ended with exit code {code}; {missing} of {count} ranks left no word of their end", "E")
        return code
    return 0
