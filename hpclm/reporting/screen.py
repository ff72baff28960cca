"""A live table on a terminal. The only file that imports rich, which honours NO_COLOR and TERM."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import sleep

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

STATES = {
    **{"running": "green", "starting": "cyan", "waiting": "yellow", "completing": "yellow"},
    **{"failed": "bold red", "ended": "red", "unknown": "magenta"},
}
STYLES = {"LOSS CURVE": "blue"}
WIDEST = 40  # characters that a column keeps on a narrow screen
AROUND = 5  # lines of the screen that are not runs


@dataclass(frozen=True)
class Rows:
    """A table whose cells are plain text already."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The most interesting first; those for which there is no room are counted."""
    title: str
    notes: Sequence[str] = ()


def live(read: Callable[[], Rows], every: float) -> None:
    """Show what ``read`` gives, again every so many seconds, until Ctrl-C."""
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        while True:
            screen.update(table(read(), console.height - AROUND), refresh=True)
            sleep(every)


def table(content: Rows, most: int) -> Table:
    """``content`` with as many rows as there is room for."""
    shown = content.rows[: max(1, most - len(content.notes))]
    more = len(content.rows) - len(shown)
    notes = [*content.notes, *([f"and {more} more"] if more else [])]
    drawn = Table(
        title=Text(content.title), caption=Text("\n".join(notes)) if notes else None, box=None, expand=True,
        title_justify="left", caption_justify="left", header_style="bold",
    )  # fmt: skip
    for number, column in enumerate(content.columns):
        longest = max(len(row[number]) for row in [content.columns, *shown])
        last = number == len(content.columns) - 1  # remarks, which take what room is left
        width = None if last else min(longest, WIDEST)
        style = STYLES.get(column, "")
        drawn.add_column(column, no_wrap=True, overflow="ellipsis", style=style, width=width, ratio=1 if last else None)
    for row in shown:
        drawn.add_row(*_cells(row))
    return drawn


def _cells(row: Sequence[str]) -> Iterator[Text]:
    for cell in row:
        yield Text(cell, style=STATES.get(cell, ""))
