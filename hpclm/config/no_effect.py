"""Find settings that have no effect because of the number of processes, the run's length, its data or its device.

They are warnings, because the user may intend them, for example if a preset is used for a smaller run. Only ``check_finished`` refuses
settings: if a run has nothing left to train, changed settings would be recorded as if they had been used.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.base.terminal import many
from hpclm.config.checks import RefusedSettingError, assignment
from hpclm.config.compose import of_run
from hpclm.config.schema import RunConfig
from hpclm.config.section import Rule, broken, given, no_effect
from hpclm.config.supports import SUPPORTS

GUARD_STEPS = 64
"""Steps before optim.guard judges."""
TRAINING = (
    *("optim.", "scaler.", "batch.", "budget.", "seed"),
    *("model.dropout", "model.attention.dropout", "model.experts.balance_", "model.experts.router_z_loss"),
)
"""Prefixes of settings that have no effect if no step follows. Settings of evaluations, logs and checkpoints may still have one."""


class Facts:
    """A run, and the known facts about it. Reading an unknown fact raises RefusedSettingError, which skips the rule."""

    def __init__(self, run: RunConfig, **known: Any):
        vars(self).update(run=run, **known)

    def __getattr__(self, name: str) -> Any:
        raise RefusedSettingError(name)


def by_facts(run: RunConfig, **known: Any) -> Iterator[str]:
    """Settings without effect because of these facts.

    plan: Plan. length: Length. per_epoch: samples of a pass over the data. held_out: names of the splits that a run evaluates.
    gpu: whether it trains on a GPU. fp32: whether it computes in fp32.
    """
    yield from broken(Facts(run, **known), OF_FACTS)


def _ranks(facts: Any) -> int:
    """Ranks that hold the same weights."""
    return int(facts.plan.data * facts.run.parallel.context)


def _alone(facts: Any) -> Iterator[str]:
    """Settings for several data-parallel replicas, in a run with one."""
    engine = facts.run.engine
    # DeepSpeed's computation depends on these settings even with one replica
    if _ranks(facts) > 1 or engine.name not in SUPPORTS or engine.name == "deepspeed":
        return
    keys = ["engine.bucket_mb", "engine.gradients", "engine.defer_reduction", "parallel.shard"]
    if engine.zero_stage:
        keys.insert(0, "engine.zero_stage")
    words = given(facts.run, *keys)
    if words:
        yield f"{no_effect(words)} with one data-parallel replica"


def _end(facts: Any) -> str:
    return f"the run ends after {many(facts.length.steps, 'step')}"


def _after_end(facts: Any) -> Iterator[str]:
    run = facts.run
    steps = facts.length.steps
    first, _ = run.profile.steps or (None, None)
    later = {"stop_at": run.stop_at, "exit_interval": run.exit_interval}
    later |= {"checkpoint.keep_every": run.checkpoint.keep_every, "profile.steps: step": first}
    for name, step in later.items():
        if steps is not None and step and step > steps:
            yield f"{name}={step} has no effect: {_end(facts)}"


def _epochs(facts: Any) -> Iterator[str]:
    epochs = facts.run.checkpoint.epochs
    samples = facts.length.samples
    if epochs is not None and samples is not None and samples < epochs * facts.per_epoch:
        words = given(facts.run, "checkpoint.epochs", "checkpoint.keep_epochs")
        yield f"{no_effect(words)}: the run ends after {samples / facts.per_epoch:.3g} epochs"


def _no_evaluations(facts: Any) -> Iterator[str]:
    """Settings of evaluations, if no data is held out for them."""
    run = facts.run
    words = given(run, "evaluate.every", "evaluate.batches", "checkpoint.keep_best")
    if words and run.evaluate.every and not facts.held_out:
        yield f"{no_effect(words)}: the data settings keep nothing for evaluations ({assignment(run, 'data.split')}, data.valid, data.validation)"


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
    """ConfigError if no step is left to train, but settings of ``run`` differ from its config.yaml. ``step``: the newest checkpoint's
    step. ``end``: the last step of the run."""
    if end is None or step < end:
        return
    try:
        before = of_run(Path(run.out), ())
    except ConfigError:  # without a valid config.yaml, nothing can be compared
        return
    changes = {key: now for key, (now, _) in run.diff(before).items() if key.startswith(TRAINING)}
    changes.pop("batch.micro_size", None)  # auto chooses anew on other GPUs
    if step == end:  # another budget may end at the same step
        changes = {key: now for key, now in changes.items() if not key.startswith("budget.")}
    if changes:
        named = ", ".join(f"{key}={value}" for key, value in changes.items())
        raise ConfigError(
            f"{run.out} is at step {step} and its budget ends at step {end}, so {named} would have no effect; raise the budget, "
            "go back to an earlier step (--from STEP, or resume_step=STEP in Python), or start another run with another out="
        )
