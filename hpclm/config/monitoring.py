"""Settings of what is measured and recorded while a run trains: evaluation, logging, profiling."""

from collections.abc import Iterator
from dataclasses import dataclass

from hpclm import extras
from hpclm.config.checks import Checked, at_least
from hpclm.config.setting import setting
from hpclm.registry import problem

MAX_PROFILED_STEPS = 100
SINKS = {
    "wandb": "hpclm.sinks.wandb:WandbSink",
    "mlflow": "hpclm.sinks.mlflow:MlflowSink",
    "trackio": "hpclm.sinks.trackio:TrackioSink",
}
"""The sinks of log.sinks."""


@dataclass(frozen=True)
class EvaluateConfig(Checked):
    """Loss on held-out data while training."""

    every: int = setting(
        1000, "Steps between evaluations, besides one after the last step; 0: no evaluation.", at_least=0, unit="steps"
    )
    batches: int = setting(10, "Global batches per evaluation, always the same.", at_least=1, unit="batches")

    def problems(self) -> Iterator[str]:
        """Invalid evaluation settings."""
        yield from at_least(0, "evaluate", every=self.every)
        yield from at_least(1, "evaluate", batches=self.batches)


@dataclass(frozen=True)
class LogConfig(Checked):
    """Logging while training."""

    every: int = setting(10, "Steps between log lines; metrics.jsonl has every step.", at_least=1, unit="steps")
    tensorboard: bool = setting(True, "Write TensorBoard files.")
    sinks: list[str] = setting(
        [], "Also send metrics to wandb, mlflow, trackio, or package.module:Name (hpclm docs sinks).", names=SINKS
    )
    project: str = setting(
        "hpclm", "Project in Weights & Biases and Trackio, experiment in MLflow.", warn_without="log.sinks"
    )
    timers: bool = setting(False, "Time forward pass, backward pass and update.")

    def problems(self) -> Iterator[str]:
        """Invalid log settings."""
        yield from at_least(1, "log", every=self.every)
        yield from (text for name in self.sinks if (text := problem("sink", name, SINKS)))
        twice = sorted({name for name in self.sinks if self.sinks.count(name) > 1})
        yield from (f"log.sinks has {name!r} twice; leave one out" for name in twice)
        if not self.project.strip() or not self.project.isprintable():
            yield f"log.project={self.project!r} must be one line of text that is not empty"

    def missing_libraries(self) -> list[str]:
        """Libraries that the sinks need and that are not installed here."""
        named = (name for name in self.sinks if name in SINKS)
        return [text for name in named if (text := extras.missing(f"log.sinks=[{name}]", name))]


@dataclass(frozen=True)
class ProfileConfig(Checked):
    """Where the time of a step goes, by torch.profiler."""

    steps: tuple[int, int] | None = setting(
        None,
        "[first, last]: rank 0 records these steps, as profile/rank-00000.json (for Perfetto) and a table of the "
        "ten most expensive operations.",
    )

    def problems(self) -> Iterator[str]:
        """What cannot work in the profile settings."""
        if self.steps is not None and not 1 <= self.steps[0] <= self.steps[1] < self.steps[0] + MAX_PROFILED_STEPS:
            yield (
                f"profile.steps={list(self.steps)} must be [first, last], from step 1, in order, and at most {MAX_PROFILED_STEPS} "
                "steps: a trace is held in memory"
            )
