"""The sinks of log.sinks, and which library each needs."""

from hpclm import extras
from hpclm.registry import problem

SINKS = {
    "wandb": "hpclm.sinks.wandb:WandbSink",
    "mlflow": "hpclm.sinks.mlflow:MlflowSink",
    "trackio": "hpclm.sinks.trackio:TrackioSink",
}


def problems(names: list[str]) -> list[str]:
    """What is wrong with log.sinks."""
    found = [text for name in names if (text := problem("sink", name, SINKS))]
    twice = sorted({name for name in names if names.count(name) > 1})
    return found + [f"log.sinks has {name!r} twice; leave one out" for name in twice]


def missing_libraries(names: list[str]) -> list[str]:
    """Libraries that the sinks ``names`` need and that are not installed here."""
    return [text for name in names if name in SINKS and (text := extras.missing(f"log.sinks=[{name}]", name))]
