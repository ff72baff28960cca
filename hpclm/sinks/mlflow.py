"""MLflow; MLFLOW_TRACKING_URI names the server or database, otherwise it is mlflow.db in the current folder."""

import time
from collections.abc import Sequence

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from hpclm.errors import REQUEUE
from hpclm.sinks import Row, RunInfo, figures

ID = "hpclm.id"
MOST, LONGEST = 1000, 6000  # numbers in a request, characters of a parameter
PARAMETERS = 100  # in a request


class MlflowSink:
    """A run of the experiment ``run.project``, found again by its tag."""

    def __init__(self, run: RunInfo) -> None:
        """Create or resume the run."""
        self.client = MlflowClient()
        found = self.client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self.client.create_experiment(run.project)
        earlier = self.client.search_runs([experiment], f"tags.`{ID}` = '{run.id}'")
        if earlier:
            self.id = earlier[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
            return
        made = self.client.create_run(experiment, run_name=run.name, tags={ID: run.id, "hpclm.out": str(run.out)})
        self.id = made.info.run_id
        values = [Param(key, str(value)[:LONGEST]) for key, value in run.settings.items()]
        for start in range(0, len(values), PARAMETERS):
            self.client.log_batch(self.id, params=values[start : start + PARAMETERS])

    def send(self, rows: Sequence[Row], before: int) -> None:
        """Add every number at its step and time."""
        metrics = [
            Metric(key, value, int(1000 * row.get("time", time.time())), row["step"])
            for row in rows
            for key, value in figures(row).items()
        ]
        for start in range(0, len(metrics), MOST):
            self.client.log_batch(self.id, metrics[start : start + MOST])

    def close(self, code: int) -> None:
        """Set the run's status."""
        status = "SCHEDULED" if code == REQUEUE else "FAILED" if code else "FINISHED"
        self.client.set_terminated(self.id, status)
