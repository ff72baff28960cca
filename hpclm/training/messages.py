"""Log messages about the whole run, at its start and its end."""

import logging
import math
from collections.abc import Iterable
from pathlib import Path

import torch

from hpclm.base import files
from hpclm.base.errors import ConfigError
from hpclm.checkpoint import Progress
from hpclm.config import BudgetConfig, ModelConfig, Plan, RunConfig
from hpclm.config.checks import typed
from hpclm.config.model import BLOCKS
from hpclm.config.phases import IN_PLACE, OWN, Timeline
from hpclm.config.plan import Length
from hpclm.data import tokenizer_folder
from hpclm.distributed.context import DistributedContext
from hpclm.model import count
from hpclm.model.attention import backend as attention_backend
from hpclm.node import apex, hardware
from hpclm.optim.schedules import Schedule
from hpclm.rundir import folder

logger = logging.getLogger(__name__)
SAME = 1e-9  # relative difference of learning rates that counts as rounding


def device(device: torch.device, dtype: torch.dtype, products: str) -> None:
    """Log the device and the types; ``products``: how fp32 matrix products run."""
    logger.info("%s, %s; fp32 matmuls: %s", hardware.describe(device), str(dtype).removeprefix("torch."), products)
    slow = hardware.slow_type(device, dtype)
    if slow:
        logger.warning("%s", slow)


def without_effect(reasons: Iterable[str]) -> None:
    """Warn about settings that change nothing in this run."""
    for reason in reasons:
        logger.warning("%s", reason)


def log_start(config: RunConfig, plan: Plan, context: DistributedContext, length: Length, samples: int) -> None:
    """Log the size of the run: model, steps, data, job and processes."""
    steps = "until the time is up"
    if length.steps is not None:
        steps = f"{length.steps:,} steps{_limit(config.budget, length.steps)}"
    size = (
        f"{count.described_size(config.model)}; {steps} of {plan.global_size} samples x {config.model.context} tokens"
    )
    logger.info("%s, %s samples of training data", size, f"{samples:,}")
    if context.job.id:
        logger.info("%s", context.job)
    if context.size > 1:
        by = "locally" if context.world.launcher == "local" else f"by {context.world.launcher}"
        started = f"{context.size} processes, launched {by}, on {', '.join(context.hosts)}"
        logger.info(
            "%s; micro-batch size %d, %d per replica in each step", started, plan.micro_size, plan.accumulation(0)
        )


def _limit(budget: BudgetConfig, steps: int) -> str:
    """The budget that ends a run of ``steps`` steps before budget.steps; empty if none does."""
    if not budget.steps or steps >= budget.steps:
        return ""
    others = {name: getattr(budget, name) for name in ("samples", "tokens", "epochs")}
    tightest = ", ".join(f"budget.{name}={value}" for name, value in others.items() if value is not None)
    return f" ({tightest} ends the run before budget.steps={budget.steps})"


def kernels(model: ModelConfig, device: torch.device) -> None:
    """With model.kernels=apex: log whether apex's fused operations are used."""
    if model.kernels != "apex":
        return
    if device.type != "cuda":
        logger.warning("model.kernels=apex is for GPUs; using PyTorch's own operations")
    elif not apex.norms():
        logger.warning("model.kernels=apex: NVIDIA apex cannot be imported here; using PyTorch's own operations")
    else:
        logger.info("kernels: NVIDIA apex's norms")


def export(model: ModelConfig) -> None:
    """Log that a network with a user-defined block has no export."""
    if model.block not in BLOCKS:
        logger.info(
            "model.block=%s has no export by hpclm convert; hpclm.load gives its network in Python", model.block
        )


def attention(model: ModelConfig, choice: attention_backend.KernelChoice | None) -> None:
    """Log the kernels of attention; ``choice``: None on a CPU, which uses PyTorch's kernel."""
    if choice is None:
        if model.attention.kernel != "auto":
            logger.warning("model.attention.kernel=%s is for GPUs; a CPU uses PyTorch's own", model.attention.kernel)
        return
    if choice.warning:
        logger.warning("%s", choice.warning)
    logger.info("attention: %s", choice)


def other_budget(progress: Progress, samples: int | None) -> None:
    """Warn that the run's number of samples, and with it their order, has changed since the checkpoint."""
    logger.warning(
        "the run's samples changed from %s to %s. The data order depends on their number, so samples may be repeated or skipped after "
        "step %d, unless both fit in one epoch",
        progress.planned,
        samples,
        progress.step,
    )


def changed_schedule(before: Schedule, now: Schedule, progress: Progress) -> None:
    """Warn if the learning rate or batch size of the next step differs from that of ``before``, the last attempt's schedule."""
    step = progress.step
    samples = progress.samples
    changes = []
    old_rate, new_rate = before.rate(step, samples), now.rate(step, samples)
    if not math.isclose(old_rate, new_rate, rel_tol=SAME):
        direction = "rises" if new_rate > old_rate else "falls"
        changes.append(f"the learning rate of step {step + 1} {direction} from {old_rate:.4g} to {new_rate:.4g}")
    old_size, new_size = before.batch_size(samples), now.batch_size(samples)
    if old_size != new_size:
        changes.append(f"the batch of step {step + 1} changes from {old_size} to {new_size} samples")
    if changes:
        old_end, new_end = _end(before.length), _end(now.length)
        end = f"; the run ends {new_end} instead of {old_end}" if old_end != new_end else ""
        logger.warning("settings changed since the last attempt: %s%s", " and ".join(changes), end)


def _end(length: Length) -> str:
    return "when its time is up" if length.steps is None else f"at step {length.steps}"


def way_back(config: RunConfig) -> str:
    """Advice for a run that has diverged."""
    calmer = "a lower optim.lr or optim.clip" if config.optim.clip else "a lower optim.lr, or optim.clip=1"
    if folder.survey_checkpoints(Path(config.out) / "checkpoints")[0] is None:
        return f"Nothing was saved: start again with a new out=, and {calmer}"
    run = files.typed(config.out)
    return (
        f"Resume from its last checkpoint with {calmer}: hpclm resume {run} optim.lr={config.optim.lr / 2:g}; "
        f"hpclm checkpoints {run} lists earlier ones, for --from STEP"
    )


def ending(config: RunConfig, length: Length, progress: Progress, leaving: str) -> str:
    """The last log line: how far the run is, and the next command. ``leaving``: why it ends early; empty if it does not."""
    if leaving:
        why = leaving
        first = ""
        if leaving == "stop":
            why = "hpclm request RUN stop"
        elif leaving == "kill_switch":
            first = f"once {config.kill_switch} is removed, "
        return f"stopped at step {progress.step} ({why}); {first}the same command resumes it"
    if config.stop_at is not None and config.stop_at <= progress.step != length.steps:
        return f"stopped at step {progress.step} (stop_at)"
    out = files.typed(Path(config.out))
    generate = ""
    if config.checkpoint.enabled and _has_tokenizer(config):
        generate = f" · hpclm generate {out} --prompt ..."
    return f"done at step {progress.step}, {progress.samples:,} samples; next: hpclm report {out}{generate}"


def phase_begins(timeline: Timeline, step: int, samples: int) -> None:
    """Log that a phase begins with ``step``, if one begins after ``samples`` samples."""
    number = timeline.phase(samples)
    if number and timeline.begins[number].samples == samples:
        log_text = "phase %d begins with step %d, after %s tokens: %s"
        changed = ", ".join(f"{key}={typed(value)}" for key, value in timeline.run.data.phases[number - 1].items())
        logger.info(log_text, number, step, f"{timeline.tokens(samples):,}", changed)


def phase(timeline: Timeline, progress: Progress) -> str:
    """That the ranks start again for a phase, and why."""
    number = timeline.phase(progress.samples)
    changed = timeline.run.data.phases[number - 1]
    settings = ", ".join(f"{key}={typed(value)}" for key, value in changed.items() if key not in (*OWN, *IN_PLACE))
    return (
        f"phase {number} begins after step {progress.step} ({timeline.tokens(progress.samples):,} tokens) with {settings}; their launcher starts the ranks again; "
        "after hpclm train by hand, repeat the command"
    )


def _has_tokenizer(config: RunConfig) -> bool:
    """Whether the tokenizer of the run's data is known, and its files exist."""
    try:
        tokenizer_folder.of_run(Path(config.out), config.data)
    except ConfigError:
        return False
    return True
