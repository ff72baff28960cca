"""The table of runs on a terminal: as much of it as there is room for.

Names and states are always whole. Then the loss curve shrinks, and the least important columns go.
"""

from collections.abc import Sequence

from hpclm import terminal

CURVE, NOTES = "LOSS CURVE", ""
WORTH = ("RUN", "STATE", "STEP", "LOSS", CURVE, "LEFT", "TOKENS/S", NOTES, "LAST STEP", "CHECKPOINT")
"""Columns, the most important first."""
LEAST = {CURVE: len(CURVE), NOTES: 24}
"""How narrow a column may become: a curve by fewer points, notes by an ellipsis."""
GAP = 2


def fitted(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """The lines of the header, then of each row, ``width`` columns wide. A name that takes more than half of that is on a line of
    its own."""
    above = [[row[0]] if terminal.width(row[0]) > width // 2 else [] for row in rows]
    rest = [("", *row[1:]) if name else row for name, row in zip(above, rows, strict=True)]
    header, *lines = _lines([heads, *rest], width)
    return [[header], *([*name, line] for name, line in zip(above, lines, strict=True))]


def _lines(table: Sequence[Sequence[str]], width: int) -> list[str]:
    widths = _widths(table, width)
    shown = [(number, name) for number, name in enumerate(table[0]) if name in widths]
    return terminal.columns([[_cut(name, row[number], widths[name]) for number, name in shown] for row in table])


def _widths(table: Sequence[Sequence[str]], width: int) -> dict[str, int]:
    """The columns that there is room for, and how wide each is."""
    whole = {column[0]: max(map(terminal.width, column)) for column in zip(*table, strict=True)}
    widths, room = {}, width + GAP
    for name in WORTH:
        least = min(whole.get(name, 0), LEAST.get(name, width))
        if least and least + GAP <= room:
            widths[name] = least
            room -= least + GAP
    for name, most in ((NOTES, room // 2), (CURVE, room), (NOTES, room)):
        if name in widths:
            more = min(whole[name] - widths[name], most, room)
            widths[name] += more
            room -= more
    return widths


def _cut(name: str, cell: str, width: int) -> str:
    if name == CURVE and len(cell) > width:
        return "".join(cell[number * (len(cell) - 1) // (width - 1)] for number in range(width))
    return terminal.shortened(cell, width)
