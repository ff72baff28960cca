"""The Trackio sink. Trackio reads TRACKIO_DIR, TRACKIO_SPACE_ID and its other variables."""

from collections.abc import Sequence

import trackio

from hpclm.sinks import Row, RunInfo, figures
from hpclm.sinks.names import TrackerNames, is_key

RESERVED = ("project", "run", "timestamp", "step", "time", "metrics")


class TrackioSink:
    """A run of Trackio's project ``run.project``. Trackio finds runs by name, so the name includes the id."""

    def __init__(self, run: RunInfo) -> None:
        """Create or resume the run."""
        self._names = TrackerNames(lambda name: is_key(name) and name not in RESERVED)
        self.substitutes = self._names.substitutes
        self.run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id}",
            config=dict(run.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def send(self, rows: Sequence[Row], before: int) -> None:
        """Send rows; Trackio keeps a copy on disk until it is uploaded."""
        for row in rows:
            self.run.log({self._names(name): value for name, value in figures(row).items()}, step=row["step"])

    def close(self, code: int) -> None:
        """Write the remaining rows, and end the run."""
        self.run.finish()
