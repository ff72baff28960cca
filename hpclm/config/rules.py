"""Rules between sections of settings. A rule takes a RunConfig, or any object with the sections that the rule reads."""

from collections.abc import Callable, Iterator
from math import lcm
from typing import Any

from hpclm.base.terminal import many
from hpclm.config import fp8, phases
from hpclm.config.checks import RefusedSettingError, assignment
from hpclm.config.model import BLOCKS
from hpclm.config.optim import ENDLESS, SCHEDULES
from hpclm.config.optimizers import row
from hpclm.config.plan import Plan, Rampup
from hpclm.config.section import Rule, problems_of
from hpclm.config.supports import SUPPORTS, unsupported

PIECES = 2
"""Number of pieces of every sequence that a context-parallel process holds."""


def _masked(run: Any) -> bool:
    """Whether the settings of the data may mask tokens in the loss."""
    return bool(run.data.eod_mask_loss or run.data.break_mode or run.data.order == "packed")


def _unbounded(run: Any) -> bool:
    """Whether only budget.hours ends the run, which gives its schedule no length."""
    return run.budget.given == ["hours"] and run.optim.schedule_length is None


def _context_multiple(run: Any) -> int:
    return int(PIECES * run.parallel.context * run.parallel.tensor)


def _undivided(run: Any) -> Iterator[str]:
    model = run.model
    tensor = run.parallel.tensor
    sizes = {"model.attention.heads": model.attention.heads}
    if model.dense_layers:
        sizes["the MLP's inner width (model.ffn)"] = model.ffn_width
    if model.experts.count and model.experts.shared_ffn:
        sizes["the shared experts' inner width (model.experts.shared_ffn)"] = model.experts.shared_ffn
    for name, size in sizes.items():
        if size % tensor:
            yield f"{name}={size} must be a multiple of parallel.tensor={tensor}"


SPLIT = (
    Rule(
        lambda run: run.parallel.context > 1 and run.model.context % _context_multiple(run),
        lambda run: (
            f"model.context={run.model.context} must be a multiple of {PIECES} x parallel.context={run.parallel.context} x "
            f"parallel.tensor={run.parallel.tensor} = {_context_multiple(run)}: each process holds two pieces of every sequence"
        ),
    ),
    Rule(
        lambda run: run.parallel.context > 1 and run.model.attention.dropout,
        "{model.attention.dropout} is not supported with {parallel.context}",
    ),
    Rule(
        lambda run: run.parallel.context > 1 and run.model.block not in BLOCKS,
        "{model.block} is not supported with {parallel.context}",
    ),
    Rule(_undivided),
    Rule(
        lambda run: (
            run.model.attention.groups % run.parallel.tensor and not run.model.attention.heads % run.parallel.tensor
        ),
        lambda run: (
            f"model.attention.kv_heads={run.model.attention.groups} must be a multiple of parallel.tensor={run.parallel.tensor}: each process needs whole "
            f"key/value heads; lower parallel.tensor to a divisor of {run.model.attention.groups}"
        ),
    ),
    Rule(
        lambda run: run.model.experts.count and run.model.experts.count % run.parallel.expert,
        "{model.experts.count} must be a multiple of {parallel.expert}",
    ),
    Rule(
        lambda run: (
            run.model.experts.count and run.parallel.split_experts and run.model.expert_width % run.parallel.tensor
        ),
        lambda run: (
            f"the experts' inner width (model.experts.ffn)={run.model.expert_width} must be a multiple of "
            f"parallel.tensor={run.parallel.tensor}; or set parallel.split_experts=false"
        ),
    ),
)
"""Rules between the sections model and parallel: how a model can be divided over processes."""


def _with_fp8(broken: Callable[[Any], Any], sentence: str | Callable[[Any], str] | None = None) -> Rule:
    return Rule(lambda run: broken(run) if run.engine.fp8 is not None else (), sentence)


def _odd_widths(run: Any) -> Iterator[str]:
    """Widths of matrices that are not multiples of fp8.MULTIPLE."""
    model = run.model
    tensor = run.parallel.tensor
    qkv_width = (model.attention.heads + 2 * model.attention.groups) * model.head_width
    split = {"the projection to queries, keys and values": qkv_width, "attention's output": model.attention_width}
    if model.dense_layers:
        split["the MLP's inner width (model.ffn)"] = model.ffn_width
    if model.experts.count and model.experts.shared_ffn:
        split["the shared experts' inner width (model.experts.shared_ffn)"] = model.experts.shared_ffn
    on_each = f" on each of parallel.tensor={tensor} processes" if tensor > 1 else ""
    widths = {"model.hidden": model.hidden} | {f"{name}{on_each}": size / tensor for name, size in split.items()}
    for name, width in widths.items():
        if width % fp8.MULTIPLE:
            yield f"engine.fp8={run.engine.fp8} needs widths that are multiples of {fp8.MULTIPLE}, and {name} is {width:g} wide"


FP8 = (
    _with_fp8(
        lambda run: run.engine.precision not in ("auto", "bf16"),
        lambda run: f"engine.fp8={run.engine.fp8} needs engine.precision=bf16, not {run.engine.precision}",
    ),
    _with_fp8(
        lambda run: run.model.block not in BLOCKS,
        f"{{engine.fp8}} does not support {{model.block}}; it applies to {', '.join(BLOCKS)}",
    ),
    _with_fp8(
        lambda run: run.model.attention.latent.kv_rank,
        "{engine.fp8} does not support {model.attention.latent.kv_rank}",
    ),
    _with_fp8(
        lambda run: not fp8.blocks(run.model),
        "{engine.fp8} has no effect with {model.layers}: the first and the last block stay in bf16",
    ),
    _with_fp8(_odd_widths),
)
"""Settings that engine.fp8 does not support."""

BETWEEN_SECTIONS = (
    Rule(
        lambda run: run.batch.loss_norm == "microbatch" and not _masked(run),
        "batch.loss_norm=microbatch has no effect without data.eod_mask_loss=true",
    ),
    Rule(
        lambda run: _unbounded(run) and run.optim.schedule in SCHEDULES and run.optim.schedule not in ENDLESS,
        lambda run: (
            f"budget.hours alone does not say how long optim.schedule={run.optim.schedule} is; "
            f"set optim.schedule_length in {run.optim.unit}, or optim.schedule=constant"
        ),
    ),
    Rule(
        lambda run: _unbounded(run) and run.optim.warmup_fraction,
        "optim.warmup_fraction needs a length; set optim.schedule_length, or optim.warmup",
    ),
    *SPLIT,
    *FP8,
    Rule(
        lambda run: unsupported(run, SUPPORTS[run.engine.name]) if run.engine.name in SUPPORTS else (),
    ),
    Rule(
        lambda run: run.optim.qk_clip is not None and run.model.block not in BLOCKS,
        lambda run: (
            f"optim.qk_clip cannot measure the scores of model.block={run.model.block}; it applies to {', '.join(BLOCKS)}"
        ),
    ),
    Rule(
        lambda run: row(run.optim.name).offloaded and run.engine.offload == "none",
        "{optim.name} needs engine.offload=optimizer or parameters",
    ),
    Rule(
        lambda run: run.parallel.schedule == "zero_bubble" and run.engine.recompute != "none",
        "parallel.schedule=zero_bubble splits the backward pass in two, which {engine.recompute} does not support; "
        "set engine.recompute=none, or another schedule",
    ),
    Rule(
        lambda run: run.parallel.pipeline > 1 and run.parallel.stages > run.model.layers,
        lambda run: (
            f"parallel.pipeline={run.parallel.pipeline} x parallel.chunks={run.parallel.chunks} = {run.parallel.stages} stages, but "
            f"model.layers={run.model.layers}; each stage needs a block"
        ),
    ),
    Rule(lambda run: problems_of(run.plan, run.parallel.smallest)),
    Rule(
        lambda run: run.data.order == "per_dataset" and (run.budget.epochs or run.checkpoint.epochs),
        "data.order=per_dataset has no epochs that all datasets share; set budget.tokens or budget.steps instead of budget.epochs, and "
        "checkpoint.every instead of checkpoint.epochs",
    ),
    Rule(
        lambda run: run.data.order == "per_dataset" and run.budget.given == ["hours"],
        "data.order=per_dataset needs the length of the run in steps, samples or tokens, not only {budget.hours}",
    ),
    Rule(phases.problems),
)
"""Rules that do not depend on the number of processes. Every command that reads settings applies them."""


def _unmeasured(run: Any) -> str:
    """A warning if some steps are saved without an evaluation, because these can never be the best; else empty."""
    saving = run.checkpoint
    measured = run.evaluate.every
    if not (saving.enabled and saving.keep_best and measured > 1):
        return ""
    needs = f"{assignment(run, 'checkpoint.keep_best')} needs evaluations of the steps that are saved"
    settings = f"{assignment(run, 'checkpoint.every')} and {assignment(run, 'evaluate.every')}"
    if not saving.every:
        return f"{needs}; with {settings} they coincide only by chance"
    if saving.every % measured == 0:
        return ""
    only = f"only the last step and multiples of {lcm(saving.every, measured)} have one"
    return f"{needs}; with {settings} {only}. Set evaluate.every to a divisor of checkpoint.every"


def _without_unit(run: Any) -> bool:
    """Whether none of the lengths that are measured in optim.unit is set."""
    optim = run.optim
    lengths = (optim.warmup, optim.schedule_length, optim.period, optim.wsd_decay)
    return not any(lengths) and run.batch.rampup is None


WARNINGS = (
    Rule(
        lambda run: run.optim.unit == "samples" and _without_unit(run),
        "optim.unit=samples has no effect without optim.warmup, schedule_length, period or wsd_decay",
    ),
    Rule(
        lambda run: not run.optim.split and run.model.block not in BLOCKS,
        "optim.split=false has no effect with {model.block}: its matrices are never separated",
    ),
    Rule(_unmeasured, _unmeasured),
)
"""Settings that have no effect because of settings in another section. These are warnings, because the user may intend that."""


class Division:
    """A run on a number of processes. A property that a broken rule leaves undefined raises RefusedSettingError."""

    def __init__(self, run: Any, processes: int):
        self.run = run
        self.processes = processes

    @property
    def replicas(self) -> int:
        """Groups of processes that read different samples."""
        if self.processes % self.run.parallel.replica:
            raise RefusedSettingError
        return int(self.processes // self.run.parallel.replica)

    @property
    def data_ranks(self) -> int:
        """Data-parallel ranks, context-parallel ones included."""
        return self.replicas * int(self.run.parallel.context)

    def divide(self) -> Plan:
        """The division of batches; ConfigError if the sizes do not fit. batch.micro_size=auto counts as 1 until it is resolved."""
        batch = self.run.batch
        rampup = Rampup(*batch.rampup) if batch.rampup else None
        return Plan.divide(self.replicas, batch.global_size, batch.micro_size or 1, rampup)

    @property
    def several(self) -> str:
        """The number of processes in words."""
        return many(self.processes, "process")


def _undivided_processes(division: Division) -> str:
    parallel = division.run.parallel
    context = f" x parallel.context={parallel.context}" if parallel.context > 1 else ""
    return (
        f"{division.several} cannot be divided by parallel.tensor={parallel.tensor} x parallel.pipeline={parallel.pipeline}{context} = "
        f"{parallel.replica}; start {parallel.replica} or a multiple of it, such as hpclm submit --gpus {parallel.replica}"
    )


def _uncountable(division: Division) -> Iterator[str]:
    """The first number of micro-batches that the pipeline's schedule cannot run."""
    run = division.run
    can = SUPPORTS.get(run.engine.name)
    if not (can and can.counts and run.parallel.pipeline > 1) or problems_of(division.divide):
        return
    for count in division.divide().accumulations():
        if needs := can.counts(count, run.parallel.pipeline, run.parallel.schedule):
            yield (
                f"parallel.schedule={run.parallel.schedule} cannot run {count} micro-batches a step on parallel.pipeline="
                f"{run.parallel.pipeline}; it needs {needs}: change batch.global_size, batch.micro_size or batch.rampup"
            )
            return


OF_PROCESSES = (
    Rule(lambda division: division.processes % division.run.parallel.replica, _undivided_processes),
    Rule(lambda division: problems_of(division.divide)),
    Rule(lambda division: problems_of(division.run.parallel.shard_size, division.data_ranks)),
    Rule(
        lambda division: division.data_ranks % division.run.parallel.expert,
        lambda division: (
            f"parallel.expert={division.run.parallel.expert} does not divide the {division.data_ranks} data-parallel ranks of "
            f"{division.several}; set it to a divisor"
        ),
    ),
    Rule(_uncountable),
)
"""Rules that need the number of processes."""

OF_TRAINING = (
    Rule(
        lambda run: run.data.source == "indexed" and not (run.data.prefix or run.data.blend or run.data.train),
        "data.prefix is not set; give data= (a text or the prefix of a dataset), data.blend, data.train or data.source=synthetic",
    ),
    Rule(
        lambda run: not run.budget.given,
        "no budget: set budget.steps, budget.samples, budget.tokens, budget.epochs or budget.hours",
    ),
    Rule(
        lambda run: run.checkpoint.keep_best and run.checkpoint.enabled and not run.evaluate.every,
        "{checkpoint.keep_best} keeps the lowest validation losses, but evaluate.every=0 measures none; set evaluate.every to a divisor "
        "of checkpoint.every, or checkpoint.keep_best=0",
    ),
)
"""Rules for runs that train. Settings that a command only inspects may break them."""
