"""The verb ``hpclm top``: all runs below a folder, live, with the course of their losses."""

import shutil
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from hpclm import cli, terminal
from hpclm.commands import run_table
from hpclm.commands import status as verb
from hpclm.reporting import characters
from hpclm.rundir import runs as folders
from hpclm.rundir.status import Queue, RunStatus
from hpclm.terminal import say

PATIENCE = 0.75  # seconds that Slurm has for an answer
ORDER = ("running", "starting", "completing", "waiting", "failed", "ended", "unknown")
"""Of the states, those worth looking at first."""
COLUMNS = (*verb.COLUMNS[:4], run_table.CURVE, *verb.COLUMNS[4:])
CLEAR = "\x1b[H\x1b[2J"


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
    watch = TopScreen(args.folder or args.runs)
    if args.once or not sys.stdout.isatty():
        statuses = watch.look()
        if statuses:
            say("\n".join(watch.lines(statuses)))
        else:
            say(f"{folders.none_in(watch.folder)}; name their folder, or start one with hpclm submit")
        return 0
    with suppress(KeyboardInterrupt):
        while True:
            sys.stdout.write(CLEAR + "\n".join(watch.screen(*shutil.get_terminal_size())))
            sys.stdout.flush()
            time.sleep(args.every)
    say()
    return 0


class TopScreen:
    """Looks at the runs below a folder again and again."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._queue = Queue(PATIENCE)

    def look(self) -> list[RunStatus]:
        """How the runs stand now, the most interesting first."""
        statuses = self._queue.statuses([folders.read(out) for out in folders.find(self.folder)])
        order = {name: number for number, name in enumerate(ORDER)}
        stepped = {status.run.out: status.run.summary.get("stepped") or 0.0 for status in statuses}
        return sorted(statuses, key=lambda status: (order.get(status.name, len(ORDER)), -stepped[status.run.out]))

    def lines(self, statuses: list[RunStatus]) -> list[str]:
        """The whole table, however wide."""
        return [*terminal.columns([COLUMNS, *map(row, statuses)]), *self._silent()]

    def _silent(self) -> list[str]:
        return [f"queue: unknown ({terminal.line(self._queue.silent)})"] if self._queue.silent else []

    def screen(self, width: int, height: int) -> list[str]:
        """The table below a title, as much of it as there is room for."""
        statuses = self.look()
        counts = Counter(status.name for status in statuses)
        states = ", ".join(f"{count} {name}" for name, count in counts.items()) or "no runs"
        title = terminal.line(f"{self.folder}  {time.strftime('%H:%M:%S')}  {states}  (Ctrl-C exits)")
        header, *blocks = run_table.fitted(COLUMNS, [*map(row, statuses)], width)
        lines = [title, *(self._silent() or [""]), *header]
        for number, block in enumerate(blocks):
            left = len(blocks) - number
            if len(lines) + len(block) + (left > 1) > height:
                lines.append(f"and {left} more")
                break
            lines += block
        return [terminal.shortened(line, width) for line in lines[:height]]


def row(status: RunStatus) -> tuple[str, ...]:
    """One run's line: that of ``hpclm status``, with its loss curve."""
    cells = verb.row(status)
    return (*cells[:4], characters.sparkline(status.run.summary.get("curve", [])) or "-", *cells[4:])
