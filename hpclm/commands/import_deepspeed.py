"""The verb ``hpclm import-deepspeed``: translate a DeepSpeed JSON into settings of hpclm."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from hpclm import paths, terminal
from hpclm.config import compose, deepspeed, reading
from hpclm.config.fields import flattened
from hpclm.errors import ConfigError
from hpclm.terminal import say

SAME = {
    "gradient_clipping": "optim.clip",
    "zero_optimization.stage": "engine.zero_stage",
    "optimizer.params.lr": "optim.lr",
    "optimizer.params.betas": "optim.betas",
    "optimizer.params.eps": "optim.eps",
    "optimizer.params.weight_decay": "optim.weight_decay",
    "scheduler.params.warmup_max_lr": "optim.lr",
    "scheduler.params.warmup_min_lr": "optim.warmup_start",
    "scheduler.params.warmup_num_steps": "optim.warmup",
    "scheduler.params.total_num_steps": "optim.schedule_length",
    "fp16.loss_scale_window": "scaler.window",
    "fp16.hysteresis": "scaler.hysteresis",
    "fp16.consecutive_hysteresis": "scaler.consecutive",
    "fp16.min_loss_scale": "scaler.minimum",
    "pipeline.stages": "parallel.pipeline",
    "pipeline.activation_checkpoint_interval": "engine.recompute_every",
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_size",
}
"""Keys whose value is that of a setting."""
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine", None: "constant"}


@dataclass
class Translation:
    """Settings, and everything that did not become one."""

    unread: dict[str, Any]
    """Keys that are not translated yet, as dotted paths."""
    auto: list[str]
    """Keys set to "auto", for which hpclm's defaults are used."""
    settings: dict[str, Any] = field(default_factory=lambda: {"engine.name": "deepspeed"})
    extra: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed keys without a setting; they go into engine.extra."""
    idle: list[str] = field(default_factory=list)
    """Keys that are not translated, and why."""
    wrong: list[str] = field(default_factory=list)
    """Contradictions, and what hpclm does not support."""

    def take(self, key: str, default: Any = None) -> Any:
        """The value of ``key``, which is then translated."""
        return self.unread.pop(key, default)

    def options(self) -> list[str]:
        """The settings as key=value."""
        settings = [f"{name}={shown(value)}" for name, value in self.settings.items()]
        return [*settings, *(f"engine.extra.{key}={shown(value)}" for key, value in self.extra.items())]

    def text(self, name: str) -> str:
        """The settings file, and what is not in it."""
        tree = deepspeed.nested(self.settings)
        if self.extra:
            tree["engine"]["extra"] = {key: shown(value) for key, value in self.extra.items()}
        lines = [f"# translated from {terminal.line(name)}", yaml.safe_dump(tree, sort_keys=False).rstrip("\n")]
        auto = [", ".join(self.auto)] if self.auto else []
        for title, keys in (("left to hpclm's defaults", auto), ("not translated", self.idle)):
            lines += [f"# {title}:", *(f"#   {terminal.line(line)}" for line in keys)] if keys else []
        return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    """``hpclm import-deepspeed``."""
    parser = terminal.ArgumentParser(
        prog="hpclm import-deepspeed",
        description="Translate a DeepSpeed JSON into a settings file (YAML). Keys without a setting go into engine.extra; "
        "the others are listed. Exits with 64 if keys contradict each other.",
    )
    parser.add_argument("file", type=paths.option_path, help="DeepSpeed's JSON")
    parser.add_argument(
        "--replicas", type=int, help="number of data-parallel replicas, if the JSON does not determine it"
    )
    args = parser.parse_args(argv)
    if args.replicas is not None and args.replicas < 1:
        raise ConfigError(f"--replicas {args.replicas} must be at least 1")
    translation = translated(reading.json_object(args.file), args.replicas)
    try:
        compose.load(None, translation.options())
    except ConfigError as error:
        translation.wrong += error.problems
    if translation.wrong:
        raise ConfigError([f"{args.file}: {line}" for line in translation.wrong])
    say(translation.text(args.file.name), end="")
    return 0


def shown(value: Any) -> str:
    """A value as one line of YAML; 1e9 as an integer."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1000:
        value = int(value)
    return str(value) if isinstance(value, str) else json.dumps(value)


def translated(tree: Mapping[str, Any], replicas: int | None = None) -> Translation:
    """The translation of ``tree``; ``replicas``: number of data-parallel replicas, if known."""
    flat = {key: value for key, value in flattened(dict(tree)).items() if value is not None and value != {}}
    auto = sorted(key for key, value in flat.items() if value == "auto")
    result = Translation({key: value for key, value in flat.items() if key not in auto}, auto)
    _batch(result, replicas)
    _precision(result)
    _offload(result)
    _optimizer(result)
    _pipeline(result)
    for key, setting in SAME.items():
        if key in result.unread:
            result.settings.setdefault(setting, result.take(key))
    _schedule(result)
    refused = dict[str, list[str]]()
    for key, value in result.unread.items():
        reason = deepspeed.refusal(key)
        if reason is None:
            result.extra[key] = value
        else:
            refused.setdefault(reason, []).append(key)
    result.idle += [f"{', '.join(keys)}: {reason}" for reason, keys in refused.items()]
    return result


def _batch(result: Translation, replicas: int | None) -> None:
    """Batch sizes; DeepSpeed wants train_batch_size = micro-batch x accumulation x replicas."""
    steps = result.take("gradient_accumulation_steps")
    whole, micro = (result.unread.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu"))
    if not all(value is None or (_is_number(value) and value >= 1) for value in (whole, micro, steps)):
        result.wrong.append("train_batch_size and its factors must be whole numbers of at least 1")
        return
    unit = (micro or 1) * (steps or 1) * (replicas or 1)
    factors = f"micro-batch {micro or 1} x accumulation steps {steps or 1}" + f" x {replicas} replicas" * bool(replicas)
    if whole is None:
        if micro and replicas:
            result.settings["batch.global_size"] = unit
        elif micro:
            missing = f"train_batch_size is missing, and is {factors} x data-parallel replicas; give --replicas"
            result.wrong.append(missing)
    elif whole % unit or (micro and steps and replicas and whole != unit):
        result.wrong.append(f"train_batch_size={whole} must be a multiple of {factors} = {unit}")
    elif replicas:
        result.settings["batch.micro_size"] = micro or whole // unit
    elif steps:
        result.idle.append(f"gradient_accumulation_steps: {steps} with {whole // unit} data-parallel replicas")


def _precision(result: Translation) -> None:
    """Precision, loss scale, and the type of gradients."""
    half, brain = result.take("fp16.enabled"), result.take("bf16.enabled")
    if half and brain:
        result.wrong.append("fp16.enabled and bf16.enabled are both true; keep one")
    if half is not None or brain is not None:
        result.settings["engine.precision"] = "fp16" if half else "bf16" if brain else "fp32"
    scale, power = result.take("fp16.loss_scale"), result.take("fp16.initial_scale_power")
    if half and scale:
        result.wrong.append("fp16.loss_scale is fixed, but hpclm supports only a dynamic loss scale: set it to 0")
    if half and power is not None:
        if isinstance(power, int) and 0 <= power <= 126:
            result.settings["scaler.initial"] = float(2**power)
        else:
            result.wrong.append(f"fp16.initial_scale_power={json.dumps(power)} must be a whole number of at most 126")
    for key in [key for key in result.unread if key.startswith("fp16.") and not half]:
        result.idle.append(f"{key}: only used with fp16; see scaler.*")
        result.take(key)
    for key in ("data_types.grad_accum_dtype", "communication_data_type"):
        if result.unread.get(key) in ("fp32", "float32"):
            result.settings["engine.gradients"] = "fp32"
            result.take(key)


def _offload(result: Translation) -> None:
    """What is kept in CPU memory or on a disk."""
    places = {}
    for part, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_param")):
        default = "cpu" if result.take(f"zero_optimization.{old}") else "none"
        key = f"zero_optimization.offload_{part}"
        places[part] = result.take(f"{key}.device", default), result.take(f"{key}.nvme_path")
        if places[part][0] not in ("none", "cpu", "nvme"):
            result.wrong.append(f"{key}.device={places[part][0]} must be none, cpu or nvme")
            return
    device, folder = places["optimizer"]
    weights = places["param"][0]
    if weights != "none" and places["param"] != places["optimizer"]:
        result.wrong.append(
            f"zero_optimization.offload_param and offload_optimizer differ (devices {weights} and {device}); "
            "engine.offload=parameters uses the same device and folder for both"
        )
    elif device == "nvme" and folder is None:
        result.wrong.append("zero_optimization.offload_*.device=nvme needs nvme_path")
    if {device, weights} != {"none"}:
        result.settings["engine.offload"] = "optimizer" if weights == "none" else "parameters"
    if device == "nvme" and folder is not None:
        result.settings["engine.offload_folder"] = folder


def _optimizer(result: Translation) -> None:
    """AdamW; without a value, DeepSpeed does not clip."""
    if "gradient_clipping" not in result.auto:
        result.unread.setdefault("gradient_clipping", 0.0)
    kind, torch_adam = result.take("optimizer.type"), result.take("optimizer.params.torch_adam")
    if kind is None:
        return
    if str(kind).lower() not in ("adam", "adamw"):
        result.wrong.append(f"optimizer.type={kind}: hpclm supports only AdamW")
    if not result.take("optimizer.params.adam_w_mode", True):
        result.wrong.append("optimizer.params.adam_w_mode=false: hpclm's weight decay is decoupled (AdamW)")
    if "engine.offload" in result.settings and not torch_adam:
        result.settings["optim.name"] = "cpu_adam"
    result.settings["optim.decayed"] = "all"  # as DeepSpeed


def _schedule(result: Translation) -> None:
    """The learning-rate schedule; DeepSpeed's is constant without one."""
    kind, settings = result.take("scheduler.type"), result.settings
    if not isinstance(kind, str | None) or kind not in SCHEDULES:
        result.wrong.append(f"scheduler.type={json.dumps(kind)}: hpclm has no equivalent; see optim.schedule")
        return
    if kind or "optim.lr" in settings:
        settings |= {"optim.schedule": SCHEDULES[kind], "optim.min_lr": 0.0}
    if kind == "WarmupCosineLR":
        peak = settings.get("optim.lr", 0.0)
        for key, setting, default in (("warmup_min_ratio", "warmup_start", 0.0), ("cos_min_ratio", "min_lr", 1e-4)):
            ratio = result.take(f"scheduler.params.{key}", default)
            if _is_number(ratio) and _is_number(peak):
                settings[f"optim.{setting}"] = ratio * peak
            else:
                result.wrong.append(f"scheduler.params.{key}={json.dumps(ratio)} must be a number, and optim.lr too")
    elif kind and result.take("scheduler.params.warmup_type", "log") == "log":
        result.idle.append("scheduler.params.warmup_type: hpclm's warm-up is linear, not logarithmic")
    if not settings.get("optim.warmup"):
        settings.pop("optim.warmup_start", None)
    if kind == "WarmupLR":
        settings.pop("optim.schedule_length", None)


def _pipeline(result: Translation) -> None:
    """Pipeline stages and activation checkpointing."""
    partition = str(result.take("pipeline.partition"))
    if result.unread.get("pipeline.stages") not in (None, 1) and partition.startswith(("uniform", "type:")):
        result.settings["parallel.partition"] = "blocks"
    for name in ("pipe_partitioned", "grad_partitioned"):
        if result.take(f"pipeline.{name}"):
            sliced = "tensor-parallel ranks already send only their slices; set it to false"
            result.wrong.append(f"pipeline.{name}=true: {sliced}")
    if result.unread.get("pipeline.activation_checkpoint_interval"):
        result.settings["engine.recompute"] = "full"
    else:
        result.take("pipeline.activation_checkpoint_interval")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**62
