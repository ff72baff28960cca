"""Settings that change nothing in a run, because of other settings, the number of processes, the run's length or the device.

A contradiction is a problem of a section or of RunConfig, and refused. What is here may be meant, as where a
preset's settings serve a smaller run: it is a warning, a sentence for each, which names the setting as it is typed.
Only new settings of a run that has nothing left to train are refused (``check_finished``): they would be recorded as
if something had been trained with them.
"""

from collections.abc import Collection, Iterator, Sequence
from math import lcm
from os.path import realpath
from pathlib import Path

from hpclm.config.checks import Checked
from hpclm.config.compose import of_run
from hpclm.config.data import mixture, named
from hpclm.config.fields import as_word
from hpclm.config.model import BLOCKS
from hpclm.config.optim import ENDLESS
from hpclm.config.plan import Length, Plan
from hpclm.config.schema import RunConfig
from hpclm.config.supports import SUPPORTS
from hpclm.errors import ConfigError

GUARD_STEPS = 64
"""Steps before optim.guard judges."""
OF_SAVES = (
    "minutes",
    "epochs",
    "background",
    "file_mb",
    "keep_last",
    "keep_every",
    "keep_best",
    "keep_epochs",
)
"""Settings of checkpoint.* that say when and how to save, and what to keep; not every, which most presets
set: someone who switches saves off did not type it. evaluate.batches is left out for the same reason."""
OF_REPLICAS = ("zero_stage", "bucket_mb", "gradients", "defer_reduction")
"""Settings of engine.* about what data-parallel replicas share out or send."""
TRAINING = ("optim", "scaler", "batch", "budget", "seed")
"""Settings that have no effect without a further step; those of evaluations, logs and checkpoints may have one."""


def changed(section: Checked, *names: str) -> list[str]:
    """The ones of these settings that differ from their defaults."""
    default = type(section)()
    return [name for name in names if getattr(section, name) != getattr(default, name)]


def given(name: str, section: Checked, *settings: str) -> list[str]:
    """The ones of these settings that differ from their defaults, as they are typed."""
    return [f"{name}.{key}={as_word(getattr(section, key))}" for key in changed(section, *settings)]


def idle(words: Sequence[str]) -> str:
    """That settings have no effect."""
    return f"{', '.join(words)} {'have' if len(words) > 1 else 'has'} no effect"


def by_settings(run: RunConfig) -> Iterator[str]:
    """Settings without effect because of other settings."""
    yield from _of_model(run)
    yield from _of_optimizer(run)
    yield from _of_checkpoints(run)
    yield from _of_held_out(run)
    if run.batch.rampup and run.batch.rampup[0] == run.batch.global_size:
        yield f"batch.rampup={list(run.batch.rampup)} has no effect: it starts at batch.global_size={run.batch.global_size}"
    if run.scaler.consecutive and run.scaler.hysteresis == 1:
        yield "scaler.consecutive=true has no effect with scaler.hysteresis=1: every overflow halves the loss scale"
    if run.engine.precision == "fp32" and (words := given("engine", run.engine, "gradients")):
        yield f"{idle(words)} with engine.precision=fp32: activations and gradients are fp32"
    if run.engine.device == "cpu" and run.engine.deterministic:
        yield "engine.deterministic=true has no effect with engine.device=cpu: it chooses among kernels of GPUs"
    if not run.log.sinks and (words := given("log", run.log, "project")):
        yield f"{idle(words)} without log.sinks"
    if not run.job.container and (words := given("job", run.job, "runtime")):
        yield f"{idle(words)} without job.container"
    if run.job.hostfile and run.job.cluster not in ("auto", "mpirun"):
        yield f"job.hostfile={run.job.hostfile} has no effect with job.cluster={run.job.cluster}; it is for mpirun"


def _of_held_out(run: RunConfig) -> Iterator[str]:
    """Evaluations that measure nothing but the training data."""
    data = run.data
    lists = {
        name: mixture(getattr(data, name), name).prefixes for name in ("train", "valid", "test") if getattr(data, name)
    }
    lists["validation"] = tuple(
        prefix for entry in named(data.validation, "validation").values() for prefix in entry.prefixes
    )
    trained = set(map(realpath, lists.pop("train", ())))
    for name, prefixes in lists.items():
        if both := [prefix for prefix in prefixes if realpath(prefix) in trained]:
            yield f"data.{name} has no effect as held-out data: data.train contains {both[0]} too, so its loss is that of text seen in training"


def _of_model(run: RunConfig) -> Iterator[str]:
    model = run.model
    used = {model.kind(layer) for layer in range(model.layers)}
    if unused := [kind for kind in dict.fromkeys(model.pattern) if kind not in used]:
        yield (
            f"model.pattern={model.pattern}: with model.layers={model.layers} no layer is of kind {', '.join(unused)}"
        )
    if model.window is not None and model.window >= model.context:
        yield f"model.window={model.window} has no effect with model.context={model.context}: no sample is longer"
    if not model.window_rope_scaled and not model.rope_scaling:
        yield "model.window_rope_scaled=false has no effect without model.rope_scaling"
    if model.window_rope_base is not None and "window" not in used:
        yield f"model.window_rope_base={model.window_rope_base:g} has no effect: no layer of kind window has positions"
    if model.positions == "rope" and all("nope" in kind for kind in used):
        yield f"model.rope_base and what else turns positions have no effect: no layer of model.pattern={model.pattern} has positions"
    parts = model.qkv_bias, model.out_bias, model.mlp_bias
    if not model.bias and model.norm == "rmsnorm" and None not in parts:
        yield "model.bias=false has no effect: qkv_bias, out_bias and mlp_bias are set, and rmsnorm has none"
    if model.logits_fp32 and run.engine.precision == "fp32":
        yield "model.logits_fp32=true has no effect with engine.precision=fp32"


def _of_optimizer(run: RunConfig) -> Iterator[str]:
    optim = run.optim
    if optim.schedule in ENDLESS:
        names = ["min_lr"] + ["schedule_length"] * (optim.warmup_fraction is None)
        if words := given("optim", optim, *names):
            yield f"{idle(words)} with optim.schedule={optim.schedule}, which has no end"
    if optim.restarts and optim.period is None and optim.schedule_length is None:
        yield "optim.restarts=true has no effect without optim.period: the period is the whole budget"
    lengths = (optim.warmup, optim.schedule_length, optim.period, optim.wsd_decay)
    if optim.unit == "samples" and not any(lengths) and run.batch.rampup is None:
        yield "optim.unit=samples has no effect without optim.warmup, schedule_length, period or wsd_decay"
    if not optim.weight_decay and (words := given("optim", optim, "decayed")):
        yield f"{idle(words)} with optim.weight_decay=0"
    if not optim.split and run.model.block not in BLOCKS:
        yield f"optim.split=false has no effect with model.block={run.model.block}: its matrices are never separated"


def _of_checkpoints(run: RunConfig) -> Iterator[str]:
    saving, every = run.checkpoint, run.checkpoint.every
    if not saving.enabled:
        if words := given("checkpoint", saving, *OF_SAVES):
            yield f"{idle(words)} with checkpoint.enabled=false, which saves nothing"
        return
    regular = every and saving.minutes is None and saving.epochs is None
    if saving.keep_every and regular and saving.keep_every % every:
        both = lcm(saving.keep_every, every)
        yield f"checkpoint.keep_every={saving.keep_every} keeps multiples of {both} only: checkpoint.every={every} saves no others"
    if saving.keep_best and run.evaluate.every > 1:
        measured = f"checkpoint.keep_best={saving.keep_best} needs evaluations of the steps that are saved"
        if not every:
            yield f"{measured}; with checkpoint.every=0 and evaluate.every={run.evaluate.every} they fall together by chance only"
        elif every % run.evaluate.every:
            both = lcm(every, run.evaluate.every)
            yield (
                f"{measured}; with checkpoint.every={every} and evaluate.every={run.evaluate.every} only multiples of {both} have "
                f"one, and the last step. Set evaluate.every to a divisor of checkpoint.every"
            )


def by_processes(run: RunConfig, plan: Plan) -> Iterator[str]:
    """Settings without effect because of the number of processes."""
    engine, shard, accumulations = run.engine, run.parallel.shard, max(plan.accumulations())
    ranks = plan.data * run.parallel.context  # that hold the same weights
    if ranks == 1 and engine.name in SUPPORTS and engine.name != "deepspeed":  # whose way to compute these select too
        names = [name for name in OF_REPLICAS if name != "zero_stage" or engine.zero_stage]
        if words := [*given("engine", engine, *names), *given("parallel", run.parallel, "shard")]:
            yield f"{idle(words)} with one data-parallel replica"
    elif shard and shard >= ranks:
        yield f"parallel.shard={shard} has no effect with {ranks} data-parallel ranks: all are in one group"
    if engine.defer_reduction and ranks > 1 and accumulations == 1:
        yield "engine.defer_reduction=true has no effect: a step has one micro-batch per replica"
    if run.batch.loss_norm == "microbatch" and accumulations * plan.data == 1:
        yield "batch.loss_norm=microbatch has no effect: a step has one micro-batch"


def by_length(run: RunConfig, length: Length) -> Iterator[str]:
    """Settings without effect because the run ends before."""
    steps, saving = length.steps, run.checkpoint
    if steps is None:
        return
    ends = f"the run ends after {steps} step{'s' * (steps != 1)}"
    first = run.profile.steps[0] if run.profile.steps else None
    named = {"stop_at": run.stop_at, "exit_interval": run.exit_interval}
    named |= {"checkpoint.keep_every": saving.keep_every, "profile.steps: step": first}
    yield from (f"{name}={step} has no effect: {ends}" for name, step in named.items() if step and step > steps)
    if run.optim.guard != "none" and steps < GUARD_STEPS:
        yield f"optim.guard={run.optim.guard} has no effect: it judges from about {GUARD_STEPS} steps on, and {ends}"


def by_device(run: RunConfig, gpu: bool, fp32: bool) -> Iterator[str]:
    """Settings without effect on the device that engine.device=auto and engine.precision=auto have chosen."""
    if run.engine.deterministic and not gpu and run.engine.device != "cpu":
        yield "engine.deterministic=true has no effect on a CPU: it chooses among kernels of GPUs"
    words = given("engine", run.engine, "gradients") + given("model", run.model, "logits_fp32")
    if words and fp32 and run.engine.precision == "auto":
        yield f"{idle(words)}: engine.precision=auto is fp32 here"


def by_epochs(run: RunConfig, length: Length, per_epoch: int) -> Iterator[str]:
    """Settings without effect because the run ends before so many passes over the data; ``per_epoch``: samples in one."""
    epochs = run.checkpoint.epochs
    if epochs is not None and length.samples is not None and length.samples < epochs * per_epoch:
        words = given("checkpoint", run.checkpoint, "epochs", "keep_epochs")
        yield f"{idle(words)}: the run ends after {length.samples / per_epoch:.3g} epochs"


def by_held_out(run: RunConfig, held_out: Collection[str]) -> Iterator[str]:
    """Settings without effect because the data keep nothing for evaluations; ``held_out``: the splits that a run evaluates."""
    if held_out or not run.evaluate.every:
        return
    words = given("evaluate", run.evaluate, "every", "batches") + given("checkpoint", run.checkpoint, "keep_best")
    if words:
        yield f"{idle(words)}: the data settings keep nothing for evaluations (data.split={run.data.split}, data.valid, data.validation)"


def check_finished(run: RunConfig, step: int, end: int | None) -> None:
    """ConfigError if the newest checkpoint, of ``step``, is at the last step, ``end``, or past it, and ``run`` has other settings
    of training than its config.yaml."""
    if end is None or step < end:
        return
    try:
        before = of_run(Path(run.out), ())
    except ConfigError:  # there is none that could be compared
        return
    changes = {key: now for key, (now, _) in run.diff(before).items() if key.split(".")[0] in TRAINING}
    changes.pop("batch.micro_size", None)  # chosen anew on other GPUs
    if step == end:  # another budget of the same length
        changes = {key: now for key, now in changes.items() if not key.startswith("budget.")}
    if changes:
        named = ", ".join(f"{key}={value}" for key, value in changes.items())
        raise ConfigError(
            f"{run.out} is at step {step} and its budget ends at step {end}, so {named} would have no effect; raise the budget, "
            "go back to an earlier step (--from STEP, or resume_step=STEP in Python), or start another run with another out="
        )
