"""The verb ``hpclm top``: all runs below a folder, live, with the course of their losses."""

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpclm import cli, terminal
from hpclm.commands import status
from hpclm.reporting import characters
from hpclm.rundir import runs as folders
from hpclm.rundir.runs import Run
from hpclm.rundir.status import Queue, RunStatus
from hpclm.terminal import say

if TYPE_CHECKING:
    from hpclm.reporting.screen import Rows

PATIENCE = 0.75  # seconds that Slurm has for an answer
WIDTH = 24  # characters of a loss curve
ORDER = ("running", "starting", "completing", "waiting", "failed", "ended", "unknown")
"""Of the states, those worth looking at first."""
COLUMNS = (*status.COLUMNS[:4], "LOSS CURVE", *status.COLUMNS[4:])


def main(argv: list[str]) -> int:
    """``hpclm top``."""
    parser = terminal.ArgumentParser(
        prog="hpclm top",
        description="Show all runs below a folder, live, until Ctrl-C. If the output is not a terminal, print one table.",
    )
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="the same as --runs FOLDER")
    cli.add_runs(parser)
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="time between looks (default: 2)")
    parser.add_argument("--once", action="store_true", help="print one table, as plain lines")
    args = parser.parse_args(argv)
    if not 0.1 <= args.every <= 86400:
        parser.error(f"--every {args.every} must be between 0.1 and 86400 seconds")
    args.runs = args.folder or args.runs
    watch = Watch(args.runs)
    if args.once or not sys.stdout.isatty():
        found = watch.look()
        if not found:
            say(f"{folders.none_in(args.runs)}; name their folder, or start one with hpclm submit")
        else:
            say("\n".join(terminal.columns([COLUMNS, *map(watch.row, found)])))
            for note in watch.notes():
                say(note)
        return 0
    from hpclm.reporting import screen

    with suppress(KeyboardInterrupt):
        screen.live(watch.rows, args.every)
    return 0


class Watch:
    """Looks at the runs below a folder again and again."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._queue = Queue(PATIENCE)
        self._curves: dict[Path, tuple[float | None, str]] = {}

    def look(self) -> list[RunStatus]:
        """How the runs stand now, the most interesting first."""
        chosen = folders.find(self.folder)
        runs = [folders.read(out, status.LINES, brief=True) for out in chosen]
        found = self._queue.statuses(runs)
        place = {name: number for number, name in enumerate(ORDER)}
        return sorted(found, key=lambda each: (place.get(each.name, len(ORDER)), -(each.run.stepped or 0.0)))

    def rows(self) -> "Rows":
        """The live table."""
        from hpclm.reporting.screen import Rows

        found = self.look()
        counts = {name: sum(each.name == name for each in found) for name in dict.fromkeys(each.name for each in found)}
        said = ", ".join(f"{count} {name}" for name, count in counts.items()) or "no runs"
        title = terminal.line(f"{self.folder}  {time.strftime('%H:%M:%S')}  {said}  (Ctrl-C exits)")
        return Rows(COLUMNS, [self.row(each) for each in found], title, self.notes())

    def row(self, each: RunStatus) -> tuple[str, ...]:
        """One run's line: that of ``hpclm status``, with its loss curve."""
        cells = status.row(each)
        return (*cells[:4], self._curve(each.run) or "-", *cells[4:])

    def notes(self) -> list[str]:
        """What is not known."""
        return [f"queue: unknown ({terminal.line(self._queue.silent)})"] if self._queue.silent else []

    def _curve(self, run: Run) -> str:
        """The run's loss curve, read again when its metrics have grown."""
        when, curve = self._curves.get(run.out, (-1.0, ""))
        if when != run.stepped:
            curve = characters.sparkline(characters.losses(run.out / "metrics.jsonl", WIDTH)) if run.stepped else ""
            self._curves[run.out] = run.stepped, curve
        return curve
