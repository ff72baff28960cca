"""All settings of a run.

A section declares its settings (setting.py) and the rules between them (section.py); rules.py has those between sections.
"""

import re
from dataclasses import asdict, dataclass, field, fields
from math import lcm
from typing import Any, ClassVar, Literal

from hpclm.base.errors import ConfigError
from hpclm.config import rules
from hpclm.config.checks import keyed_texts, texts, value_at
from hpclm.config.data import DataConfig
from hpclm.config.engine import EngineConfig, ParallelConfig
from hpclm.config.job import ClusterConfig, JobConfig
from hpclm.config.model import ModelConfig
from hpclm.config.monitoring import EvaluateConfig, LogConfig, ProfileConfig, TrainConfig
from hpclm.config.optim import OptimConfig, ScalerConfig
from hpclm.config.plan import Plan
from hpclm.config.rules import WARNINGS
from hpclm.config.section import Rule, Section, all_fields, broken
from hpclm.config.setting import setting

SAVES = "checkpoint.enabled: nothing is saved"
MAX_BUDGET = 10**9  # epochs, or hours
BESIDE_TRAINING = ("log", "job", "train")
"""Sections that may name user code which takes no part in training: it runs in other processes, or only reads metrics."""
OWN_CODE = re.compile(r"([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class BatchConfig(Section, key="batch"):
    """Batch sizes."""

    global_size: int = setting(32, "Samples per optimizer step.", at_least=1, unit="samples")
    micro_size: int = setting(
        4,
        "Samples per forward and backward pass; auto: the fastest size that fits, which the planner finds at the first "
        "start; later starts keep it if it divides the batch and model.context is the same.",
        at_least=1,
        auto=0,
        unit="samples",
    )
    rampup: tuple[int, int, int] | None = setting(
        None,
        "[start, increment, samples]: grow the batch from start to global_size over this many samples.",
        at_least=1,
    )
    loss_norm: Literal["token", "microbatch"] = setting(
        "token",
        "Mean over all tokens of the step, or over micro-batch means; they differ only if tokens are masked. "
        "A micro-batch without unmasked tokens has a mean of 0, as in Megatron; a warning reports it.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda batch: batch.rampup and batch.rampup[0] > batch.global_size,
            "{batch.rampup} must be [start, increment, samples], with start at most {batch.global_size}",
        ),
        Rule(
            lambda batch: batch.rampup and (batch.global_size - batch.rampup[0]) % batch.rampup[1],
            lambda batch: (
                f"batch.rampup={list(batch.rampup)} does not reach batch.global_size: batch.global_size={batch.global_size} - "
                f"start={batch.rampup[0]} = {batch.global_size - batch.rampup[0]} must be a multiple of increment={batch.rampup[1]}"
            ),
        ),
    )
    warnings: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda batch: batch.rampup and batch.rampup[0] == batch.global_size,
            "{batch.rampup} has no effect: it starts at {batch.global_size}",
        ),
    )


@dataclass(frozen=True)
class BudgetConfig(Section, key="budget"):
    """How long to train: until the first limit. A length on the command line replaces all lengths of the file or run. After a resume, samples that were read with other batch sizes count too."""

    steps: int | None = setting(None, "Optimizer steps.", at_least=1)
    samples: int | None = setting(None, "Samples; an incomplete last batch is dropped.", at_least=1)
    tokens: int | None = setting(None, "Tokens: samples x model.context.", at_least=1)
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
    )

    @property
    def given(self) -> list[str]:
        """The units with a limit."""
        return [entry.name for entry in fields(self) if getattr(self, entry.name) is not None]


@dataclass(frozen=True)
class CheckpointConfig(Section, key="checkpoint"):
    """Saving and resuming."""

    enabled: bool = setting(True, "false: save nothing, for benchmarks.")
    every: int = setting(
        1000, "Steps between saves; 0: only on exit. The last step is always saved.", at_least=0, unit="steps"
    )
    minutes: float | None = setting(
        None, "Also save when the last save is this many minutes ago.", more_than=0, warn_without=SAVES
    )
    epochs: float | None = setting(None, "Also save after this many epochs.", more_than=0, warn_without=SAVES)
    background: bool = setting(True, "Write while training continues, from a copy in CPU memory.", warn_without=SAVES)
    file_mb: float = setting(
        16.0,
        "Ranks that hold the same weights each write at least this many MB; 0: all write.",
        at_least=0,
        warn_without=SAVES,
    )
    keep_last: int = setting(
        3,
        "How many healthy periodic checkpoints to keep; the two newest are always kept. A checkpoint saved on exit "
        "is kept until the next periodic one.",
        at_least=2,
        warn_without=SAVES,
    )
    keep_every: int = setting(
        0, "Also keep steps that are a multiple of this; 0: none.", at_least=0, unit="steps", warn_without=SAVES
    )
    keep_best: int = setting(0, "Also keep this many with the lowest validation loss.", at_least=0, warn_without=SAVES)
    keep_epochs: int = setting(
        0, "Also keep this many of checkpoint.epochs.", at_least=0, only_with="checkpoint.epochs", warn_without=SAVES
    )
    resume: Literal["auto", "require", "never"] = setting(
        "auto",
        "auto: from the newest good checkpoint, if any; require: exit with 66 without one; never: refuse a run "
        "directory that has any.",
    )
    init_from: str | None = setting(
        None, "Run directory or checkpoint that gives a new run its weights, and nothing else.", path=True
    )
    grace_seconds: float = setting(
        30.0,
        "Seconds from TERM to KILL (Slurm's GraceTime or KillWait); longer saves are not started.",
        more_than=0,
        infinite=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda checkpoint: not checkpoint.enabled and checkpoint.resume == "require",
            "checkpoint.enabled=false saves nothing, so there is nothing for checkpoint.resume=require to resume from",
        ),
        Rule(
            lambda checkpoint: checkpoint.init_from is not None and checkpoint.resume == "require",
            "checkpoint.init_from starts a new run, which checkpoint.resume=require forbids; leave one of them out",
        ),
    )
    warnings: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda checkpoint: checkpoint.is_regular and checkpoint.keep_every % checkpoint.every,
            lambda checkpoint: (
                f"checkpoint.keep_every={checkpoint.keep_every} keeps multiples of {lcm(checkpoint.keep_every, checkpoint.every)} only: "
                f"checkpoint.every={checkpoint.every} saves no others"
            ),
        ),
    )

    @property
    def is_regular(self) -> bool:
        """Whether saves happen at multiples of checkpoint.every and at no other steps."""
        return bool(self.enabled and self.every and self.minutes is None and self.epochs is None)


@dataclass(frozen=True)
class EngineSettings:
    """The settings that an engine needs. RunConfig.for_engine() returns them."""

    model: ModelConfig
    plan: Plan
    optim: OptimConfig = field(default_factory=OptimConfig)
    scaler: ScalerConfig = field(default_factory=ScalerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    seed: int = 1234
    loss_norm: str = "token"
    """See batch.loss_norm."""
    all_tokens_count: bool = False
    """Whether every token of the training data counts in the loss, so that the host knows their number."""
    timers: bool = False
    """See log.timers."""
    file_mb: float = 16.0
    """See checkpoint.file_mb."""
    saves: bool = True
    """See checkpoint.enabled."""
    in_place: bool = True
    """Whether backward passes may add to fp32 gradients in place, if the engine and the device support it."""


@dataclass(frozen=True)
class RunConfig(Section):
    """All settings of a run."""

    name: str = setting("run", "Run name; last component of the default output directory.")
    out: str = setting("runs/${name}", "Run directory; its last part is the run's name.", path=True)
    seed: int = setting(
        1234,
        "Seed of initial weights, dropout and sample order.",
        at_least=0,
        at_most=2**32 - 1,
        advice="random number generators take seeds of 32 bits",
    )
    stop_at: int | None = setting(
        None, "Save and exit after this step; budget and schedule do not change.", at_least=1, unit="steps"
    )
    exit_interval: int | None = setting(
        None, "Save and exit at every step that is a multiple of this.", at_least=1, unit="steps"
    )
    exit_minutes: float | None = setting(
        None,
        "Save and exit this many minutes after the attempt's processes started; imports and set-up count.",
        more_than=0,
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
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    profile: ProfileConfig = ProfileConfig()
    job: JobConfig = JobConfig()
    cluster: ClusterConfig = ClusterConfig()

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda run: not run.name or not run.name.isprintable(), "{name} must be one line of text that is not empty"
        ),
        Rule(lambda run: not run.out.strip(), "out is empty; give the run directory"),
        Rule(
            lambda run: run.out.strip() and (not run.out.isprintable() or run.out.strip("/") == ""),
            "{out} must be a folder of the run's own, on one line",
        ),
        Rule(
            lambda run: run.kill_switch is not None and not run.kill_switch.strip(),
            "kill_switch is empty; give a path, or null",
        ),
        *rules.BETWEEN_SECTIONS,
    )
    warnings: ClassVar[tuple[Rule, ...]] = WARNINGS

    def __dir__(self) -> list[str]:
        """The names that completion shows: the settings and ``diff``."""
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
        theirs = other or RunConfig()
        keys = [key for key, _ in all_fields(RunConfig)]
        return {
            key: (value_at(self, key), value_at(theirs, key))
            for key in keys
            if value_at(self, key) != value_at(theirs, key)
        }

    def missing(self) -> list[str]:
        """Problems that stop training, although a command may inspect the settings."""
        return list(broken(self, rules.OF_TRAINING))

    def missing_libraries(self) -> list[str]:
        """A problem for each optional library that these settings need and that is not installed here."""
        return self.engine.missing_libraries() + self.log.missing_libraries()

    def evaluation_samples(self, per_epoch: int) -> int:
        """Number of samples that an evaluation reads of a split with ``per_epoch`` samples."""
        return max(1, min(self.evaluate.batches * self.batch.global_size, per_epoch))

    def modules(self) -> set[str]:
        """Top-level modules of the user's own code in the settings: my in data.tokenizer=my.mod:Tok."""
        matches = map(OWN_CODE.fullmatch, texts(asdict(self)))
        return {match[1] for match in matches if match}

    def code_of_training(self) -> list[str]:
        """The settings that name user code which takes part in training, such as model.block=my.mod:Block."""
        sections = {name: value for name, value in asdict(self).items() if name not in BESIDE_TRAINING}
        named = ((key, text) for key, text in keyed_texts(sections) if OWN_CODE.fullmatch(text))
        return [f"{key}={text}" for key, text in named if not text.startswith("hpclm.")]

    def for_engine(self, processes: int = 1) -> EngineSettings:
        """The settings of the engine on ``processes``; ConfigError if plan() raises it."""
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
        """The division of batches over ``processes``; ConfigError if the sizes do not fit."""
        division = rules.Division(self, processes)
        if problems := list(broken(division, rules.OF_PROCESSES)):
            raise ConfigError(problems)
        return division.divide()
