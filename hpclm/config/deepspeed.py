"""DeepSpeed's JSON, derived from a run's settings, for DeepSpeed 0.19.8 or later. Keys are dotted paths, as in engine.extra."""

from collections.abc import Iterator
from typing import Any

import yaml

from hpclm.base.errors import ConfigError
from hpclm.base.registry import hint
from hpclm.config import reading
from hpclm.config.engine import EngineConfig
from hpclm.config.fields import flattened, nested
from hpclm.config.model import BLOCKS
from hpclm.config.schema import EngineSettings, RunConfig

Flat = dict[str, Any]

SECTIONS = (
    *("zero_optimization", "aio", "bf16", "data_types", "timers", "flops_profiler", "comms_logger"),
    *("prescale_gradients", "gradient_predivide_factor", "wall_clock_breakdown", "memory_breakdown"),
    *("dump_state", "disable_python_gc", "log_level"),
)
"""Parts of DeepSpeed's JSON that engine.extra may add to. DeepSpeed checks their content."""
REFUSED = (
    *("data_types.param_dtype", "data_types.grad_accum_dtype", "bf16.immediate_grad_update"),
    *("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states", "bf16.check_grad_overflow"),
    *(
        f"zero_optimization.{key}"
        for key in (
            *("compute_grad_norm", "round_robin_gradients", "zenflow", "elastic_checkpoint", "load_from_fp32_weights"),
            *("gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"),
            *("stage3_gather_fp16_weights_on_model_save", "cpu_offload", "cpu_offload_param"),
            *("offload_optimizer.device", "offload_optimizer.nvme_path", "offload_optimizer.ratio"),
            *("offload_optimizer.super_offload", "offload_param.device", "offload_param.nvme_path"),
            "zero_quantized_nontrainable_weights",
        )
    ),
)
"""Keys in these parts that settings determine, or that prevent saving the state or repeating a step."""

DEFAULTS: Flat = {"timers.throughput.enabled": False}
"""Defaults that differ from DeepSpeed's; engine.extra overrides them. The timer would wait for the device in every forward pass."""


def derived(config: EngineSettings, precision: str | None) -> Flat:
    """DeepSpeed's keys that follow from settings. ``precision``: fp32, bf16 or fp16, or None if it depends on the device.

    At stage 0 the model itself handles the precision, and DeepSpeed is set to fp32 (its own bf16 does one Adam step too many).
    """
    engine = config.engine
    plan = config.plan
    stage = stage_of(engine)
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
    if config.parallel.pipeline > 1:
        flat["zero_optimization.overlap_comm"] = False
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
        prefix = f"zero_optimization.offload_{section}"
        flat[f"{prefix}.device"] = "cpu"
        if engine.offload_folder:
            flat |= {f"{prefix}.device": "nvme", f"{prefix}.nvme_path": engine.offload_folder}
    return flat


def stage_of(engine: EngineConfig) -> int:
    """The ZeRO stage, 1 by default."""
    return 1 if engine.zero_stage is None else engine.zero_stage


def json_settings(config: EngineSettings, precision: str) -> dict[str, Any]:
    """DeepSpeed's JSON, including engine.extra; ConfigError for contradictions.

    At stages 1 and 2 gradients are all-reduced, which is DeepSpeed's default. With use_multi_rank_bucket_allreduce=false, each
    gradient would go only to the replica that updates its weight. That halves the traffic, but every reduction then waits for the
    device, one after the other.
    """
    flat = derived(config, precision)
    wrong = list(problems(config.engine, flat))
    if wrong:
        raise ConfigError(wrong)
    defaults = dict(DEFAULTS)
    if stage_of(config.engine) > 0:
        defaults["zero_optimization.overlap_comm"] = True
    return nested({**defaults, **flat, **extra(config.engine)})


def extra(engine: EngineConfig) -> Flat:
    """engine.extra with parsed values."""
    return flattened({key: parsed(key, text) for key, text in engine.extra.items()})


def unsuitable(config: RunConfig) -> Iterator[str]:
    """Problems that can be found before the number of processes and the device are known."""
    stage = stage_of(config.engine)
    if config.optim.name == "apex_adam" and stage == 3:
        yield "optim.name=apex_adam does not work at engine.zero_stage=3, where it would count one step per part of the weights; use adamw"
    if config.optim.name == "apex_adam" and config.engine.offload != "none":
        yield f"optim.name=apex_adam needs a GPU, but engine.offload={config.engine.offload} updates on the CPU; use cpu_adam"
    if config.engine.offload_folder and stage != 3:
        yield (
            f"engine.offload_folder={config.engine.offload_folder} needs engine.zero_stage=3; at stage {stage} "
            f"DeepSpeed would use CPU memory"
        )
    if config.model.freeze:
        for setting in _of_one_type(config.engine):
            yield f"model.freeze does not work with {setting}: DeepSpeed then keeps all weights in the compute type; leave it out"
    if config.optim.ema is not None and config.engine.offload_folder:
        yield f"optim.ema={config.optim.ema} does not work with engine.offload_folder={config.engine.offload_folder}; leave one of them out"
    if config.engine.compile and config.model.block not in BLOCKS:
        yield (
            f"engine.compile=true does not work with DeepSpeed and model.block={config.model.block}: its replicas must compile the same "
            f"parts in the same order; leave engine.compile out, or use another engine"
        )
    precision = config.engine.precision
    try:
        smallest = config.for_engine(config.parallel.smallest)
    except ConfigError:  # reported elsewhere
        return
    flat = derived(smallest, None if precision == "auto" else precision)
    del flat["gradient_accumulation_steps"]
    yield from problems(config.engine, flat)


def _of_one_type(engine: EngineConfig) -> Iterator[str]:
    """Settings that need all weights in one type; frozen weights are in fp32."""
    if engine.offload == "parameters" and engine.offload_folder:
        yield f"engine.offload_folder={engine.offload_folder} and engine.offload=parameters"
    key = "zero_optimization.use_all_reduce_for_fetch_params"
    if key in flattened(engine.extra):
        yield f"engine.extra.{key}"


def problems(engine: EngineConfig, flat: Flat) -> Iterator[str]:
    """Keys of engine.extra that contradict ``flat``, or that cannot be set there."""
    try:
        added = extra(engine)
    except ConfigError as error:
        yield from error.problems
        return
    for key, value in added.items():
        section = next((path for path in flat if path.startswith(f"{key}.")), None)
        if section is not None:
            yield f"engine.extra.{key}={value} would replace a whole section; give its keys, such as {section}"
        elif key in flat:
            if value != flat[key]:
                yield f"engine.extra.{key}={value} contradicts {flat[key]}, which follows from the other settings"
        elif refusal(key):
            yield f"engine.extra.{key}={value} cannot be set here: {refusal(key)}"


def refusal(key: str) -> str | None:
    """Why engine.extra does not take a key; None if it does."""
    if any(f"{key}.".startswith(f"{refused}.") for refused in REFUSED):
        return "it follows from the settings, or its state could not be saved"
    first = key.split(".")[0]
    if first in SECTIONS:
        return None
    return f"engine.extra adds to {', '.join(SECTIONS)}; the rest follows from settings.{hint(first, list(SECTIONS))}"


def parsed(key: str, text: str) -> Any:
    """``text`` parsed as YAML; 1e8 and 1E+8 are integers."""
    try:
        value = reading.value(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"engine.extra.{key}={text!r} is not YAML: {reading.reason(error)}") from None
    if isinstance(value, float) and value.is_integer() and "." not in text:
        return int(value)
    return value
