"""Every knob of a run: its type, its default and what it does.

The string under a field is its documentation; ``hpclm config`` and docs/settings.md print it.
A section's ``problems`` yields what cannot work inside it; RunConfig adds what two sections cannot do together.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from hpclm.config import supports
from hpclm.config.checkpoint import CheckpointConfig
from hpclm.config.checks import Checked, at_least
from hpclm.config.data import DataConfig
from hpclm.config.engine import EngineConfig, ParallelConfig
from hpclm.config.job import ClusterConfig, JobConfig
from hpclm.config.model import ModelConfig
from hpclm.config.optim import SCHEDULES, OptimConfig, ScalerConfig
from hpclm.config.plan import Plan, Rampup
from hpclm.config.supports import SUPPORTS
from hpclm.errors import ConfigError
from hpclm.registry import lookup


@dataclass(frozen=True)
class BatchConfig(Checked):
    """How many samples make a step."""

    global_size: int = 32
    """Samples in one optimizer step."""
    micro_size: int = 4
    """Samples in one forward and backward pass; the rest is accumulated."""
    rampup: tuple[int, int, int] | None = None
    """[start, increment, samples]: begin with start samples a step and reach global_size after that many samples."""
    loss_norm: Literal["token", "microbatch"] = "token"
    """Mean of the loss over the step's tokens, or the mean of micro-batch means (differs only with eod_mask_loss)."""

    def problems(self) -> Iterator[str]:
        """What cannot work in the batch sizes."""
        yield from at_least(1, "batch", global_size=self.global_size, micro_size=self.micro_size)
        if self.rampup is None:
            return
        start, increment, samples = self.rampup
        if start < 1 or increment < 1 or samples < 1 or start > self.global_size:
            yield (
                f"batch.rampup={list(self.rampup)} must be [start, increment, samples], all at least 1, "
                f"with start at most batch.global_size={self.global_size}"
            )
        elif (self.global_size - start) % increment:
            yield (
                f"batch.rampup={list(self.rampup)} does not arrive: batch.global_size={self.global_size} - start={start} "
                f"= {self.global_size - start} must be a multiple of increment={increment}"
            )


@dataclass(frozen=True)
class BudgetConfig(Checked):
    """When the run is done: at the first of these that is reached."""

    steps: int | None = None
    """Optimizer steps."""
    samples: int | None = None
    """Samples; a last batch that would not be full is left out."""
    tokens: int | None = None
    """Tokens, counted as samples x model.context."""
    epochs: float | None = None
    """Passes over the training documents; of a weighted data.blend, times until its first dataset has been read whole."""
    hours: float | None = None
    """Hours spent in training steps over all attempts; start-up, evaluations and saves are not counted."""

    def problems(self) -> Iterator[str]:
        """What cannot work in the budget."""
        given = dict(steps=self.steps, samples=self.samples, tokens=self.tokens)
        yield from at_least(1, "budget", **given)
        for name, value in (("epochs", self.epochs), ("hours", self.hours)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                yield f"budget.{name}={value} must be a finite number of more than 0"


@dataclass(frozen=True)
class EvaluateConfig(Checked):
    """Loss on held-out data while training."""

    every: int = 1000
    """Steps between evaluations; 0: never. The last step is evaluated too."""
    batches: int = 10
    """Batches of batch.global_size samples an evaluation reads, always the same ones."""

    def problems(self) -> Iterator[str]:
        """What cannot work in the evaluation."""
        yield from at_least(0, "evaluate", every=self.every)
        yield from at_least(1, "evaluate", batches=self.batches)


@dataclass(frozen=True)
class LogConfig(Checked):
    """What is told while training."""

    every: int = 10
    """Steps between log lines; metrics.jsonl gets every step."""
    tensorboard: bool = True
    """Write TensorBoard files."""

    def problems(self) -> Iterator[str]:
        """What cannot work in the log settings."""
        yield from at_least(1, "log", every=self.every)


@dataclass(frozen=True)
class RunConfig(Checked):
    """Everything a run is made from."""

    name: str = "run"
    """What the run is called."""
    out: str = "runs/${name}"
    """Run directory; everything the run leaves behind is in it."""
    seed: int = 1234
    """Initial weights, dropout and sample order follow from it."""
    stop_at: int | None = None
    """Save and leave once this step is done, whatever the budget; the schedule does not change. For trying things out."""
    exit_interval: int | None = None
    """Save and leave after each step that is a multiple of this; the same command goes on."""
    exit_minutes: float | None = None
    """Save and leave when this start has lasted so many minutes; the same command goes on."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    scaler: ScalerConfig = field(default_factory=ScalerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    job: JobConfig = field(default_factory=JobConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def problems(self) -> Iterator[str]:
        """What cannot work between the sections."""
        if not self.name or "\n" in self.name:
            yield f"name={self.name!r} must be one line that is not empty"
        if not self.out.strip():
            yield "out is empty; give the run directory"
        if not 0 <= self.seed < 2**32:
            yield f"seed={self.seed} must be at least 0 and less than 2^32, as the sample order's generator wants it"
        yield from at_least(1, "run", stop_at=self.stop_at, exit_interval=self.exit_interval)
        if self.exit_minutes is not None and not self.exit_minutes > 0:
            yield f"exit_minutes={self.exit_minutes} must be more than 0"
        if self.engine.precision != "fp16" and self.scaler != ScalerConfig():
            yield f"scaler.* has no effect with engine.precision={self.engine.precision}; it is for fp16"
        if self.batch.loss_norm == "microbatch" and not (self.data.eod_mask_loss or self.data.break_mode):
            yield "batch.loss_norm=microbatch has no effect without data.eod_mask_loss=true"
        timed = self.budget != BudgetConfig() and all(
            v is None for v in (self.budget.steps, self.budget.samples, self.budget.tokens, self.budget.epochs)
        )
        if (
            timed
            and self.optim.schedule_length is None
            and self.optim.schedule in SCHEDULES
            and self.optim.schedule not in ("constant", "fairseq_inverse_sqrt")
        ):
            yield (
                f"budget.hours alone does not say how long optim.schedule={self.optim.schedule} is; "
                f"set optim.schedule_length in {self.optim.unit}, or optim.schedule=constant"
            )
        if timed and self.optim.warmup_fraction and self.optim.schedule_length is None:
            yield "optim.warmup_fraction needs a length; set optim.schedule_length, or optim.warmup"
        yield from self.model.unsplit(self.parallel.tensor)
        if self.engine.name in SUPPORTS:
            can = SUPPORTS[self.engine.name]
            yield from supports.problems(self.engine, self.parallel, self.optim.name, can)
            if can.more:
                yield from lookup("check", can.more, {can.more: can.more})(self)
        if self.optim.name == "cpu_adam" and self.engine.offload == "none":
            yield "optim.name=cpu_adam needs engine.offload=optimizer or parameters"
        if self.parallel.schedule == "zero_bubble" and self.engine.recompute != "none":
            yield (
                f"parallel.schedule=zero_bubble goes backward twice, and engine.recompute={self.engine.recompute} can only once; "
                f"set engine.recompute=none, or another schedule"
            )
        stages = self.parallel.pipeline * self.parallel.chunks
        if self.parallel.pipeline > 1 and stages > self.model.layers:
            yield (
                f"parallel.pipeline={self.parallel.pipeline} x parallel.chunks={self.parallel.chunks} = {stages} stages, but "
                f"model.layers={self.model.layers}; each stage needs a block"
            )
        try:
            self.plan(self.parallel.model)
        except ConfigError as error:
            yield from error.problems

    def missing(self) -> list[str]:
        """What a run still needs to be told; settings may be looked at without it."""
        found = []
        if self.data.source == "indexed" and not (self.data.prefix or self.data.blend or self.data.train):
            found.append(
                "data.prefix is not set; give the path of a dataset made by 'hpclm preprocess', or data.blend or data.train, "
                "or data.source=synthetic"
            )
        if self.budget == BudgetConfig():
            found.append("no budget: set budget.steps, budget.samples, budget.tokens, budget.epochs or budget.hours")
        return found

    def plan(self, processes: int = 1) -> Plan:
        """How the work divides over ``processes``; ConfigError says which two numbers do not fit."""
        parallel = self.parallel
        if processes % parallel.model:
            raise ConfigError(
                f"{processes} process{'es' * (processes != 1)} cannot be divided by parallel.tensor={parallel.tensor} x "
                f"parallel.pipeline={parallel.pipeline} = {parallel.model}"
            )
        rampup = Rampup(*self.batch.rampup) if self.batch.rampup else None
        plan = Plan.divide(processes // parallel.model, self.batch.global_size, self.batch.micro_size, rampup)
        can = SUPPORTS.get(self.engine.name)
        for count in plan.accumulations() if can and can.counts and parallel.pipeline > 1 else ():
            needs = can.counts(count, parallel.pipeline, parallel.schedule) if can and can.counts else None
            if needs:
                raise ConfigError(
                    f"parallel.schedule={parallel.schedule} cannot run {count} micro-batches a step on parallel.pipeline="
                    f"{parallel.pipeline}; it needs {needs}: change batch.global_size, batch.micro_size or batch.rampup"
                )
        return plan
