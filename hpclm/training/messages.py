"""What a run's log says of the run as a whole: at its start and at its end."""

import logging
import math
from collections.abc import Iterable
from pathlib import Path

import torch

from hpclm import files
from hpclm.checkpoint import Progress
from hpclm.config import BudgetConfig, ModelConfig, Plan, RunConfig
from hpclm.config.plan import Length
from hpclm.data import tokenizers
from hpclm.distributed.context import DistributedContext
from hpclm.errors import ConfigError
from hpclm.model import count
from hpclm.model.attention import backend as attention_backend
from hpclm.node import apex, hardware
from hpclm.optim.schedules import Schedule
from hpclm.rundir import folder

logger = logging.getLogger(__name__)
SAME = 1e-9  # relative difference of learning rates that only rounding makes


def device(device: torch.device, dtype: torch.dtype, products: str) -> None:
    """Log what the run computes on, and in which types; ``products``: how fp32 products run."""
    logger.info("%s, %s; fp32 matmuls: %s", hardware.describe(device), str(dtype).removeprefix("torch."), products)
    if slow := hardware.slow_type(device, dtype):
        logger.warning("%s", slow)


def log_start(config: RunConfig, plan: Plan, context: DistributedContext, length: Length, samples: int) -> None:
    """Log what is about to happen, and warn of what is probably not meant."""
    steps = (
        "until the time is up"
        if length.steps is None
        else f"{length.steps:,} steps{_limit(config.budget, length.steps)}"
    )
    size = f"{count.described(config.model)}; {steps} of {plan.global_size} samples x {config.model.context} tokens"
    logger.info("%s, %s samples of training data", size, f"{samples:,}")
    if context.job.id:
        logger.info("%s", context.job)
    if context.size > 1:
        by = "locally" if context.launcher == "local" else f"by {context.launcher}"
        started = f"{context.size} processes, launched {by}, on {', '.join(context.hosts)}"
        logger.info("%s; micro-batches of %d, %d a step for each", started, plan.micro_size, plan.accumulation(0))


def without_effect(reasons: Iterable[str]) -> None:
    """Warn of settings that change nothing in this run."""
    for reason in reasons:
        logger.warning("%s", reason)


def _limit(budget: BudgetConfig, steps: int) -> str:
    """What ends a run before budget.steps does."""
    others = {name: getattr(budget, name) for name in ("samples", "tokens", "epochs")}
    said = ", ".join(f"budget.{name}={value}" for name, value in others.items() if value is not None)
    return f" ({said} ends it before budget.steps={budget.steps})" if budget.steps and steps < budget.steps else ""


def attention(model: ModelConfig, choice: attention_backend.Choice | None) -> None:
    """Log the kernel of attention; ``choice``: None where a CPU uses PyTorch's own."""
    if choice is None:
        if model.attention != "auto":
            logger.warning("model.attention=%s is for GPUs; a CPU uses PyTorch's own", model.attention)
        return
    if choice.warning:
        logger.warning("%s", choice.warning)
    logger.info("attention: %s", choice)


def kernels(model: ModelConfig, device: torch.device) -> None:
    """Log whose fused operations are used, where the settings ask for apex's."""
    if model.kernels != "apex":
        return
    if device.type == "cuda" and apex.norms():
        logger.info("kernels: NVIDIA apex's norms")
    else:
        why = "it is for GPUs" if device.type != "cuda" else "NVIDIA apex cannot be imported here"
        logger.warning("model.kernels=apex: %s; PyTorch's own operations", why)


def other_budget(progress: Progress, samples: int | None) -> None:
    """Warn that the data are put in another order than for the checkpoint, because the run reads another number of samples."""
    logger.warning(
        "the run's samples changed from %s to %s. The data order depends on their number, so samples may be repeated or skipped after "
        "step %d, unless both fit in one epoch",
        progress.planned,
        samples,
        progress.step,
    )


def changed_schedule(before: Schedule, now: Schedule, progress: Progress) -> None:
    """Warn if the settings of the last attempt give the next step another learning rate or batch; says where the run ends then."""
    step, samples, changes = progress.step, progress.samples, []
    old, new = before.rate(step, samples), now.rate(step, samples)
    if not math.isclose(old, new, rel_tol=SAME):
        direction = "rises" if new > old else "falls"
        changes.append(f"the learning rate of step {step + 1} {direction} from {old:.4g} to {new:.4g}")
    sizes = before.batch_size(samples), now.batch_size(samples)
    if sizes[0] != sizes[1]:
        changes.append(f"the batch of step {step + 1} changes from {sizes[0]} to {sizes[1]} samples")
    if changes:
        ends = [_end(schedule.length) for schedule in (before, now)]
        end = f"; the run ends {ends[1]} instead of {ends[0]}" if ends[0] != ends[1] else ""
        logger.warning("with the settings of the last attempt replaced, %s%s", " and ".join(changes), end)


def _end(length: Length) -> str:
    return "when its time is up" if length.steps is None else f"at step {length.steps}"


def way_back(config: RunConfig) -> str:
    """What to do about a run that has diverged."""
    calmer = "a lower optim.lr or optim.clip" if config.optim.clip else "a lower optim.lr, or optim.clip=1"
    if folder.survey_checkpoints(Path(config.out) / "checkpoints")[0] is None:
        return f"Nothing was saved: start again with a new out=, and {calmer}"
    run = files.typed(config.out)
    return (
        f"Resume from its last checkpoint with {calmer}: hpclm resume {run} optim.lr={config.optim.lr / 2:g}; "
        f"hpclm checkpoints {run} lists earlier ones, for --from STEP"
    )


def ending(config: RunConfig, length: Length, progress: Progress, leaving: str) -> str:
    """The last words: where the run is, and what to type next. ``leaving``: what ends it before its time."""
    if leaving:
        way = (
            f"once {config.kill_switch} is removed, the same command"
            if leaving == "kill_switch"
            else "the same command"
        )
        why = "(hpclm request RUN stop)" if leaving == "stop" else f"({leaving})"
        return f"stopped at step {progress.step} {why}; {way} resumes it"
    if config.stop_at is not None and config.stop_at <= progress.step != length.steps:
        return f"stopped at step {progress.step} (stop_at)"
    out = files.typed(Path(config.out))
    generate = f" · hpclm generate {out} --prompt ..." if config.checkpoint.enabled and _reads_text(config) else ""
    return f"done at step {progress.step}, {progress.samples:,} samples; next: hpclm report {out}{generate}"


def _reads_text(config: RunConfig) -> bool:
    """Whether the tokenizer of the run's data is known and there."""
    try:
        tokenizers.check_of_run(config.data)
    except ConfigError:
        return False
    return True
