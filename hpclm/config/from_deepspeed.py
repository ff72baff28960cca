"""Translate a DeepSpeed JSON into settings of hpclm."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpclm.config import compose, deepspeed, deepspeed_keys
from hpclm.errors import ConfigError

KNOWN = [
    *(key for key in deepspeed_keys.TYPES if "." not in key),
    *deepspeed.INSTEAD,
    "gradient_clipping",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
]
READ = ("fp16", "bfloat16", "optimizer", "optimizer.params", "scheduler", "scheduler.params", "pipeline")
"""Sections that are translated here, in addition to those of engine.extra."""


@dataclass
class Translation:
    """The result: settings, and everything that did not become one."""

    unread: dict[str, Any]
    """Keys that are not translated yet, as dotted paths."""
    settings: dict[str, Any] = field(default_factory=lambda: {"engine.name": "deepspeed"})
    auto: set[str] = field(default_factory=set)
    """Keys set to "auto", for which hpclm's defaults are used."""
    extra: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed keys without a setting; they go into engine.extra."""
    idle: list[str] = field(default_factory=list)
    """Keys without effect in hpclm, and why."""
    unknown: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Contradictions, and what hpclm does not support."""

    def take(self, key: str, kind: type, default: Any = None, least: float | None = None, most: float = 2**62) -> Any:
        """Read ``key``: its value, or ``default`` if it is missing, null or (noted in ``wrong``) invalid."""
        value = self.unread.pop(key, None)
        if value is None and kind is not dict:  # a section instead of a value
            value = {path: self.unread.pop(path) for path in list(self.unread) if path.startswith(f"{key}.")} or None
        if value is None:
            return default
        fits = deepspeed_keys.fits(value, kind)
        if fits and (kind not in (int, float) or (-most if least is None else least) <= value <= most):
            return int(value) if kind is int else value
        limit = f" of at least {least}" if least is not None else ""
        limit += f" and at most {most}" if most != 2**62 else ""
        self.wrong.append(f"{key}={json.dumps(value)} must be {deepspeed_keys.WORDS[kind]}{limit}")
        return default

    def put(self, settings: Mapping[str, Any]) -> None:
        """Add the settings that are not None."""
        self.settings |= {name: value for name, value in settings.items() if value is not None}

    def rest(self, section: str) -> list[str]:
        """Read all remaining keys of a section; their names."""
        keys = [key for key in self.unread if key.startswith(f"{section}.")]
        for key in keys:
            del self.unread[key]
        return [key.removeprefix(f"{section}.") for key in keys]


def shown(value: Any) -> str:
    """A value as one line of YAML; 1e9 as an integer."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1000:
        value = int(value)
    return str(value) if isinstance(value, str) else json.dumps(value)


def words(found: Translation) -> list[str]:
    """The settings as key=value words."""
    lines = [f"{name}={shown(value)}" for name, value in found.settings.items()]
    return [*lines, *(f"engine.extra.{key}={shown(value)}" for key, value in found.extra.items())]


def translated(tree: Mapping[str, Any], replicas: int | None = None) -> Translation:
    """The translation of ``tree``, including what is wrong with the resulting settings."""
    found = read(tree, replicas)
    try:
        compose.load(None, words(found))
    except ConfigError as error:
        found.wrong += error.problems
    return found


def read(tree: Mapping[str, Any], replicas: int | None = None) -> Translation:
    """The translation of ``tree``; ``replicas``: number of data-parallel replicas, if known."""
    if replicas is not None and replicas < 1:
        raise ConfigError(f"--replicas {replicas} must be at least 1")
    found = Translation(deepspeed.flattened(tree))
    for key in [key for key, value in found.unread.items() if value == "auto"]:
        found.auto.add(key)
        del found.unread[key]
    for section in [*READ, *(key for key, kind in deepspeed_keys.TYPES.items() if kind is dict)]:
        if section in found.unread:  # not a mapping
            found.take(section, dict)
    batch(found, replicas)
    for take in (precision, zero, optimizer, schedule, pipeline):
        take(found)
    others(found)
    return found


def batch(found: Translation, replicas: int | None) -> None:
    """Batch sizes; DeepSpeed wants train_batch_size = micro-batch x accumulation x replicas."""
    whole, micro, steps = (
        found.take(key, int, least=1)
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if whole is not None and micro is not None and steps is not None:
        unit = micro * steps
        if whole % unit or (replicas is not None and whole != unit * replicas):
            by = f" x {replicas} replicas" if replicas is not None else ""
            found.wrong.append(
                f"train_batch_size={whole} must be {'' if replicas is not None else 'a multiple of '}"
                f"train_micro_batch_size_per_gpu={micro} x gradient_accumulation_steps={steps}{by} = {unit * (replicas or 1)}"
            )
        elif replicas is None:
            found.idle.append(f"gradient_accumulation_steps: {steps} with {whole // unit} data-parallel replicas")
    elif whole is None and micro is not None and replicas is not None:
        whole = micro * (steps or 1) * replicas
    elif whole is None and micro is not None:
        found.wrong.append(
            f"train_batch_size is missing, and is train_micro_batch_size_per_gpu={micro} x "
            f"gradient_accumulation_steps={steps or 1} x data-parallel replicas; give --replicas"
        )
    elif micro is None and whole is not None and replicas is not None:
        unit = replicas * (steps or 1)
        if whole % unit:
            found.wrong.append(
                f"train_batch_size={whole} must be a multiple of gradient_accumulation_steps={steps or 1} x "
                f"{replicas} replicas = {unit}"
            )
        else:
            micro = whole // unit
    found.put({"batch.global_size": whole, "batch.micro_size": micro})


def precision(found: Translation) -> None:
    """Precision, loss scale, and the type of gradients."""
    half, old = found.take("fp16.enabled", bool), found.take("bfloat16.enabled", bool)
    brain = found.take("bf16.enabled", bool, old)
    if half and brain:
        found.wrong.append("fp16.enabled and bf16.enabled are both true; keep one")
    if half is not None or brain is not None:
        found.settings["engine.precision"] = "fp16" if half else "bf16" if brain else "fp32"
    if half:
        if found.take("fp16.loss_scale", float):
            found.wrong.append("fp16.loss_scale is fixed, but hpclm only has a dynamic loss scale: set it to 0")
        power = found.take("fp16.initial_scale_power", int, least=0, most=126)
        found.put(
            {
                "scaler.window": found.take("fp16.loss_scale_window", int),
                "scaler.hysteresis": found.take("fp16.hysteresis", int),
                "scaler.consecutive": found.take("fp16.consecutive_hysteresis", bool),
                "scaler.minimum": found.take("fp16.min_loss_scale", float),
                "scaler.initial": None if power is None else float(2**power),
            }
        )
    found.idle += [f"fp16.{key}: only used with fp16; see scaler.*" for key in found.rest("fp16")]
    types = {found.take(key, str) for key in ("data_types.grad_accum_dtype", "communication_data_type")} - {None}
    if types & {"fp32", "float32"}:
        found.settings["engine.gradients"] = "fp32"
    elif types and (half or brain):
        found.idle.append(f"gradients in {', '.join(sorted(types))}: this is engine.gradients=auto")


def zero(found: Translation) -> None:
    """ZeRO stage, buckets and offloading."""
    section = "zero_optimization."
    stage = found.take(f"{section}stage", int, 0, least=0, most=3)
    overlap = found.take(f"{section}overlap_comm", bool)
    bucket = found.take(f"{section}reduce_bucket_size", int, least=1)
    mixed = found.settings.get("engine.precision", "fp32") != "fp32" and stage > 0
    width = 2 if mixed and found.settings.get("engine.gradients") != "fp32" else 4
    found.put({"engine.zero_stage": stage, "engine.overlap": overlap})
    found.put({"engine.bucket_mb": None if bucket is None else bucket * width / 2**20})
    if bucket is not None and "engine.precision" not in found.settings:
        found.settings["engine.precision"] = "fp32"  # DeepSpeed's default, which determines the bucket's bytes
    devices, folders = {}, {}
    for part in ("optimizer", "param"):
        name = f"{section}offload_{part}"
        before = "cpu" if found.take(f"{section}cpu_offload{'_param' * (part == 'param')}", bool) else "none"
        devices[part] = device = found.take(f"{name}.device", str, before)
        if device not in ("none", "cpu", "nvme"):
            found.wrong.append(f"{name}.device={device} must be none, cpu or nvme")
            devices[part] = "none"
        elif device == "nvme":
            folders[part] = found.take(f"{name}.nvme_path", str)
            if folders[part] is None and f"{name}.nvme_path" not in found.auto:
                found.wrong.append(f"{name}.device=nvme needs {name}.nvme_path")
        elif device == "none":
            found.idle += [f"{name}.{key}: nothing is offloaded" for key in found.rest(name)]
    if devices["param"] != "none" and devices["optimizer"] != devices["param"]:
        found.wrong.append(
            f"{section}offload_param.device={devices['param']} and offload_optimizer.device={devices['optimizer']}; "
            f"engine.offload=parameters uses the same device for both"
        )
    elif len(set(folders.values()) - {None}) > 1:
        found.wrong.append(
            f"{section}offload_param.nvme_path={folders['param']} and offload_optimizer.nvme_path={folders['optimizer']}; "
            f"engine.offload_folder is used for both"
        )
    if set(devices.values()) != {"none"}:
        found.settings["engine.offload"] = "parameters" if devices["param"] != "none" else "optimizer"
    found.put({"engine.offload_folder": next((path for path in folders.values() if path is not None), None)})


def optimizer(found: Translation) -> None:
    """AdamW and gradient clipping."""
    clip = found.take("gradient_clipping", float, None if "gradient_clipping" in found.auto else 0.0)
    found.put({"optim.clip": None if clip is None else float(clip)})
    kind, place = found.take("optimizer.type", str), "optimizer.params"
    if kind is None:
        return
    if kind.lower() not in ("adam", "adamw"):
        found.wrong.append(f"optimizer.type={kind}: hpclm only has AdamW")
        found.rest(place)
        return
    if not found.take(f"{place}.adam_w_mode", bool, True):
        found.wrong.append("optimizer.params.adam_w_mode=false: hpclm's weight decay is decoupled (AdamW)")
    torch_adam = found.take(f"{place}.torch_adam", bool, False)
    offloaded = found.settings.get("engine.offload") is not None
    found.put({"optim.name": "cpu_adam" if offloaded and not torch_adam else None})
    betas = found.take(f"{place}.betas", list)
    if betas is not None and not (len(betas) == 2 and all(deepspeed_keys.fits(beta, float) for beta in betas)):
        found.wrong.append(f"{place}.betas={shown(betas)} must be a list of 2 numbers")
        betas = None
    found.put({"optim.lr": found.take(f"{place}.lr", float), "optim.betas": betas})
    found.put({f"optim.{name}": found.take(f"{place}.{name}", float) for name in ("eps", "weight_decay")})
    if found.settings.get("optim.lr") is not None:
        found.settings |= {"optim.schedule": "constant", "optim.min_lr": 0.0}
    found.settings.setdefault("optim.decayed", "all")  # DeepSpeed decays all parameters
    found.idle += [f"{place}.{key}: hpclm has no equivalent" for key in found.rest(place)]


def schedule(found: Translation) -> None:
    """Learning-rate schedule."""
    kind, place = found.take("scheduler.type", str), "scheduler.params"
    kinds = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind is None:
        return
    if kind not in kinds:
        found.wrong.append(f"scheduler.type={kind}: hpclm has no equivalent; see optim.schedule")
        found.rest(place)
        return
    cosine = kind == "WarmupCosineLR"
    found.put({"optim.lr": found.take(f"{place}.warmup_max_lr", float)})
    found.put({"optim.warmup": found.take(f"{place}.warmup_num_steps", int)})
    top = found.settings.get("optim.lr", 0.0)
    low = found.take(f"{place}.warmup_min_lr", float)
    low = found.take(f"{place}.warmup_min_ratio", float, 0.0) * top if cosine else low
    length, ratio = found.take(f"{place}.total_num_steps", int), found.take(f"{place}.cos_min_ratio", float, 1e-4)
    found.put({"optim.schedule_length": length if kind != "WarmupLR" else None, "optim.warmup_start": low})
    if not found.settings.get("optim.warmup"):
        found.settings.pop("optim.warmup_start", None)
    found.settings["optim.min_lr"] = ratio * top if cosine else 0.0
    found.settings["optim.schedule"] = kinds[kind]
    if found.take(f"{place}.warmup_type", str, "linear" if cosine else "log") == "log":
        found.idle.append(f"{place}.warmup_type: hpclm's warm-up is linear, not logarithmic")
    found.idle += [f"{place}.{key}: hpclm has no equivalent" for key in found.rest(place)]


def pipeline(found: Translation) -> None:
    """Pipeline stages and activation checkpointing."""
    count, how = found.take("pipeline.stages", int), found.take("pipeline.partition", str, "best")
    found.put({"parallel.pipeline": count if count is not None and count > 1 else None})
    if "parallel.pipeline" in found.settings and (how == "uniform" or how.startswith("type:")):
        found.settings["parallel.partition"] = "blocks"
    for name in ("pipe_partitioned", "grad_partitioned"):
        if found.take(f"pipeline.{name}", bool):
            found.wrong.append(
                f"pipeline.{name}=true: tensor-parallel ranks already send only their slices; set it to false"
            )
    every = found.take("pipeline.activation_checkpoint_interval", int, 0, least=0)
    if every:
        found.settings |= {"engine.recompute": "full", "engine.recompute_every": every}
    if found.take("steps_per_print", int) is not None:
        found.idle.append("steps_per_print: DeepSpeed prints nothing here; see log.every")


def others(found: Translation) -> None:
    """All remaining keys."""
    stage, offload, folder = (
        found.settings.get(f"engine.{name}") for name in ("zero_stage", "offload", "offload_folder")
    )
    for key, value in found.unread.items():
        owner = deepspeed.covering(key, deepspeed.INSTEAD)
        if key in ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"):
            found.idle.append(f"{key}: hpclm creates the optimizer")
        elif owner is not None:
            found.idle.append(f"{key}: {deepspeed.INSTEAD[owner]}")
        elif key in deepspeed_keys.TYPES:
            without = deepspeed_keys.idle(key, stage or 0, offload or "none", folder)
            if without is not None:
                found.idle.append(f"{key}: {without}")
            elif value is not None:
                found.extra[key] = value
        else:
            found.unknown.append(deepspeed_keys.unknown(key, KNOWN))
