"""Settings that change nothing in a run, because of other settings, the number of processes, the run's length, its data or its device.

A contradiction is a rule of a section or of RunConfig, and refused. These may be meant, such as where a preset's settings serve a
smaller run: each is a warning. Only new settings of a run that has nothing left to train are refused (``check_finished``): they would be
recorded as if something had been trained with them.
"""

from collections.abc import Iterator
from math import lcm
from os.path import realpath
from pathlib import Path
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.config.checks import RefusedError, named, value_at
from hpclm.config.compose import of_run
from hpclm.config.data import mixture
from hpclm.config.data import named as named_sets
from hpclm.config.model import BLOCKS
from hpclm.config.optim import ENDLESS
from hpclm.config.schema import RunConfig
from hpclm.config.section import Rule, broken, no_effect, warnings
from hpclm.config.supports import SUPPORTS

GUARD_STEPS = 64
"""Steps before optim.guard judges."""
TRAINING = ("optim", "scaler", "batch", "budget", "seed")
"""Settings that have no effect without a further step; those of evaluations, logs and checkpoints may have one."""


class Facts:
    """A run, and what is known about it. Reading what is not known raises RefusedError, which skips a rule."""

    def __init__(self, run: RunConfig, **known: Any):
        vars(self).update(run=run, **known)

    def __getattr__(self, name: str) -> Any:
        raise RefusedError(name)


def by_settings(run: RunConfig) -> Iterator[str]:
    """Settings without effect because of other settings."""
    yield from warnings(run)
    yield from broken(run, OF_SETTINGS)


def by_facts(run: RunConfig, **known: Any) -> Iterator[str]:
    """Settings without effect because of these facts.

    plan: Plan. length: Length. per_epoch: samples of a pass over the data. held_out: names of the splits that a run evaluates.
    gpu: whether it trains on a GPU. fp32: whether it computes in fp32.
    """
    yield from broken(Facts(run, **known), OF_FACTS)


def given(run: Any, *keys: str) -> list[str]:
    """The ones of these settings that differ from their defaults, as they are typed."""
    return [named(run, key) for key in keys if value_at(run, key.rpartition(".")[0]).changed(key.rpartition(".")[2])]


def _held_out(run: Any) -> Iterator[str]:
    """Evaluations that measure nothing but the training data."""
    data = run.data
    lists = {name: mixture(getattr(data, name), name).prefixes for name in ("valid", "test") if getattr(data, name)}
    sets = named_sets(data.validation, "validation").values()
    lists["validation"] = tuple(prefix for entry in sets for prefix in entry.prefixes)
    trained = set(map(realpath, mixture(data.train, "train").prefixes)) if data.train else set()
    for name, prefixes in lists.items():
        if both := [prefix for prefix in prefixes if realpath(prefix) in trained]:
            yield f"data.{name} has no effect as held-out data: data.train contains {both[0]} too, so its loss is that of text seen in training"


def _kinds(model: Any) -> set[str]:
    """The kinds of attention that layers have."""
    return {model.attention.kind(layer) for layer in range(model.layers)}


def _unused_kinds(run: Any) -> Iterator[str]:
    if unused := [kind for kind in dict.fromkeys(run.model.attention.pattern) if kind not in _kinds(run.model)]:
        yield f"{named(run, 'model.attention.pattern')}: with {named(run, 'model.layers')} no layer is of kind {', '.join(unused)}"


def _endless(run: Any) -> Iterator[str]:
    """Settings of the end of a schedule that has none."""
    lengths = ["optim.schedule_length"] if run.optim.warmup_fraction is None else []
    if run.optim.schedule in ENDLESS and (words := given(run, "optim.min_lr", *lengths)):
        yield f"{no_effect(words)} with {named(run, 'optim.schedule')}, which has no end"


def _regular(checkpoint: Any) -> bool:
    """Whether only checkpoint.every says when to save."""
    return bool(checkpoint.enabled and checkpoint.every and checkpoint.minutes is None and checkpoint.epochs is None)


def _best(run: Any) -> Iterator[str]:
    """Steps that are saved without an evaluation, so that none of them can be the best."""
    saving, measured = run.checkpoint, run.evaluate.every
    if not (saving.enabled and saving.keep_best and measured > 1):
        return
    needs = f"{named(run, 'checkpoint.keep_best')} needs evaluations of the steps that are saved"
    settings = f"{named(run, 'checkpoint.every')} and {named(run, 'evaluate.every')}"
    if not saving.every:
        yield f"{needs}; with {settings} they fall together by chance only"
    elif saving.every % measured:
        both = lcm(saving.every, measured)
        yield (
            f"{needs}; with {settings} only multiples of {both} have one, and the last step. Set evaluate.every to a divisor of checkpoint.every"
        )


OF_SETTINGS = (
    Rule(_unused_kinds),
    Rule(
        lambda run: run.model.attention.window is not None and run.model.attention.window >= run.model.context,
        "{model.attention.window} has no effect with {model.context}: no sample is longer",
    ),
    Rule(
        lambda run: run.model.rope.window_base is not None and "window" not in _kinds(run.model),
        "{model.rope.window_base} has no effect: no layer of kind window has positions",
    ),
    Rule(
        lambda run: run.model.positions == "rope" and all("nope" in kind for kind in _kinds(run.model)),
        "model.rope.base and the other settings of rotary positions have no effect: no layer of {model.attention.pattern} has positions",
    ),
    Rule(
        lambda run: (
            not run.model.bias
            and run.model.norm == "rmsnorm"
            and None not in (run.model.attention.qkv_bias, run.model.attention.out_bias, run.model.mlp_bias)
        ),
        "model.bias=false has no effect: qkv_bias, out_bias and mlp_bias are set, and rmsnorm has none",
    ),
    Rule(_endless),
    Rule(
        lambda run: run.optim.restarts and run.optim.period is None and run.optim.schedule_length is None,
        "optim.restarts=true has no effect without optim.period: the period is the whole budget",
    ),
    Rule(
        lambda run: (
            run.optim.unit == "samples"
            and not any((run.optim.warmup, run.optim.schedule_length, run.optim.period, run.optim.wsd_decay))
            and run.batch.rampup is None
        ),
        "optim.unit=samples has no effect without optim.warmup, schedule_length, period or wsd_decay",
    ),
    Rule(
        lambda run: not run.optim.split and run.model.block not in BLOCKS,
        "optim.split=false has no effect with {model.block}: its matrices are never separated",
    ),
    Rule(
        lambda run: _regular(run.checkpoint) and run.checkpoint.keep_every % run.checkpoint.every,
        lambda run: (
            f"checkpoint.keep_every={run.checkpoint.keep_every} keeps multiples of {lcm(run.checkpoint.keep_every, run.checkpoint.every)} "
            f"only: checkpoint.every={run.checkpoint.every} saves no others"
        ),
    ),
    Rule(_best),
    Rule(_held_out),
    Rule(
        lambda run: run.batch.rampup and run.batch.rampup[0] == run.batch.global_size,
        "{batch.rampup} has no effect: it starts at {batch.global_size}",
    ),
)
"""Warnings that need nothing but the settings."""


def _ranks(facts: Any) -> int:
    """Ranks that hold the same weights."""
    return int(facts.plan.data * facts.run.parallel.context)


def _alone(facts: Any) -> Iterator[str]:
    """Settings about what data-parallel replicas divide or send, where there is one."""
    engine = facts.run.engine
    if (
        _ranks(facts) > 1 or engine.name not in SUPPORTS or engine.name == "deepspeed"
    ):  # its way to compute depends on them
        return
    stage = ["engine.zero_stage"] if engine.zero_stage else []
    others = ("engine.bucket_mb", "engine.gradients", "engine.defer_reduction", "parallel.shard")
    if words := given(facts.run, *stage, *others):
        yield f"{no_effect(words)} with one data-parallel replica"


def _end(facts: Any) -> str:
    steps = facts.length.steps
    return f"the run ends after {steps} step{'s' if steps != 1 else ''}"


def _after_end(facts: Any) -> Iterator[str]:
    """Settings of steps that do not come."""
    run, steps = facts.run, facts.length.steps
    first = run.profile.steps[0] if run.profile.steps else None
    later = {"stop_at": run.stop_at, "exit_interval": run.exit_interval}
    later |= {"checkpoint.keep_every": run.checkpoint.keep_every, "profile.steps: step": first}
    for name, step in later.items():
        if steps is not None and step and step > steps:
            yield f"{name}={step} has no effect: {_end(facts)}"


def _epochs(facts: Any) -> Iterator[str]:
    """Saves at the ends of epochs that do not come."""
    epochs, samples = facts.run.checkpoint.epochs, facts.length.samples
    if epochs is not None and samples is not None and samples < epochs * facts.per_epoch:
        words = given(facts.run, "checkpoint.epochs", "checkpoint.keep_epochs")
        yield f"{no_effect(words)}: the run ends after {samples / facts.per_epoch:.3g} epochs"


def _no_evaluations(facts: Any) -> Iterator[str]:
    """Settings of evaluations where the data keep nothing for them."""
    run = facts.run
    if facts.held_out or not run.evaluate.every:
        return
    if words := given(run, "evaluate.every", "evaluate.batches", "checkpoint.keep_best"):
        yield f"{no_effect(words)}: the data settings keep nothing for evaluations ({named(run, 'data.split')}, data.valid, data.validation)"


def _in_fp32(facts: Any) -> Iterator[str]:
    words = given(facts.run, "engine.gradients", "model.logits_fp32")
    if words and facts.fp32 and facts.run.engine.precision == "auto":
        yield f"{no_effect(words)}: engine.precision=auto is fp32 here"


OF_FACTS = (
    Rule(_alone),
    Rule(
        lambda facts: facts.run.parallel.shard and facts.run.parallel.shard >= _ranks(facts) > 1,
        lambda facts: (
            f"parallel.shard={facts.run.parallel.shard} has no effect with {_ranks(facts)} data-parallel ranks: all are in one group"
        ),
    ),
    Rule(
        lambda facts: facts.run.engine.defer_reduction and _ranks(facts) > 1 and max(facts.plan.accumulations()) == 1,
        lambda facts: "engine.defer_reduction=true has no effect: a step has one micro-batch per replica",
    ),
    Rule(
        lambda facts: (
            facts.run.batch.loss_norm == "microbatch" and max(facts.plan.accumulations()) * facts.plan.data == 1
        ),
        lambda facts: "batch.loss_norm=microbatch has no effect: a step has one micro-batch",
    ),
    Rule(_after_end),
    Rule(
        lambda facts: facts.run.optim.guard != "none" and (facts.length.steps or GUARD_STEPS) < GUARD_STEPS,
        lambda facts: (
            f"optim.guard={facts.run.optim.guard} has no effect: it judges from about {GUARD_STEPS} steps on, and {_end(facts)}"
        ),
    ),
    Rule(_epochs),
    Rule(_no_evaluations),
    Rule(
        lambda facts: facts.run.engine.deterministic and not facts.gpu and facts.run.engine.device != "cpu",
        lambda facts: "engine.deterministic=true has no effect on a CPU: it chooses among kernels of GPUs",
    ),
    Rule(_in_fp32),
)
"""Warnings that need facts about the start of a run besides its settings."""


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
