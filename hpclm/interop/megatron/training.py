"""Continue a Megatron run in hpclm: its progress, and the training settings for its arguments."""

import logging
from argparse import Namespace
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.checkpoint import Progress
from hpclm.config import ModelConfig
from hpclm.config.fields import as_word
from hpclm.interop.megatron import experts, options
from hpclm.interop.megatron.layout import MegatronState
from hpclm.interop.megatron.options import argument

log = logging.getLogger(__name__)
SCHEDULES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}
SCALER = dict(window="loss_scale_window", minimum="min_loss_scale", hysteresis="hysteresis")
OPTIM = dict(lr="lr", min_lr="min_lr", eps="adam_eps", weight_decay="weight_decay", clip="clip_grad")
DATA = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "split")


def progress(state: MegatronState) -> Progress:
    """The run's progress at the time of the save."""
    args = state.args or Namespace()
    size = argument(args, "global_batch_size", default=0)
    samples = argument(args, "consumed_train_samples", default=state.iteration * size)
    rows = argument(args, "train_samples") or (argument(args, "train_iters", default=0) * size) or None
    return Progress(step=state.iteration, samples=samples, planned=rows)


def overrides(args: Namespace, model: ModelConfig) -> list[str]:
    """Settings of optimizer, schedule, batches and precision as key=value; settings that the arguments do not give are omitted.

    ConfigError if hpclm lacks a feature that the run was trained with.
    """
    wrong = [*options.of_training(args), *experts.of_training(args)]
    length = argument(args, "seq_length", default=model.context)
    if length != model.context:
        wrong.append(f"seq_length={length} differs from model.context={model.context}; give model.context={length}")
    if wrong:
        raise ConfigError(wrong)
    unit, steps_or_samples = "iters", "steps"
    if argument(args, "train_samples"):
        unit = steps_or_samples = "samples"
    warmup = argument(args, f"lr_warmup_{unit}", default=0)
    style = argument(args, "lr_decay_style")
    fraction = argument(args, "lr_warmup_fraction")
    values: dict[str, Any] = {f"optim.{ours}": argument(args, theirs) for ours, theirs in OPTIM.items()}
    values |= {f"data.{name}": argument(args, name) for name in DATA}
    if not argument(args, "create_attention_mask_in_dataloader", default=True):
        values["data.reset_attention_mask"] = False  # Megatron then masks only later tokens
    if model.positions == "rope":
        values["data.reset_position_ids"] = False  # Megatron's rotary positions count from the start of the sample
    if argument(args, "train_data_path"):
        log.warning(
            "the run read the datasets train_data_path=%s whole, without data.split: list them in data.train",
            args.train_data_path,
        )
        values.pop("data.split")
    if argument(args, "fp16", default=False):
        values |= {f"scaler.{ours}": argument(args, theirs) for ours, theirs in SCALER.items()}
    if argument(args, "eod_mask_loss", default=False) and not argument(args, "calculate_per_token_loss", default=False):
        values["batch.loss_norm"] = "microbatch"
    betas = [argument(args, name) for name in ("adam_beta1", "adam_beta2")]
    ramp = argument(args, "rampup_batch_size")
    values |= {
        "optim.betas": None if None in betas else betas,
        "optim.schedule": SCHEDULES.get(str(style)),
        "optim.unit": steps_or_samples,
        "optim.warmup": None if fraction else warmup,
        "optim.warmup_fraction": fraction,
        "optim.warmup_start": argument(args, "lr_warmup_init") if warmup or fraction else None,
        "optim.schedule_length": argument(args, f"lr_decay_{unit}"),
        "batch.global_size": argument(args, "global_batch_size"),
        "batch.micro_size": argument(args, "micro_batch_size"),
        "batch.rampup": [int(value) for value in ramp] if ramp else None,
        f"budget.{steps_or_samples}": argument(args, f"train_{unit}"),
        "seed": argument(args, "seed"),
        "engine.precision": _precision(args),
    }
    if style == "WSD":
        values |= {
            "optim.wsd_decay": argument(args, f"lr_wsd_decay_{unit}"),
            "optim.wsd_style": argument(args, "lr_wsd_decay_style"),
        }
    return [f"{name}={as_word(value)}" for name, value in values.items() if value is not None]


def _precision(args: Namespace) -> str | None:
    if argument(args, "bf16", default=False):
        return "bf16"
    if argument(args, "fp16", default=False):
        return "fp16"
    return "fp32" if hasattr(args, "bf16") else None
