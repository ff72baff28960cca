"""DeepSpeed's JSON, derived from a run's settings, for DeepSpeed 0.19 or later. Keys are dotted paths, as in engine.extra."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import yaml

from hpclm.config import deepspeed_keys, reading
from hpclm.config.plan import Plan
from hpclm.errors import ConfigError

if TYPE_CHECKING:
    from hpclm.config.schema import RunConfig

Flat = dict[str, Any]

INSTEAD = {
    "optimizer": "set optim.*",
    "scheduler": "set optim.schedule, optim.warmup and optim.min_lr",
    "fp16": "set engine.precision=fp16 and scaler.*",
    "bf16.bf16_master_weights_and_grads": "the engine keeps fp32 weights",
    "bf16.bf16_optimizer_states": "the engine keeps fp32 moments",
    "bf16.check_grad_overflow": "set optim.nonfinite",
    "activation_checkpointing": "set engine.recompute",
    "activation_checkpointing.partition_activations": "set engine.recompute=full; with parallel.tensor each process keeps only "
    "its slice of the activations (sequence parallelism)",
    "activation_checkpointing.cpu_checkpointing": "set engine.offload_activations, with engine native, fsdp2 or fairscale",
    "activation_checkpointing.contiguous_memory_optimization": "PyTorch's allocator keeps activations together",
    "activation_checkpointing.number_checkpoints": "set engine.recompute=full and engine.recompute_every",
    "activation_checkpointing.synchronize_checkpoint_boundary": "hpclm submit --debug waits for the GPU after every operation",
    "activation_checkpointing.profile": "set log.timers",
    "pipeline": "set parallel.pipeline, parallel.partition and engine.recompute",
    "gradient_accumulation_steps": "it follows from batch.* and the number of processes",
    "gradient_allreduce_op": "the engine decides whether gradients are summed",
    "managed_gradient_accumulation": "the engine counts micro-batches",
    "sparse_gradients": "the model has no sparse gradients",
    "data_parallel_size": "it follows from the number of processes",
    "elasticity": "a run can continue with any number of processes",
    "autotuning": "the engine does not tune itself",
    "steps_per_print": "set log.every",
    "compile": "set engine.compile",
    "hybrid_engine": "the engine only trains",
    "zero_optimization.compute_grad_norm": "the norm is clipped on and logged",
    "zero_optimization.round_robin_gradients": "weights are saved from buffers that it would order otherwise",
    "zero_optimization.offload_optimizer.ratio": "the state of a second optimizer would not be saved",
    "zero_optimization.cpu_offload_use_pin_memory": "set pin_memory in offload_optimizer and offload_param",
    **dict.fromkeys(
        (
            "checkpoint",
            "nebula",
            "load_universal_checkpoint",
            "use_node_local_storage",
            "zero_optimization.elastic_checkpoint",
            "zero_optimization.load_from_fp32_weights",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "zero_optimization.gather_16bit_weights_on_model_save",
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        ),
        "set checkpoint.*",
    ),
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), "set log.*"),
    **dict.fromkeys(
        ("dataloader_drop_last", "curriculum_learning", "data_efficiency", "data_sampling"), "hpclm reads the data"
    ),
    **dict.fromkeys(
        (
            "zero_optimization.cpu_offload",
            "zero_optimization.cpu_offload_param",
            "zero_optimization.offload_optimizer.device",
            "zero_optimization.offload_param.device",
        ),
        "set engine.offload",
    ),
    **dict.fromkeys(("amp", "torch_autocast", "data_types.param_dtype"), "set engine.precision"),
    **dict.fromkeys(
        ("bf16.immediate_grad_update", "data_types.grad_accum_dtype", "communication_data_type"), "set engine.gradients"
    ),
    **dict.fromkeys(
        ("zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path"),
        "set engine.offload_folder",
    ),
    **dict.fromkeys(
        ("zero_optimization.zenflow", "zero_optimization.offload_optimizer.super_offload"),
        "its optimizer state cannot be saved",
    ),
    **dict.fromkeys(("tensor_parallel", "sequence_parallel_size"), "set parallel.tensor"),
}
"""Keys that cannot be set in engine.extra, and what to set instead."""

DEFAULTS: Flat = {"timers.throughput.enabled": False}
"""Ours, unless engine.extra says otherwise: the timer waits for the device in every forward pass."""
ON_GPUS: Flat = {"zero_optimization.use_multi_rank_bucket_allreduce": False}
"""The same, at stages 1 and 2: each gradient is sent only to the replica that updates its weight, which is half the traffic of an
all-reduce. gloo would add the gradients in another order, and CPUs gain nothing."""


def derived(config: "RunConfig", plan: Plan, precision: str | None) -> Flat:
    """DeepSpeed's keys; ``precision``: fp32, bf16 or fp16, or None if it depends on the device.

    At stage 0 the model itself handles the precision, and DeepSpeed is set to fp32 (its own bf16 does one Adam step too many).
    """
    engine, stage = config.engine, stage_of(config)
    flat: Flat = {
        "train_batch_size": plan.global_size,
        "train_micro_batch_size_per_gpu": plan.micro_size,
        "gradient_accumulation_steps": plan.global_size // (plan.micro_size * plan.data),
        "gradient_clipping": config.optim.clip,
        "steps_per_print": None,
        "zero_optimization.stage": stage,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if stage < 3:  # stage 3 can only average
        flat["gradient_allreduce_op"] = "sum"
    if stage > 0:
        flat["zero_optimization.overlap_comm"] = engine.overlap and config.parallel.pipeline == 1
    if precision is not None:
        mixed = precision if stage > 0 else "fp32"
        flat |= {"bf16.enabled": mixed == "bf16", "fp16.enabled": mixed == "fp16"}
        if mixed == "fp16":  # DeepSpeed detects overflows, hpclm's scaler adjusts the scale
            flat["fp16.loss_scale"] = config.scaler.initial
        if engine.gradients == "fp32" and mixed != "fp32":
            flat |= {"data_types.grad_accum_dtype": "fp32", "communication_data_type": "fp32"}
        if engine.bucket_mb is not None:
            width = 4 if mixed == "fp32" or engine.gradients == "fp32" else 2
            flat["zero_optimization.reduce_bucket_size"] = int(engine.bucket_mb * 2**20 / width)
    if config.parallel.pipeline > 1:  # tensor ranks already send different slices
        flat |= {"pipeline.pipe_partitioned": False, "pipeline.grad_partitioned": False}
    for section in {"none": (), "optimizer": ("optimizer",), "parameters": ("optimizer", "param")}[engine.offload]:
        place = f"zero_optimization.offload_{section}"
        flat[f"{place}.device"] = "nvme" if engine.offload_folder else "cpu"
        if engine.offload_folder:
            flat[f"{place}.nvme_path"] = engine.offload_folder
    return flat


def stage_of(config: "RunConfig") -> int:
    """The ZeRO stage, 1 by default."""
    return 1 if config.engine.zero_stage is None else config.engine.zero_stage


def settings(config: "RunConfig", plan: Plan, precision: str, gpu: bool = False) -> dict[str, Any]:
    """DeepSpeed's JSON, including engine.extra; ConfigError for contradictions. ``gpu``: whether it trains on GPUs."""
    flat = derived(config, plan, precision)
    wrong = list(problems(config, flat))
    if wrong:
        raise ConfigError(wrong)
    scattered = ON_GPUS if gpu and stage_of(config) in (1, 2) else {}
    return nested({**DEFAULTS, **scattered, **flat, **extra(config)})


def extra(config: "RunConfig") -> Flat:
    """engine.extra with parsed values."""
    return flattened({key: parsed(key, text) for key, text in config.engine.extra.items()})


def unsuitable(config: "RunConfig") -> Iterator[str]:
    """What is wrong, as far as it is known before the number of processes and the device."""
    if config.optim.name == "apex_adam" and stage_of(config) == 3:
        yield "optim.name=apex_adam does not work at engine.zero_stage=3, where it would count one step per part of the weights; use adamw"
    if config.optim.name == "apex_adam" and config.engine.offload != "none":
        yield f"optim.name=apex_adam needs a GPU, but engine.offload={config.engine.offload} updates on the CPU; use cpu_adam"
    if not config.engine.overlap and (stage_of(config) == 0 or config.parallel.pipeline > 1):
        yield (
            "engine.overlap=False has no effect with a pipeline or at engine.zero_stage=0: gradients are reduced after the "
            "backward pass"
        )
    if config.engine.offload_folder and stage_of(config) != 3:
        yield (
            f"engine.offload_folder={config.engine.offload_folder} needs engine.zero_stage=3; at stage {stage_of(config)} "
            f"DeepSpeed would use CPU memory"
        )
    precision = config.engine.precision
    try:
        plan = config.plan(config.parallel.model)
    except ConfigError:  # reported elsewhere
        return
    flat = derived(config, plan, None if precision == "auto" else precision)
    del flat["gradient_accumulation_steps"]
    yield from problems(config, flat)


def problems(config: "RunConfig", flat: Flat) -> Iterator[str]:
    """Keys of engine.extra that contradict ``flat``, have a setting, or are not DeepSpeed's."""
    try:
        added = extra(config)
    except ConfigError as error:
        yield from error.problems
        return
    engine = config.engine
    for key, given in added.items():
        section = next((path for path in flat if path.startswith(f"{key}.")), None)
        if section is not None:
            yield f"engine.extra.{key}={given} would replace a whole section; give its keys, such as {section}"
        elif key in flat:
            if given != flat[key]:
                yield f"engine.extra.{key}={given} contradicts {flat[key]}, which follows from the other settings"
        elif (owner := covering(key, INSTEAD)) is not None:
            yield f"engine.extra.{key}={given} cannot be set here: {INSTEAD[owner]}"
        elif key not in deepspeed_keys.TYPES:
            yield f"engine.extra.{deepspeed_keys.unknown(key, flat)}"
        elif (wanted := deepspeed_keys.mistyped(key, given)) is not None:
            yield f"engine.extra.{key}={given} must be {wanted}"
        elif (without := deepspeed_keys.idle(key, stage_of(config), engine.offload, engine.offload_folder)) is not None:
            yield f"engine.extra.{key}={given} would have no effect: {without}"


def covering(key: str, paths: object) -> str | None:
    """The one of ``paths`` that equals ``key`` or contains it."""
    parts = key.split(".")
    heads = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((head for head in heads if head in paths), None)  # type: ignore[operator]


def parsed(key: str, text: str) -> Any:
    """``text`` parsed as YAML; 1e8 and 1E+8 are integers."""
    try:
        found = reading.value(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"engine.extra.{key}={text!r} is not YAML: {' '.join(str(error).split())}") from None
    return number(found) if isinstance(found, str) else found


def number(text: str) -> Any:
    """1e8, which is text in YAML, as a number; other text unchanged."""
    try:
        found = float(text)
    except ValueError:
        return text
    return int(found) if found.is_integer() else found


def flattened(tree: Any, prefix: str = "") -> Flat:
    """Nested mappings -> dotted keys."""
    flat: Flat = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        flat |= flattened(value, path + ".") if isinstance(value, dict) and value else {path: value}
    return flat


def nested(flat: Flat) -> dict[str, Any]:
    """Dotted keys -> nested mappings."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return tree
