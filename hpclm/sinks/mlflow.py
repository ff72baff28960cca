"""The MLflow sink. MLFLOW_TRACKING_URI names the server or database; the default is mlflow.db in the current folder."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from hpclm.base.errors import ExitCode
from hpclm.sinks import RefusedError, Row, RunInfo, figures
from hpclm.sinks.names import TrackerNames, is_path

ID = "hpclm.id"
MAX_METRICS_PER_REQUEST = 1000
MAX_PARAMETER_CHARACTERS = 6000
PARAMETERS = 40  # per request, because a request may have at most 1 MB
SHORT = 250  # characters of a parameter that every version of MLflow accepts
LATER = {401, 403, 404, 408, 425, 429}
"""HTTP statuses of requests that may succeed later, or after a login."""


class MlflowSink:
    """A run of the experiment ``run.project``. A tag identifies the run after a restart."""

    def __init__(self, run: RunInfo) -> None:
        """Create or resume the run."""
        self.client = MlflowClient()
        self._names = TrackerNames(is_path)
        self.substitutes = self._names.substitutes
        existing = self.client.get_experiment_by_name(run.project)
        experiment = existing.experiment_id if existing else self.client.create_experiment(run.project)
        earlier = self.client.search_runs([experiment], f"tags.`{ID}` = '{run.id}'")
        if earlier:
            self.id = earlier[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
            return
        created = self.client.create_run(experiment, run_name=run.name, tags={ID: run.id, "hpclm.out": str(run.out)})
        self.id = created.info.run_id
        names = TrackerNames(is_path)
        values = [(names(key), str(value)) for key, value in run.settings.items()]
        for start in range(0, len(values), PARAMETERS):
            self._add_parameters(values[start : start + PARAMETERS])

    def _add_parameters(self, values: Sequence[tuple[str, str]]) -> None:
        """Add settings; a value that the server refuses is truncated, and omitted if that does not help."""
        try:
            with refusals():
                self.client.log_batch(
                    self.id, params=[Param(name, value[:MAX_PARAMETER_CHARACTERS]) for name, value in values]
                )
        except RefusedError:
            for name, value in values:
                with suppress(RefusedError), refusals():
                    self.client.log_batch(self.id, params=[Param(name, value[:SHORT])])

    def send(self, rows: Sequence[Row], before: int) -> None:
        """Add every number at its step and time."""
        metrics = [
            Metric(self._names(key), value, int(1000 * row.get("time", time.time())), row["step"])
            for row in rows
            for key, value in figures(row).items()
        ]
        for start in range(0, len(metrics), MAX_METRICS_PER_REQUEST):
            with refusals():
                self.client.log_batch(self.id, metrics[start : start + MAX_METRICS_PER_REQUEST])

    def close(self, code: int) -> None:
        """Set the run's status."""
        status = "FAILED" if code else "FINISHED"
        if code == ExitCode.REQUEUE:
            status = "SCHEDULED"
        self.client.set_terminated(self.id, status)


@contextmanager
def refusals() -> Iterator[None]:
    """RefusedError if the server refuses a request for its content."""
    try:
        yield
    except MlflowException as error:
        status = error.get_http_status_code()
        if 400 <= status < 500 and status not in LATER:
            raise RefusedError(str(error)) from error
        raise
