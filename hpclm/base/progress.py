"""A progress bar that keeps its width: on a narrow terminal the figures beside it go first."""

import sys
import threading
from collections.abc import MutableMapping, Sequence
from typing import Any

from tqdm import tqdm

from hpclm.base import terminal

MIN_COLUMNS = 10  # columns of the bar
NARROW = 80  # columns of a terminal that does not say
LEFT = len(" 00:00:00 left")


class Bar(tqdm):
    """tqdm, without its thread, and without the lock that decides for the whole process how multiprocessing starts others."""

    monitor_interval = 0

    def __init__(self, *args: Any, **options: Any):
        """As tqdm; silent in a process without a standard error."""
        super().__init__(*args, **(options | {"disable": True} if sys.stderr is None else options))


Bar.set_lock(threading.RLock())


class ProgressBar(Bar):
    """tqdm's bar with a count, the time left and ``beside``; silent if the output is not a terminal."""

    beside: Sequence[str] = ()
    """Figures after the bar, the most important first."""

    def __init__(self, total: float | None, **options: Any):
        """As tqdm; ``total``: None if unknown, which makes a line without a bar."""
        layout = "{count}  {elapsed}{figures}" if total is None else "{count} {bar} {remaining} left{figures}"
        super().__init__(total=total, dynamic_ncols=True, disable=None, bar_format=layout, **options)

    @property
    def format_dict(self) -> MutableMapping[str, Any]:
        """As tqdm, with what the layout names."""
        values = super().format_dict
        if "ncols" not in values:  # it is disabled
            return values
        shown = tqdm.format_sizeof if self.unit_scale else str
        total = "" if self.total is None else f"/{shown(self.total)}"
        count = f"{values['prefix']}{shown(self.n)}{total}{self.unit}"
        room = (values["ncols"] or NARROW) - terminal.width(count) - 1 - MIN_COLUMNS - LEFT
        figures = ""
        for part in self.beside:
            if terminal.width(f"{figures}  {part}") > room:
                break
            figures += f"  {part}"
        return {**values, "count": count, "figures": figures}
