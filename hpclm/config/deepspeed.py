"""DeepSpeed's JSON, derived from a run's settings: the only place that speaks its vocabulary.

Keys are dotted paths, as in engine.extra. Written for DeepSpeed 0.19; nothing here needs it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import yaml

from hpclm.config import deepspeed_keys
from hpclm.config.plan import Plan
from hpclm.config.reading import value
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
    "bf16.immediate_grad_update": "set engine.gradients",
    "amp": "set engine.precision",
    "torch_autocast": "set engine.precision",
    "data_types.param_dtype": "set engine.precision",
    "data_types.grad_accum_dtype": "set engine.gradients",
    "communication_data_type": "set engine.gradients",
    "activation_checkpointing": "set engine.recompute",
    "pipeline": "set parallel.pipeline, parallel.partition and engine.recompute",
    "gradient_accumulation_steps": "it follows from batch.* and the number of processes",
    "gradient_allreduce_op": "the engine sums gradients",
    "managed_gradient_accumulation": "the engine counts micro-batches",
    "sparse_gradients": "the model has no sparse gradients",
    "dataloader_drop_last": "hpclm reads the data",
    "curriculum_learning": "hpclm reads the data",
    "data_efficiency": "hpclm reads the data",
    "data_sampling": "hpclm reads the data",
    "tensor_parallel": "set parallel.tensor",
    "sequence_parallel_size": "set parallel.tensor",
    "data_parallel_size": "it follows from the number of processes",
    "elasticity": "a run goes on with any number of processes",
    "autotuning": "the engine does not tune itself",
    "checkpoint": "set checkpoint.*",
    "nebula": "set checkpoint.*",
    "load_universal_checkpoint": "set checkpoint.*",
    "use_node_local_storage": "set checkpoint.*",
    "tensorboard": "set log.*",
    "wandb": "set log.*",
    "csv_monitor": "set log.*",
    "comet": "set log.*",
    "steps_per_print": "set log.every",
    "compile": "set engine.compile",
    "hybrid_engine": "the engine only trains",
    "zero_optimization.compute_grad_norm": "the norm is clipped on and logged",
    "zero_optimization.elastic_checkpoint": "set checkpoint.*",
    "zero_optimization.load_from_fp32_weights": "set checkpoint.*",
    "zero_optimization.round_robin_gradients": "weights are saved from buffers that it would order otherwise",
    "zero_optimization.zenflow": "its optimizer state cannot be saved",
    "zero_optimization.offload_optimizer.ratio": "the state of a second optimizer would not be saved",
    "zero_optimization.offload_optimizer.super_offload": "its optimizer state cannot be saved",
    "zero_optimization.cpu_offload": "set engine.offload",
    "zero_optimization.cpu_offload_param": "set engine.offload",
    "zero_optimization.cpu_offload_use_pin_memory": "set pin_memory in offload_optimizer and offload_param",
    "zero_optimization.offload_optimizer.device": "set engine.offload",
    "zero_optimization.offload_optimizer.nvme_path": "set engine.offload_folder",
    "zero_optimization.offload_param.device": "set engine.offload",
    "zero_optimization.offload_param.nvme_path": "set engine.offload_folder",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "set checkpoint.*",
    "zero_optimization.gather_16bit_weights_on_model_save": "set checkpoint.*",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "set checkpoint.*",
}
"""Keys that hpclm decides for itself, and what to set instead."""


def derived(config: "RunConfig", plan: Plan, precision: str | None) -> Flat:
    """What DeepSpeed is told; ``precision``: fp32, bf16 or fp16, or None where only the device will decide it.

    At stage 0 the model itself computes in the type, so DeepSpeed is told of fp32 (its own bf16 takes an Adam step more
    than it should there).
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
    if stage > 0:
        flat["zero_optimization.overlap_comm"] = engine.overlap and config.parallel.pipeline == 1
    if precision is not None:
        mixed = precision if stage > 0 else "fp32"
        flat |= {"bf16.enabled": mixed == "bf16", "fp16.enabled": mixed == "fp16"}
        if mixed == "fp16":  # DeepSpeed finds overflows, hpclm's scaler moves the scale
            flat["fp16.loss_scale"] = config.scaler.initial
        if engine.gradients == "fp32" and mixed != "fp32":
            flat |= {"data_types.grad_accum_dtype": "fp32", "communication_data_type": "fp32"}
        if engine.bucket_mb is not None:
            width = 4 if mixed == "fp32" or engine.gradients == "fp32" else 2
            flat["zero_optimization.reduce_bucket_size"] = int(engine.bucket_mb * 2**20 / width)
    if config.parallel.pipeline > 1:  # stages send slices of a sequence, which already differ between tensor ranks
        flat |= {"pipeline.pipe_partitioned": False, "pipeline.grad_partitioned": False}
    for section in {"none": (), "optimizer": ("optimizer",), "parameters": ("optimizer", "param")}[engine.offload]:
        place = f"zero_optimization.offload_{section}"
        flat[f"{place}.device"] = "nvme" if engine.offload_folder else "cpu"
        if engine.offload_folder:
            flat[f"{place}.nvme_path"] = engine.offload_folder
    return flat


def stage_of(config: "RunConfig") -> int:
    """The ZeRO stage: 1, unless it is set."""
    return 1 if config.engine.zero_stage is None else config.engine.zero_stage


def settings(config: "RunConfig", plan: Plan, precision: str) -> dict[str, Any]:
    """DeepSpeed's JSON: what follows from the settings, and engine.extra; ConfigError where these contradict."""
    flat = derived(config, plan, precision)
    wrong = list(problems(config, flat))
    if wrong:
        raise ConfigError(wrong)
    return nested({**flat, **extra(config)})


def extra(config: "RunConfig") -> Flat:
    """engine.extra as one level of dotted keys, values as YAML reads them; 1e8 is a number."""
    return flattened({key: parsed(key, text) for key, text in config.engine.extra.items()})


def unsuitable(config: "RunConfig") -> Iterator[str]:
    """What is wrong, as far as it shows before the number of processes and the device are known."""
    if config.optim.name == "apex_adam" and stage_of(config) == 3:
        yield "optim.name=apex_adam would count a step for every part of the weights at engine.zero_stage=3; use adamw"
    if config.optim.name == "apex_adam" and config.engine.offload != "none":
        yield f"optim.name=apex_adam is for GPUs, and engine.offload={config.engine.offload} updates on the CPU; use cpu_adam"
    if not config.engine.overlap and (stage_of(config) == 0 or config.parallel.pipeline > 1):
        yield (
            "engine.overlap=False has no effect with a pipeline or at engine.zero_stage=0: gradients are reduced after the "
            "backward pass"
        )
    if config.engine.offload_folder and stage_of(config) != 3:
        yield (
            f"engine.offload_folder={config.engine.offload_folder} needs engine.zero_stage=3; at stage {stage_of(config)} "
            f"DeepSpeed would use the CPU's memory"
        )
    precision = config.engine.precision
    try:
        plan = config.plan(config.parallel.model)
    except ConfigError:  # told elsewhere
        return
    flat = derived(config, plan, None if precision == "auto" else precision)
    del flat["gradient_accumulation_steps"]
    yield from problems(config, flat)


def problems(config: "RunConfig", flat: Flat) -> Iterator[str]:
    """What in engine.extra contradicts ``flat``, belongs to a setting, or is no key of DeepSpeed's."""
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
            yield f"engine.extra.{key}={given} is not DeepSpeed's to decide: {INSTEAD[owner]}"
        elif key not in deepspeed_keys.TYPES:
            yield f"engine.extra.{deepspeed_keys.unknown(key, flat)}"
        elif (wanted := deepspeed_keys.mistyped(key, given)) is not None:
            yield f"engine.extra.{key}={given} must be {wanted}"
        elif (without := deepspeed_keys.idle(key, stage_of(config), engine.offload, engine.offload_folder)) is not None:
            yield f"engine.extra.{key}={given} would have no effect: {without}"


def covering(key: str, paths: object) -> str | None:
    """The one of ``paths`` that ``key`` is, or lies in."""
    parts = key.split(".")
    heads = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((head for head in heads if head in paths), None)  # type: ignore[operator]


def parsed(key: str, text: str) -> Any:
    """The value that ``text`` stands for, as YAML has it; 1e8 and 1E+8 are whole numbers."""
    try:
        found = value(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"engine.extra.{key}={text!r} is not YAML: {' '.join(str(error).split())}") from None
    return number(found) if isinstance(found, str) else found


def number(text: str) -> Any:
    """1e8, which YAML takes for text, as a number; other text as it is."""
    try:
        found = float(text)
    except ValueError:
        return text
    return int(found) if found.is_integer() else found


def flattened(tree: Any, prefix: str = "") -> Flat:
    """Mappings in mappings -> one level of dotted keys."""
    flat: Flat = {}
    for key, held in tree.items():
        path = f"{prefix}{key}"
        flat |= flattened(held, path + ".") if isinstance(held, dict) and held else {path: held}
    return flat


def nested(flat: Flat) -> dict[str, Any]:
    """One level of dotted keys -> mappings in mappings."""
    tree: dict[str, Any] = {}
    for path, held in flat.items():
        *parents, last = path.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = held
    return tree
