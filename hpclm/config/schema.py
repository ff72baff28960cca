"""All settings of a run: types, defaults and documentation.

The string under a field is its documentation, for ``hpclm config`` and docs/settings.md. ``problems`` of a section yields what is
wrong inside it; RunConfig adds contradictions between sections.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Literal

from hpclm.config import experts, fp8
from hpclm.config.checks import Checked, at_least, keyed_texts, texts
from hpclm.config.data import DataConfig
from hpclm.config.engine import EngineConfig, EngineSettings, ParallelConfig, unsupported
from hpclm.config.job import ClusterConfig, JobConfig
from hpclm.config.model import BLOCKS, ModelConfig
from hpclm.config.monitoring import EvaluateConfig, LogConfig, ProfileConfig
from hpclm.config.optim import ENDLESS, SCHEDULES, OptimConfig, ScalerConfig
from hpclm.config.optimizers import row
from hpclm.config.plan import Plan, Rampup
from hpclm.config.setting import setting
from hpclm.config.supports import SUPPORTS
from hpclm.errors import ConfigError
from hpclm.registry import load

MAX_BUDGET = 10**9  # epochs, or hours
BESIDE_TRAINING = ("log", "job")
"""Sections of settings whose code does not run in the processes that train, or only reads what they measure."""
OWN_CODE = re.compile(r"([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class BatchConfig(Checked):
    """Batch sizes."""

    global_size: int = setting(32, "Samples per optimizer step.", at_least=1, unit="samples")
    micro_size: int = setting(
        4,
        "Samples per forward and backward pass; auto: the fastest that fits, by the planner, at the first start; "
        "later ones keep it where it divides the batch.",
        at_least=0,
        unit="samples",
    )
    rampup: tuple[int, int, int] | None = setting(
        None, "[start, increment, samples]: grow the batch from start to global_size over so many samples.", at_least=1
    )
    loss_norm: Literal["token", "microbatch"] = setting(
        "token",
        "Mean over all tokens of the step, or over micro-batch means; they differ only where tokens are masked. "
        "As in Megatron, a micro-batch without a token that counts has a mean of 0; a warning says so.",
    )

    def problems(self) -> Iterator[str]:
        """Invalid batch sizes."""
        yield from at_least(1, "batch", global_size=self.global_size)
        yield from at_least(0, "batch", micro_size=self.micro_size)
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
                f"batch.rampup={list(self.rampup)} does not reach batch.global_size: batch.global_size={self.global_size} - start={start} "
                f"= {self.global_size - start} must be a multiple of increment={increment}"
            )


@dataclass(frozen=True)
class BudgetConfig(Checked):
    """How long to train: until the first limit. A length on the command line replaces those of the file or run. Samples read with other batch sizes before a resume count."""

    steps: int | None = setting(None, "Optimizer steps.", at_least=1, unit="steps")
    samples: int | None = setting(None, "Samples; an incomplete last batch is dropped.", at_least=1, unit="samples")
    tokens: int | None = setting(None, "Tokens: samples x model.context.", at_least=1, unit="tokens")
    epochs: float | None = setting(
        None,
        "Passes over the training data; with a weighted data.blend until the first dataset is exhausted.",
        more_than=0,
        at_most=MAX_BUDGET,
    )
    hours: float | None = setting(
        None,
        "Hours of training steps over all attempts, without start-up, evaluations and saves.",
        more_than=0,
        at_most=MAX_BUDGET,
        unit="hours",
    )

    def problems(self) -> Iterator[str]:
        """Invalid budgets."""
        given = dict(steps=self.steps, samples=self.samples, tokens=self.tokens)
        yield from at_least(1, "budget", **given)
        for name, value in (("epochs", self.epochs), ("hours", self.hours)):
            if value is not None and not 0 < value <= MAX_BUDGET:
                yield f"budget.{name}={value} must be a finite number of more than 0, at most {MAX_BUDGET:,}"


@dataclass(frozen=True)
class CheckpointConfig(Checked):
    """Saving and resuming."""

    enabled: bool = setting(True, "false: save nothing, for benchmarks.")
    every: int = setting(
        1000, "Steps between saves; 0: only on exit. The last step is always saved.", at_least=0, unit="steps"
    )
    minutes: float | None = setting(
        None,
        "Also save when the last save is this many minutes ago.",
        more_than=0,
        unit="minutes",
        warn_without="checkpoint.enabled: nothing is saved",
    )
    epochs: float | None = setting(
        None,
        "Also save after this many epochs.",
        more_than=0,
        unit="epochs",
        warn_without="checkpoint.enabled: nothing is saved",
    )
    background: bool = setting(
        True,
        "Write while training continues, from a copy in CPU memory.",
        warn_without="checkpoint.enabled: nothing is saved",
    )
    file_mb: float = setting(
        16.0,
        "Ranks that hold the same weights each write at least this many MB; 0: all write.",
        at_least=0,
        unit="MB",
        warn_without="checkpoint.enabled: nothing is saved",
    )
    keep_last: int = setting(
        3,
        "Keep so many healthy regular checkpoints (at least 2), the newest two regular ones in any case, and the "
        "last one saved on exit until the next regular one.",
        at_least=2,
        warn_without="checkpoint.enabled: nothing is saved",
    )
    keep_every: int = setting(
        0,
        "Also keep steps that are a multiple of this; 0: none.",
        at_least=0,
        unit="steps",
        warn_without="checkpoint.enabled: nothing is saved",
    )
    keep_best: int = setting(
        0,
        "Also keep this many with the lowest validation loss.",
        at_least=0,
        warn_without="checkpoint.enabled: nothing is saved",
    )
    keep_epochs: int = setting(
        0,
        "Also keep this many of checkpoint.epochs.",
        at_least=0,
        only_with="checkpoint.epochs",
        warn_without="checkpoint.enabled: nothing is saved",
    )
    resume: Literal["auto", "require", "never"] = setting(
        "auto",
        "auto: from the newest good checkpoint, if any; require: exit with 66 without one; never: refuse a run "
        "directory that has any.",
    )
    init_from: str | None = setting(
        None, "Run directory or checkpoint from which a new run takes only weights.", path=True
    )
    grace_seconds: float = setting(
        30.0,
        "Seconds from TERM to KILL (Slurm's GraceTime or KillWait); longer saves are not started.",
        more_than=0,
        infinite=True,
        unit="seconds",
    )

    def problems(self) -> Iterator[str]:
        """Invalid checkpoint settings."""
        yield from at_least(0, "checkpoint", every=self.every, keep_every=self.keep_every, keep_best=self.keep_best)
        yield from at_least(2, "checkpoint", keep_last=self.keep_last)
        yield from at_least(0, "checkpoint", keep_epochs=self.keep_epochs, file_mb=self.file_mb)
        if self.keep_epochs and self.epochs is None:
            yield f"checkpoint.keep_epochs={self.keep_epochs} has no effect without checkpoint.epochs, which saves at the ends of epochs"
        if not self.enabled and self.resume == "require":
            yield "checkpoint.enabled=false saves nothing, so there is nothing for checkpoint.resume=require to resume from"
        given = dict(minutes=self.minutes, grace_seconds=self.grace_seconds, epochs=self.epochs)
        for name, value in given.items():
            if value is not None and not value > 0:
                yield f"checkpoint.{name}={value} must be more than 0"
        if self.init_from is not None and self.resume == "require":
            yield "checkpoint.init_from starts a new run, which checkpoint.resume=require forbids; leave one of them out"


@dataclass(frozen=True)
class RunConfig(Checked):
    """All settings of a run."""

    name: str = setting("run", "Run name; last component of the default output directory.")
    out: str = setting("runs/${name}", "Run directory; its last part is the run's name.", path=True)
    seed: int = setting(1234, "Seed of initial weights, dropout and sample order.", at_least=0, at_most=2**32 - 1)
    stop_at: int | None = setting(
        None, "Save and exit after this step; budget and schedule stay.", at_least=1, unit="steps"
    )
    exit_interval: int | None = setting(None, "Save and exit at every multiple of this step.", at_least=1, unit="steps")
    exit_minutes: float | None = setting(
        None,
        "Save and exit this many minutes after the attempt's processes started; imports and set-up count.",
        more_than=0,
        unit="minutes",
    )
    kill_switch: str | None = setting(
        None, "Save and exit when this file exists; it must belong to you or root, and is not deleted.", path=True
    )
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    budget: BudgetConfig = BudgetConfig()
    optim: OptimConfig = OptimConfig()
    scaler: ScalerConfig = ScalerConfig()
    parallel: ParallelConfig = ParallelConfig()
    engine: EngineConfig = EngineConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    profile: ProfileConfig = ProfileConfig()
    job: JobConfig = JobConfig()
    cluster: ClusterConfig = ClusterConfig()

    def __dir__(self) -> list[str]:
        """What completion shows: the settings and ``diff``."""
        return [*super().__dir__(), "diff"]

    def __repr__(self) -> str:
        changed = {key: mine for key, (mine, _) in self.diff().items()}
        if not self.batch.micro_size:
            changed["batch.micro_size"] = "auto"
        lines = (f"\n  {key} = {value!r}" for key, value in changed.items())
        return f"RunConfig: settings that differ from the defaults{''.join(lines)}"

    def diff(self, other: "RunConfig | None" = None) -> dict[str, tuple[Any, Any]]:
        """The settings that differ from ``other``, or from the defaults, as {"optim.lr": (mine, other's)}."""
        if not isinstance(other, (RunConfig, type(None))):
            raise ConfigError("diff() compares settings with settings: run.settings.diff(other.settings)")
        theirs = dict(_leaves(other or RunConfig()))
        return {key: (mine, theirs[key]) for key, mine in _leaves(self) if mine != theirs[key]}

    def problems(self) -> Iterator[str]:
        """What is wrong at the top level and between sections."""
        if not self.name or not self.name.isprintable():
            yield f"name={self.name!r} must be one line of text that is not empty"
        if not self.out.strip():
            yield "out is empty; give the run directory"
        elif not self.out.isprintable() or self.out.strip("/") == "":
            yield f"out={self.out!r} must be a folder of the run's own, on one line"
        if not 0 <= self.seed < 2**32:
            yield f"seed={self.seed} must be at least 0 and less than 2^32, because the sample order's generator requires it"
        yield from at_least(1, "", stop_at=self.stop_at, exit_interval=self.exit_interval)
        if self.kill_switch is not None and not self.kill_switch.strip():
            yield "kill_switch is empty; give a path, or null"
        if self.exit_minutes is not None and not self.exit_minutes > 0:
            yield f"exit_minutes={self.exit_minutes} must be more than 0"
        if self.engine.precision != "fp16" and (reset := self.scaler.reset()):
            idle = f"scaler.* has no effect with engine.precision={self.engine.precision}; it applies to fp16"
            yield f"{idle}. To return to its defaults: {reset}"
        masked = self.data.eod_mask_loss or self.data.break_mode or self.data.order == "packed"
        if self.batch.loss_norm == "microbatch" and not masked:
            yield "batch.loss_norm=microbatch has no effect without data.eod_mask_loss=true"
        open_ended = self.budget.hours is not None and self.budget == BudgetConfig(hours=self.budget.hours)
        unbounded = open_ended and self.optim.schedule_length is None
        if unbounded and self.optim.schedule in SCHEDULES and self.optim.schedule not in ENDLESS:
            yield (
                f"budget.hours alone does not say how long optim.schedule={self.optim.schedule} is; "
                f"set optim.schedule_length in {self.optim.unit}, or optim.schedule=constant"
            )
        if unbounded and self.optim.warmup_fraction:
            yield "optim.warmup_fraction needs a length; set optim.schedule_length, or optim.warmup"
        yield from self.model.unsplit(self.parallel.tensor, self.parallel.context)
        yield from experts.unsplit(self.model, self.parallel)
        yield from fp8.problems(self.model, self.engine, self.parallel)
        if self.engine.name in SUPPORTS:
            can = SUPPORTS[self.engine.name]
            yield from unsupported(self.engine, self.parallel, self.optim, can)
            if can.more:
                yield from load(can.more)(self)
        if self.optim.qk_clip is not None and self.model.qk_norm:
            yield "optim.qk_clip has no effect with model.qk_norm=true, which bounds the scores already; set one of them"
        if self.optim.qk_clip is not None and self.model.block not in BLOCKS:
            yield f"optim.qk_clip cannot measure the scores of model.block={self.model.block}; it applies to {', '.join(BLOCKS)}"
        if row(self.optim.name).offloaded and self.engine.offload == "none":
            yield f"optim.name={self.optim.name} needs engine.offload=optimizer or parameters"
        if self.parallel.schedule == "zero_bubble" and self.engine.recompute != "none":
            yield (
                f"parallel.schedule=zero_bubble splits the backward pass in two, which engine.recompute={self.engine.recompute} does not support; "
                f"set engine.recompute=none, or another schedule"
            )
        stages = self.parallel.pipeline * self.parallel.chunks
        if self.parallel.pipeline > 1 and stages > self.model.layers:
            yield (
                f"parallel.pipeline={self.parallel.pipeline} x parallel.chunks={self.parallel.chunks} = {stages} stages, but "
                f"model.layers={self.model.layers}; each stage needs a block"
            )
        try:
            self.plan(self.parallel.smallest)
        except ConfigError as error:
            yield from error.problems

    def missing(self) -> list[str]:
        """Settings that are required for a run, but not for inspecting settings."""
        missing = []
        if self.data.source == "indexed" and not (self.data.prefix or self.data.blend or self.data.train):
            missing.append(
                "data.prefix is not set; give data=, a text or the prefix of a dataset, or data.blend or data.train, "
                "or data.source=synthetic"
            )
        if self.budget == BudgetConfig():
            missing.append("no budget: set budget.steps, budget.samples, budget.tokens, budget.epochs or budget.hours")
        if self.checkpoint.keep_best and self.checkpoint.enabled and not self.evaluate.every:
            missing.append(
                f"checkpoint.keep_best={self.checkpoint.keep_best} keeps the lowest validation losses, but evaluate.every=0 measures "
                "none; set evaluate.every to a divisor of checkpoint.every, or checkpoint.keep_best=0"
            )
        return missing

    def missing_libraries(self) -> list[str]:
        """Optional libraries that these settings need and that are not installed here."""
        return self.engine.missing_libraries() + self.log.missing_libraries()

    def evaluation_samples(self, per_epoch: int) -> int:
        """Samples that an evaluation reads of a split with ``per_epoch`` of them."""
        return max(1, min(self.evaluate.batches * self.batch.global_size, per_epoch))

    def modules(self) -> set[str]:
        """Top-level modules of the user's own code that settings name, as in data.tokenizer=my.mod:Tok."""
        return {match[1] for text in texts(asdict(self)) if (match := OWN_CODE.fullmatch(text))}

    def code_of_training(self) -> list[str]:
        """The settings that name the user's own code which takes part in training, as in model.block=my.mod:Block."""
        sections = {name: value for name, value in asdict(self).items() if name not in BESIDE_TRAINING}
        named = ((key, text) for key, text in keyed_texts(sections) if OWN_CODE.fullmatch(text))
        return [f"{key}={text}" for key, text in named if not text.startswith("hpclm.")]

    def for_engine(self, processes: int = 1) -> EngineSettings:
        """What an engine needs to know on ``processes``; ConfigError as of plan()."""
        sections = dict(
            model=self.model, optim=self.optim, scaler=self.scaler, parallel=self.parallel, engine=self.engine
        )
        return EngineSettings(
            plan=self.plan(processes),
            seed=self.seed,
            loss_norm=self.batch.loss_norm,
            all_tokens_count=self.data.all_tokens_count,
            timers=self.log.timers,
            file_mb=self.checkpoint.file_mb,
            saves=self.checkpoint.enabled,
            **sections,  # type: ignore[arg-type]
        )

    def plan(self, processes: int = 1) -> Plan:
        """How the batches are divided over ``processes``; ConfigError if the numbers do not fit.

        Until batch.micro_size=auto is resolved, it counts as 1.
        """
        parallel = self.parallel
        if processes % parallel.replica:
            context = f" x parallel.context={parallel.context}" * (parallel.context > 1)
            raise ConfigError(
                f"{processes} process{'es' * (processes != 1)} cannot be divided by parallel.tensor={parallel.tensor} x "
                f"parallel.pipeline={parallel.pipeline}{context} = {parallel.replica}; start {parallel.replica} or a multiple of "
                f"it, such as hpclm submit --gpus {parallel.replica}"
            )
        rampup = Rampup(*self.batch.rampup) if self.batch.rampup else None
        plan = Plan.divide(processes // parallel.replica, self.batch.global_size, self.batch.micro_size or 1, rampup)
        parallel.shard_size(processes // parallel.model)
        if (processes // parallel.model) % parallel.expert:
            raise ConfigError(
                f"parallel.expert={parallel.expert} does not divide the {processes // parallel.model} data-parallel ranks of {processes} "
                f"process{'es' * (processes != 1)}; set it to a divisor"
            )
        can = SUPPORTS.get(self.engine.name)
        for count in plan.accumulations() if can and can.counts and parallel.pipeline > 1 else ():
            needs = can.counts(count, parallel.pipeline, parallel.schedule) if can and can.counts else None
            if needs:
                raise ConfigError(
                    f"parallel.schedule={parallel.schedule} cannot run {count} micro-batches a step on parallel.pipeline="
                    f"{parallel.pipeline}; it needs {needs}: change batch.global_size, batch.micro_size or batch.rampup"
                )
        return plan


def _leaves(run: RunConfig) -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted key."""
    for outer in fields(run):
        value = getattr(run, outer.name)
        if is_dataclass(value):
            yield from ((f"{outer.name}.{inner.name}", getattr(value, inner.name)) for inner in fields(value))
        else:
            yield outer.name, value
