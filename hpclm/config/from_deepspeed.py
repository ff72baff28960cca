"""A DeepSpeed JSON as settings of hpclm: what each of its keys stands for, and what cannot be had."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpclm.config import compose, deepspeed
from hpclm.errors import ConfigError
from hpclm.registry import hint

KNOWN = [*deepspeed.FREE, *deepspeed.INSTEAD, "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"]


@dataclass
class Found:
    """What a JSON turns out to say."""

    settings: dict[str, Any] = field(default_factory=lambda: {"engine.name": "deepspeed"})
    auto: set[str] = field(default_factory=set)
    """Keys that a trainer was to fill in, and hpclm's defaults do."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of DeepSpeed's that no setting stands for."""
    idle: list[str] = field(default_factory=list)
    """What has no effect here, or is left to hpclm's defaults, and why."""
    unknown: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """What contradicts itself, or cannot be had."""


def translated(tree: Mapping[str, Any], replicas: int | None = None) -> Found:
    """What ``tree`` stands for."""
    found, flat = Found(), deepspeed.flattened(tree)
    for key in [key for key, value in flat.items() if value == "auto"]:
        found.auto.add(key)
        del flat[key]
    for take in (batch, precision, zero, optimizer, schedule, pipeline):
        take(flat, found, replicas)
    for key, value in flat.items():
        owner = deepspeed.covering(key, deepspeed.INSTEAD)
        if key in ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"):
            found.idle.append(f"{key}: hpclm hands DeepSpeed an optimizer that it knows")
        elif owner is not None:
            found.idle.append(f"{key}: {deepspeed.INSTEAD[owner]}")
        elif deepspeed.covering(key, deepspeed.FREE) is not None:
            found.extra[key] = value
        else:
            found.unknown.append(f"{key}.{hint(key, KNOWN)}")
    try:
        compose.load(None, words(found))
    except ConfigError as error:
        found.wrong += error.problems
    return found


def batch(flat: dict[str, Any], found: Found, replicas: int | None) -> None:
    """Batch sizes; DeepSpeed wants train_batch_size = micro-batch x accumulation x replicas."""
    whole, micro, steps = (
        flat.pop(key, None)
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
        micro = whole // replicas // (steps or 1)
    put(found, {"batch.global_size": whole, "batch.micro_size": micro})


def precision(flat: dict[str, Any], found: Found, _: int | None) -> None:
    """fp16 and bf16 sections, and the type of gradients."""
    half, brain = flat.pop("fp16.enabled", None), flat.pop("bf16.enabled", flat.pop("bfloat16.enabled", None))
    if half and brain:
        found.wrong.append("fp16.enabled and bf16.enabled are both true; keep one")
    if half is not None or brain is not None:
        found.settings["engine.precision"] = "fp16" if half else "bf16" if brain else "fp32"
    scaler = {key[5:]: flat.pop(key) for key in [key for key in flat if key.startswith("fp16.")]}
    if half:
        if scaler.pop("loss_scale", 0):
            found.wrong.append("fp16.loss_scale is fixed; hpclm's moves with overflows: set it to 0")
        power = scaler.pop("initial_scale_power", None)
        names = dict(loss_scale_window="window", hysteresis="hysteresis", consecutive_hysteresis="consecutive")
        names["min_loss_scale"] = "minimum"
        put(found, {f"scaler.{mine}": scaler.pop(theirs, None) for theirs, mine in names.items()})
        put(found, {"scaler.initial": None if power is None else float(2**power)})
    found.idle += [f"fp16.{key}: only for fp16; then see scaler.*" for key in scaler]
    types = {flat.pop(key, None) for key in ("data_types.grad_accum_dtype", "communication_data_type")}
    if types & {"fp32", "float32"}:
        found.settings["engine.gradients"] = "fp32"
    elif types - {None} and (half or brain):
        found.idle.append(
            f"gradients in {', '.join(sorted(types - {None}))}: the engine's own type, as engine.gradients=auto"
        )


def zero(flat: dict[str, Any], found: Found, _: int | None) -> None:
    """ZeRO's stage, buckets and offloading."""
    section = "zero_optimization."
    stage = flat.pop(f"{section}stage", 0)
    overlap, bucket = flat.pop(f"{section}overlap_comm", None), flat.pop(f"{section}reduce_bucket_size", None)
    mixed = found.settings.get("engine.precision", "fp32") != "fp32" and stage > 0
    width = 2 if mixed and found.settings.get("engine.gradients") != "fp32" else 4
    put(found, {"engine.zero_stage": stage, "engine.overlap": overlap})
    put(found, {"engine.bucket_mb": None if bucket is None else bucket * width / 2**20})
    if bucket is not None and "engine.precision" not in found.settings:
        found.settings["engine.precision"] = "fp32"  # DeepSpeed's default; the bucket counts in it
    devices, folders = {}, set()
    for part in ("optimizer", "param"):
        place = f"{section}offload_{part}"
        devices[part] = flat.pop(f"{place}.device", "none")
        folders.add(flat.pop(f"{place}.nvme_path", None) if devices[part] == "nvme" else None)
        if devices[part] == "none":
            for key in [key for key in flat if key.startswith(f"{place}.") or key == place]:
                found.idle.append(f"{key}: nothing is offloaded")
                del flat[key]
    if flat.pop(f"{section}cpu_offload", False):
        devices["optimizer"] = "cpu"
    if devices["param"] != "none" and devices["optimizer"] != devices["param"]:
        found.wrong.append(
            f"{section}offload_param.device={devices['param']} and offload_optimizer.device={devices['optimizer']}; "
            f"engine.offload=parameters puts both in one place"
        )
    if set(devices.values()) != {"none"}:
        found.settings["engine.offload"] = "parameters" if devices["param"] != "none" else "optimizer"
    put(found, {"engine.offload_folder": next(iter(folders - {None}), None)})


def optimizer(flat: dict[str, Any], found: Found, _: int | None) -> None:
    """Adam's settings, and clipping."""
    clip = flat.pop("gradient_clipping", None if "gradient_clipping" in found.auto else 0.0)  # its default is none
    put(found, {"optim.clip": None if clip is None else float(clip)})
    kind = flat.pop("optimizer.type", None)
    if kind is None:
        return
    given = {key[17:]: flat.pop(key) for key in [key for key in flat if key.startswith("optimizer.params.")]}
    if str(kind).lower() not in ("adam", "adamw"):
        found.wrong.append(f"optimizer.type={kind}: hpclm trains with AdamW")
        return
    if not given.pop("adam_w_mode", True):
        found.wrong.append("optimizer.params.adam_w_mode=false: hpclm's weight decay is decoupled (AdamW)")
    ours = found.settings.get("engine.offload") is not None and not given.pop("torch_adam", False)
    put(found, {"optim.name": "cpu_adam" if ours else None})
    names = ("lr", "betas", "eps", "weight_decay")
    put(found, {f"optim.{name}": given.pop(name, None) for name in names})
    if found.settings.get("optim.lr") is not None:
        found.settings |= {"optim.schedule": "constant", "optim.min_lr": 0.0}
    found.settings.setdefault("optim.decayed", "all")  # DeepSpeed knows one group
    found.idle += [f"optimizer.params.{key}: hpclm has no such setting" for key in given]


def schedule(flat: dict[str, Any], found: Found, _: int | None) -> None:
    """The path of the learning rate."""
    kind = flat.pop("scheduler.type", None)
    given = {key[17:]: flat.pop(key) for key in [key for key in flat if key.startswith("scheduler.params.")]}
    kinds = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind is None:
        return
    if kind not in kinds:
        found.wrong.append(f"scheduler.type={kind}: hpclm has it not; see optim.schedule")
        return
    given = {key: value for key, value in given.items() if value != "auto"}
    put(found, {"optim.lr": given.pop("warmup_max_lr", None), "optim.warmup": given.pop("warmup_num_steps", None)})
    top = found.settings.get("optim.lr", 0.0)
    low = given.pop("warmup_min_lr", None)
    low = given.pop("warmup_min_ratio", 0.0) * top if kind == "WarmupCosineLR" else low
    length, ratio = given.pop("total_num_steps", None), given.pop("cos_min_ratio", 1e-4)
    put(found, {"optim.schedule_length": length if kind != "WarmupLR" else None, "optim.warmup_start": low})
    if not found.settings.get("optim.warmup"):
        found.settings.pop("optim.warmup_start", None)
    found.settings["optim.min_lr"] = ratio * top if kind == "WarmupCosineLR" else 0.0
    found.settings["optim.schedule"] = kinds[kind]
    if given.pop("warmup_type", "linear" if kind == "WarmupCosineLR" else "log") == "log":
        found.idle.append("scheduler.params.warmup_type: log is not to be had, the warm-up is linear")
    found.idle += [f"scheduler.params.{key}: hpclm has no such setting" for key in given]


def pipeline(flat: dict[str, Any], found: Found, _: int | None) -> None:
    """Stages, recomputation, and how often something is told."""
    count, how = flat.pop("pipeline.stages", None), str(flat.pop("pipeline.partition", "best"))
    put(found, {"parallel.pipeline": count if isinstance(count, int) and count > 1 else None})
    if "parallel.pipeline" in found.settings and (how == "uniform" or how.startswith("type:")):
        found.settings["parallel.partition"] = "blocks"
    for name in ("pipe_partitioned", "grad_partitioned"):
        if flat.pop(f"pipeline.{name}", False):
            found.wrong.append(
                f"pipeline.{name}=true: stages send slices of a sequence, which are parts already; set it to false"
            )
    every = flat.pop("pipeline.activation_checkpoint_interval", 0)
    if every:
        found.settings |= {"engine.recompute": "full", "engine.recompute_every": every}
    told = flat.pop("steps_per_print", None)
    put(found, {"log.every": told if isinstance(told, int) and 0 < told < 10**6 else None})


def put(found: Found, settings: Mapping[str, Any]) -> None:
    """Note the settings that are given."""
    found.settings |= {name: value for name, value in settings.items() if value is not None}


def words(found: Found) -> list[str]:
    """The settings as hpclm's commands take them."""
    lines = [f"{name}={shown(value)}" for name, value in found.settings.items()]
    return [*lines, *(f"engine.extra.{key}={shown(value)}" for key, value in found.extra.items())]


def shown(value: Any) -> str:
    """A value as one line of YAML; 1e9 as the whole number it is."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1000:
        value = int(value)
    return str(value) if isinstance(value, str) else json.dumps(value)
