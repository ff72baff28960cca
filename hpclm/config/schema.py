"""Every knob of a run: its type, its default and what it does.

The string under a field is its documentation; ``hpclm config`` and docs/settings.md print it.
A section's ``problems`` yields what cannot work inside it; RunConfig adds what two sections cannot do together.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from hpclm.config.checks import Checked, at_least, fraction
from hpclm.config.data import DataConfig
from hpclm.config.job import ClusterConfig, JobConfig
from hpclm.config.plan import Plan, Rampup
from hpclm.errors import ConfigError
from hpclm.registry import problem

BLOCKS = {"gpt": "hpclm.model.gpt:Block"}
ENGINES = {"native": "hpclm.engine.native:NativeEngine"}
SCHEDULES = {
    name: f"hpclm.optim.schedules:{name}"
    for name in [
        "constant",
        "linear",
        "cosine",
        "inverse_sqrt",
        "wsd",
        "megatron1_linear",
        "megatron1_cosine",
        "megatron1_exponential",
        "fairseq_polynomial",
        "fairseq_cosine",
        "fairseq_inverse_sqrt",
    ]
}


@dataclass(frozen=True)
class ModelConfig(Checked):
    """Shape of the network. The defaults are GPT-2's 124M."""

    vocab_size: int = 50257
    """Entries of the tokenizer's vocabulary, padding not counted."""
    vocab_multiple: int = 128
    """The token table is padded to a multiple of this, for speed; a padding entry never gets probability."""
    layers: int = 12
    """Transformer blocks."""
    hidden: int = 768
    """Width of the activations between blocks."""
    heads: int = 12
    """Attention heads; hidden / heads is the width of one."""
    kv_heads: int | None = None
    """Key and value heads for grouped-query attention; null: as many as heads."""
    ffn: int | None = None
    """Inner width of the MLP; null: 4 x hidden, or for gated activations 8/3 x hidden, rounded up to a multiple of 256."""
    context: int = 1024
    """Tokens in a sample, and the longest sequence that learned positions cover."""
    positions: Literal["learned", "sinusoidal", "rope", "alibi", "none"] = "learned"
    """How the model knows where a token stands. sinusoidal is fairseq's table (sines, then cosines, from position 2)."""
    rope_base: float = 10000.0
    """Base of the rotary wavelengths; only for positions=rope."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation before each sublayer and at the end."""
    norm_eps: float = 1e-5
    """Added to the variance inside the norm."""
    activation: Literal["gelu", "gelu_tanh", "relu", "swiglu", "geglu"] = "gelu_tanh"
    """MLP non-linearity. gelu is the exact (erf) form; gelu_tanh the approximation that GPT-2 used; *glu are gated."""
    bias: bool = True
    """Biases in the linear layers and in LayerNorm."""
    tied: bool = True
    """The output projection is the token table itself."""
    embed_norm: bool = False
    """A norm right after the embedding (BLOOM's --embed-layernorm)."""
    embed_scale: bool = False
    """Multiply token embeddings by sqrt(hidden), as fairseq does."""
    qk_norm: bool = False
    """Normalise queries and keys per head before the scores."""
    dropout: float = 0.0
    """Probability of zeroing an embedding or a sublayer's output in training."""
    attention_dropout: float = 0.0
    """Probability of zeroing an attention weight in training."""
    init_std: float = 0.02
    """Standard deviation of initial weights; projections back into the residual use it / sqrt(2 x layers)."""
    block: str = "gpt"
    """Transformer block: gpt, or your own module as package.module:Name."""

    def problems(self) -> Iterator[str]:
        """What cannot work in the shape."""
        positive = dict(layers=self.layers, hidden=self.hidden, heads=self.heads, kv_heads=self.kv_heads, ffn=self.ffn)
        positive |= dict(vocab_size=self.vocab_size, vocab_multiple=self.vocab_multiple, context=self.context)
        wrong = list(at_least(1, "model", **positive))
        yield from wrong
        yield from at_least(0, "model", init_std=self.init_std, norm_eps=self.norm_eps)
        yield from fraction("model", dropout=self.dropout, attention_dropout=self.attention_dropout)
        if wrong:
            return
        if self.hidden % self.heads:
            yield f"model.hidden={self.hidden} must be a multiple of model.heads={self.heads}"
        elif self.positions == "rope" and self.head_width % 2:
            yield f"model.positions=rope needs an even head width; hidden / heads = {self.head_width}"
        if self.heads % self.groups:
            yield f"model.heads={self.heads} must be a multiple of model.kv_heads={self.kv_heads}"
        if self.positions == "sinusoidal" and self.hidden % 2:
            yield f"model.positions=sinusoidal needs an even model.hidden, not {self.hidden}"
        if self.rope_base != 10000.0 and self.positions != "rope":
            yield f"model.rope_base={self.rope_base} has no effect with model.positions={self.positions}"
        elif not self.rope_base > 1:
            yield f"model.rope_base={self.rope_base} must be more than 1"
        wrong_block = problem("model.block", self.block, BLOCKS)
        if wrong_block:
            yield wrong_block

    @property
    def groups(self) -> int:
        """Key/value heads."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies two branches."""
        return self.activation in ("swiglu", "geglu")

    @property
    def ffn_width(self) -> int:
        """Inner width of the MLP."""
        if self.ffn:
            return self.ffn
        return -(-8 * self.hidden // (3 * 256)) * 256 if self.gated else 4 * self.hidden

    @property
    def padded_vocab(self) -> int:
        """Rows of the token table."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


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
class OptimConfig(Checked):
    """AdamW and the path of its learning rate."""

    lr: float = 6e-4
    """Highest learning rate."""
    min_lr: float = 6e-5
    """Lowest learning rate, where the schedule ends."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of Adam's running means of the gradient and of its square."""
    eps: float = 1e-8
    """Added to Adam's denominator."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    decayed: Literal["matrices", "all"] = "matrices"
    """What decays: matrices (Megatron: no biases, no norms) or all (fairseq)."""
    clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    schedule: str = "cosine"
    """constant, linear, cosine, inverse_sqrt, wsd (Megatron-core's); megatron1_linear, megatron1_cosine,
    megatron1_exponential (v1.1.5's); fairseq_polynomial, fairseq_cosine, fairseq_inverse_sqrt; or package.module:name,
    a function (position, length, optim) -> learning rate after the warm-up."""
    unit: Literal["steps", "samples"] = "steps"
    """What warmup, schedule_length, period and wsd_decay count."""
    warmup: float = 0
    """Units over which the learning rate rises linearly to lr."""
    warmup_fraction: float | None = None
    """The warm-up as a part of the schedule's length (Megatron's --warmup); instead of warmup."""
    warmup_start: float | None = None
    """Learning rate the warm-up rises from, used in the first step (Megatron: 0); null: the first step is one rung up from 0."""
    schedule_length: int | None = None
    """Units until the schedule reaches its end; null: the whole budget."""
    power: float = 1.0
    """Exponent of fairseq_polynomial."""
    period: int | None = None
    """Units of one fairseq_cosine period; null: from the warm-up to the end of the schedule."""
    restarts: bool = False
    """fairseq_cosine starts a new period after each; otherwise it stays at min_lr."""
    period_growth: float = 1.0
    """Each fairseq_cosine period is longer than the one before by this factor (--t-mult)."""
    period_shrink: float = 0.1
    """Each fairseq_cosine period's learning rates shrink by this factor (--lr-shrink)."""
    wsd_decay: int | None = None
    """Units of the final decay of wsd; null: a tenth of the schedule's length."""
    wsd_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """Shape of the final decay of wsd."""
    nonfinite: Literal["skip", "stop"] = "skip"
    """On a NaN or infinite loss or gradient: skip the step and count it, or stop the run (exit 93)."""
    nonfinite_limit: int = 20
    """With nonfinite=skip, stop (exit 93) after this many skipped steps in a row."""

    def problems(self) -> Iterator[str]:
        """What cannot work in the optimizer's settings."""
        amounts = dict(lr=self.lr, min_lr=self.min_lr, eps=self.eps, weight_decay=self.weight_decay, clip=self.clip)
        yield from at_least(0, "optim", **amounts, warmup=self.warmup, warmup_start=self.warmup_start)
        lengths = dict(
            schedule_length=self.schedule_length,
            period=self.period,
            wsd_decay=self.wsd_decay,
            period_growth=self.period_growth,
        )
        yield from at_least(1, "optim", **lengths, nonfinite_limit=self.nonfinite_limit)
        if not (self.power > 0 and math.isfinite(self.power)):
            yield f"optim.power={self.power} must be more than 0"
        if not (0 < self.period_shrink <= 1):
            yield f"optim.period_shrink={self.period_shrink} must be more than 0 and at most 1"
        for beta in self.betas:
            if not 0 <= beta < 1:
                yield f"optim.betas={list(self.betas)} must each be at least 0 and less than 1"
                break
        wrong = problem("optim.schedule", self.schedule, SCHEDULES)
        if wrong:
            yield wrong
        if self.min_lr > self.lr and self.schedule not in ("constant",):
            yield f"optim.min_lr={self.min_lr} must not be more than optim.lr={self.lr}"
        if self.warmup_fraction is not None:
            yield from fraction("optim", warmup_fraction=self.warmup_fraction)
            if self.warmup:
                yield f"optim.warmup={self.warmup} and optim.warmup_fraction={self.warmup_fraction} exclude each other"
        warmed = self.warmup or self.warmup_fraction
        if self.schedule in ("inverse_sqrt", "fairseq_inverse_sqrt") and not warmed:
            yield f"optim.schedule={self.schedule} starts at the end of a warm-up; set optim.warmup"
        if self.warmup_start is not None and self.warmup_start > self.lr:
            yield f"optim.warmup_start={self.warmup_start} must not be more than optim.lr={self.lr}"
        if self.schedule_length is not None and self.warmup >= self.schedule_length:
            yield f"optim.warmup={self.warmup:g} must be less than optim.schedule_length={self.schedule_length}"
        if self.schedule == "fairseq_cosine" and not self.restarts:
            for name in ("period_growth", "period_shrink"):
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    yield f"optim.{name}={getattr(self, name)} has no effect with optim.restarts=false"
        if self.nonfinite == "stop" and self.nonfinite_limit != type(self).nonfinite_limit:
            yield f"optim.nonfinite_limit={self.nonfinite_limit} has no effect with optim.nonfinite=stop"
        if self.schedule_length is not None and self.period is not None:
            yield f"optim.schedule_length={self.schedule_length} has no effect with optim.period={self.period}"
        rise = self.warmup or (self.warmup_fraction or 0.0) * (self.schedule_length or 0)
        if self.wsd_decay and self.schedule_length is not None and self.wsd_decay + rise > self.schedule_length:
            yield (
                f"the warm-up of {rise:g} + optim.wsd_decay={self.wsd_decay} must be at most "
                f"optim.schedule_length={self.schedule_length}"
            )
        if self.warmup_start is not None and not warmed:
            yield f"optim.warmup_start={self.warmup_start} has no effect without optim.warmup"
        owners = {
            "fairseq_polynomial": ("power",),
            "fairseq_cosine": ("period", "restarts", "period_growth", "period_shrink"),
            "wsd": ("wsd_decay", "wsd_style"),
        }
        for schedule, names in owners.items():
            for name in names:
                changed = getattr(self, name) != type(self).__dataclass_fields__[name].default
                if changed and self.schedule != schedule and self.schedule in SCHEDULES:
                    yield f"optim.{name}={getattr(self, name)} has no effect with optim.schedule={self.schedule}; it is for {schedule}"


@dataclass(frozen=True)
class ScalerConfig(Checked):
    """Loss scale for fp16: it doubles after a quiet window and halves on an overflow."""

    initial: float = 65536.0
    """First loss scale."""
    window: int = 1000
    """Steps without an overflow until the scale doubles."""
    hysteresis: int = 2
    """Overflows that are tolerated before the scale halves; at least 1."""
    consecutive: bool = False
    """Only overflows in a row use up the hysteresis."""
    minimum: float = 1.0
    """Lowest loss scale."""
    at_minimum: Literal["stay", "stop"] = "stay"
    """When the scale would fall to the minimum: stay there, or stop the run (fairseq; exit 93)."""

    def problems(self) -> Iterator[str]:
        """What cannot work in the scaler."""
        yield from at_least(1, "scaler", window=self.window, hysteresis=self.hysteresis)
        if not 0 < self.minimum <= self.initial < math.inf:
            yield f"scaler.initial={self.initial} must be at least scaler.minimum={self.minimum}, which must be more than 0"


@dataclass(frozen=True)
class EngineConfig(Checked):
    """What computes, and how."""

    name: str = "native"
    """native (plain PyTorch), or package.module:Name."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of activations and matrix products; weights and optimizer stay fp32. auto: bf16 on GPUs that have it, else fp32."""
    matmul: Literal["auto", "exact", "fast"] = "auto"
    """How fp32 products run. fast: oneDNN on CPUs, TF32 on GPUs. auto: fast where fast keeps fp32's precision, else exact."""
    compile: bool = False
    """torch.compile for the blocks and the loss."""
    recompute: Literal["none", "full", "selective"] = "none"
    """Forget activations and compute them again in the backward pass: none, whole blocks, or the attention core only."""
    recompute_every: int = 1
    """With recompute=full, blocks that are forgotten and computed again together."""
    loss_chunk: int | None = None
    """Rows (tokens) of the logits that exist at a time while the loss is computed; null: 4096 on a GPU, 512 on a CPU."""
    anomaly: bool = False
    """Stop at the operation that made a gradient NaN, with the place in the forward pass it belongs to; slow."""

    def problems(self) -> Iterator[str]:
        """What cannot work in the engine's settings."""
        wrong = problem("engine.name", self.name, ENGINES)
        if wrong:
            yield wrong
        yield from at_least(1, "engine", recompute_every=self.recompute_every, loss_chunk=self.loss_chunk)
        if self.anomaly and self.compile:
            yield "engine.anomaly=true finds nothing inside compiled blocks; set engine.compile=false"
        if self.recompute_every > 1 and self.recompute != "full":
            yield f"engine.recompute_every={self.recompute_every} has no effect with engine.recompute={self.recompute}"


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
class CheckpointConfig(Checked):
    """Saving and resuming."""

    every: int = 1000
    """Steps between saves; 0: only when leaving. The last step is saved too."""
    keep: int = 3
    """Newest checkpoints that are kept; at least 2, so that one can go bad."""
    resume: Literal["auto", "require", "never"] = "auto"
    """auto: go on from the newest good checkpoint, if there is one; require: or exit 66; never: refuse a folder that has any."""

    def problems(self) -> Iterator[str]:
        """What cannot work in the checkpoint settings."""
        yield from at_least(0, "checkpoint", every=self.every)
        yield from at_least(2, "checkpoint", keep=self.keep)


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
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    scaler: ScalerConfig = field(default_factory=ScalerConfig)
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
        yield from at_least(1, "run", stop_at=self.stop_at)
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
        try:
            self.plan()
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
        rampup = Rampup(*self.batch.rampup) if self.batch.rampup else None
        return Plan.divide(processes, self.batch.global_size, self.batch.micro_size, rampup)
