"""Settings of evaluation, callbacks, logging and profiling."""

from dataclasses import dataclass
from typing import ClassVar

from hpclm.base import extras
from hpclm.config.section import Rule, Section
from hpclm.config.setting import setting

MAX_PROFILED_STEPS = 100
SINKS = {
    "wandb": "hpclm.sinks.wandb:WandbSink",
    "mlflow": "hpclm.sinks.mlflow:MlflowSink",
    "trackio": "hpclm.sinks.trackio:TrackioSink",
}
"""The sinks of log.sinks."""


@dataclass(frozen=True)
class EvaluateConfig(Section, key="evaluate"):
    """Loss on held-out data while training."""

    every: int = setting(
        1000, "Steps between evaluations, besides one after the last step; 0: no evaluation.", at_least=0, unit="steps"
    )
    batches: int = setting(10, "Global batches per evaluation, always the same.", at_least=1, unit="batches")


@dataclass(frozen=True)
class TrainConfig(Section, key="train"):
    """Your own code in the training loop."""

    callbacks: list[str] = setting(
        [],
        "Classes that rank 0 calls after steps and evaluations, as package.module:Name; they may save and stop the run "
        "(hpclm docs your-own-code).",
        names={},
    )


@dataclass(frozen=True)
class LogConfig(Section, key="log"):
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

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda log: [
                f"log.sinks has {name!r} twice; leave one out"
                for name in sorted({name for name in log.sinks if log.sinks.count(name) > 1})
            ]
        ),
        Rule(
            lambda log: not log.project.strip() or not log.project.isprintable(),
            "{log.project} must be one line of text that is not empty",
        ),
    )

    def missing_libraries(self) -> list[str]:
        """A problem for each library that the sinks need and that is not installed here."""
        return list(filter(None, (extras.missing(f"log.sinks=[{name}]", name) for name in self.sinks if name in SINKS)))


@dataclass(frozen=True)
class ProfileConfig(Section, key="profile"):
    """A profile of a step's time, by torch.profiler."""

    steps: tuple[int, int] | None = setting(
        None,
        "[first, last]: rank 0 records these steps, as profile/rank-00000.json (for Perfetto) and a table of the "
        "ten most expensive operations.",
        at_least=1,
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda profile: profile.steps and not 0 <= profile.steps[1] - profile.steps[0] < MAX_PROFILED_STEPS,
            f"{{profile.steps}} must be [first, last], in order, and at most {MAX_PROFILED_STEPS} steps: a trace is held in memory",
        ),
    )
