import pytest

from hpclm.sinks import RunInfo


def test_a_number_has_its_step_and_its_time_in_milliseconds(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database costs seconds
    from hpclm.sinks.mlflow import MlflowSink

    sink = MlflowSink(RunInfo("1a", "run", "proof", tmp_path, {}))
    sink.send([{"step": 4, "time": 1234.5, "loss": 2.0}], 0)
    [metric] = sink.client.get_metric_history(sink.id, "loss")
    assert (metric.value, metric.step, metric.timestamp) == (2.0, 4, 1234500)
