"""The verb ``hpclm top``: all runs below a folder, live, with the course of their losses."""

import os
import select
import shutil
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from hpclm import paths, terminal
from hpclm.commands import status as verb
from hpclm.parser import Parser
from hpclm.rundir import runs as folders
from hpclm.rundir.status import Queue, RunStatus
from hpclm.terminal import say

PATIENCE = 0.75  # seconds that Slurm has for an answer
ORDER = ("running", "starting", "completing", "waiting", "failed", "ended", "unknown")
"""Of the states, those worth looking at first."""
COLUMNS = (*verb.COLUMNS[:4], verb.CURVE, *verb.COLUMNS[4:])
CLEAR = "\x1b[H\x1b[2J"


def main(argv: list[str]) -> int:
    """``hpclm top``."""
    options = parser()
    args = options.parse_args(argv)
    if not 0.1 <= args.every <= 86400:
        options.error(f"--every {args.every} must be between 0.1 and 86400 seconds")
    watch = TopScreen(args.folder or args.runs)
    folders.check_folder(watch.folder)
    if args.once or not sys.stdout.isatty():
        statuses = watch.look()
        if statuses:
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            say("\n".join(watch.lines(statuses, width)))
        else:
            say(f"no run in {watch.folder}; name their folder, or start one with hpclm submit")
        return 0
    with suppress(KeyboardInterrupt), quit_key() as pressed:
        while True:
            sys.stdout.write(CLEAR + "\n".join(watch.screen(*shutil.get_terminal_size())))
            sys.stdout.flush()
            if pressed(args.every):
                break
    say()
    return 0


def parser() -> Parser:
    """The parser of ``hpclm top``."""
    options = Parser(
        prog="hpclm top",
        description="Show all runs below a folder, live, until q or Ctrl-C. If the output is not a terminal, print one table.",
    )
    options.add_argument(
        "folder", nargs="?", type=paths.option_path, metavar="FOLDER", help="the same as --runs FOLDER"
    )
    options.add_runs_folder()
    options.add_argument(
        "--every", type=float, default=2.0, metavar="SECONDS", help="seconds between updates (default: 2)"
    )
    options.add_argument("--once", action="store_true", help="print one table, as plain lines")
    return options


@contextmanager
def quit_key() -> Iterator[Callable[[float], bool]]:
    """A function that returns whether q was pressed within some seconds. Inside the context, the terminal does not show what is typed."""
    if not sys.stdin.isatty():
        yield lambda seconds: bool(select.select([], [], [], seconds)[0])  # a wait
        return
    keyboard = sys.stdin.fileno()

    def pressed(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while select.select([keyboard], [], [], max(0.0, until - time.monotonic()))[0]:
            keys = os.read(keyboard, 1024)
            if not keys or b"q" in keys:  # nothing: the terminal is gone
                return True
        return False

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


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

    def lines(self, statuses: list[RunStatus], width: int | None = None) -> list[str]:
        """The table, ``width`` columns wide; None: the whole one."""
        rows = [*map(row, statuses)]
        blocks = [terminal.columns([COLUMNS, *rows])] if width is None else verb.fitted(COLUMNS, rows, width)
        return [*chain.from_iterable(blocks), *self._silent()]

    def _silent(self) -> list[str]:
        return [f"queue: unknown ({terminal.line(self._queue.silent)})"] if self._queue.silent else []

    def screen(self, width: int, height: int) -> list[str]:
        """The table below a title, as much of it as there is room for."""
        statuses = self.look()
        counts = Counter(status.name for status in statuses)
        states = ", ".join(f"{count} {name}" for name, count in counts.items()) or "no runs"
        title = terminal.line(f"{self.folder}  {time.strftime('%H:%M:%S')}  {states}  (q exits)")
        header, *blocks = verb.fitted(COLUMNS, [*map(row, statuses)], width)
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
    return (*cells[:4], terminal.sparkline(status.run.summary.get("curve", [])) or "-", *cells[4:])
