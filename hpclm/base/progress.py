"""A progress bar that keeps a minimum width: a narrow terminal shows fewer figures beside it."""

import sys
import threading
from collections.abc import MutableMapping, Sequence
from typing import Any

from tqdm import tqdm

from hpclm.base import terminal

MIN_COLUMNS = 10  # columns of the bar
NARROW = 80  # columns of a terminal of unknown width
LEFT = len(" 00:00:00 left")


class Bar(tqdm):
    """tqdm without its monitor thread, and without its lock, which would fix multiprocessing's start method."""

    monitor_interval = 0

    def __init__(self, *args: Any, **options: Any):
        """See tqdm. The bar is silent in a process without a standard error."""
        if sys.stderr is None:
            options["disable"] = True
        super().__init__(*args, **options)


Bar.set_lock(threading.RLock())


class ProgressBar(Bar):
    """tqdm's bar with a count, the time left and ``beside``; silent if the output is not a terminal."""

    beside: Sequence[str] = ()
    """Figures after the bar, the most important first."""

    def __init__(self, total: float | None, **options: Any):
        """See tqdm. ``total``: None if unknown; the line then has no bar."""
        layout = "{count} {bar} {remaining} left{figures}"
        if total is None:
            layout = "{count}  {elapsed}{figures}"
        super().__init__(total=total, dynamic_ncols=True, disable=None, bar_format=layout, **options)

    @property
    def format_dict(self) -> MutableMapping[str, Any]:
        """tqdm's values, and those that the layout names."""
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
