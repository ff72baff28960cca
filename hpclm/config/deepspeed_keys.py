"""The keys of DeepSpeed 0.19 that engine.extra may set, and their types."""

from collections.abc import Iterable
from typing import Any

from hpclm.registry import hint

SECTIONS: dict[str, dict[type, str]] = {
    "": {
        bool: "prescale_gradients wall_clock_breakdown memory_breakdown dump_state disable_python_gc",
        float: "gradient_predivide_factor",
        str: "log_level",
    },
    "zero_optimization": {
        int: "stage reduce_bucket_size allgather_bucket_size sub_group_size prefetch_bucket_size "
        "stage3_prefetch_bucket_size param_persistence_threshold stage3_param_persistence_threshold "
        "model_persistence_threshold stage3_model_persistence_threshold max_live_parameters stage3_max_live_parameters "
        "max_reuse_distance stage3_max_reuse_distance module_granularity_threshold stage3_module_granularity_threshold "
        "zero_hpz_partition_size",
        bool: "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm "
        "compute_grad_norm load_from_fp32_weights elastic_checkpoint cpu_offload cpu_offload_param "
        "cpu_offload_use_pin_memory gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save use_all_reduce_for_fetch_params "
        "stage3_use_all_reduce_for_fetch_params allgather_sequential stage3_allgather_sequential "
        "ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment zero_quantized_weights "
        "zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear "
        "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks "
        "save_muon_momentum_buffer_in_memory",
        dict: "offload_param offload_optimizer zenflow leaf_module",
    },
    "zero_optimization.offload_param": {
        str: "device nvme_path",
        int: "buffer_count buffer_size max_in_cpu",
        bool: "pin_memory",
    },
    "zero_optimization.offload_optimizer": {
        str: "device nvme_path",
        int: "buffer_count",
        bool: "pin_memory pipeline_read pipeline_write fast_init super_offload",
        float: "ratio cpuadam_cores_perc",
    },
    "zero_optimization.leaf_module": {list: "classes names name_suffixes"},
    "bf16": {
        bool: "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
    },
    "data_types": {str: "grad_accum_dtype param_dtype buffer_dtype", list: "keep_in_fp32_modules"},
    "aio": {int: "block_size queue_depth intra_op_parallelism", bool: "single_submit overlap_events use_gds"},
    "flops_profiler": {
        bool: "enabled detailed",
        int: "profile_step module_depth top_modules",
        float: "recompute_fwd_factor",
        str: "output_file",
    },
    "comms_logger": {bool: "enabled prof_all verbose debug", list: "prof_ops"},
    "timers": {dict: "throughput"},
    "timers.throughput": {bool: "enabled synchronized"},
}

TYPES: dict[str, type] = {
    **{section: dict for section in SECTIONS if section},
    **{
        f"{section}.{name}".lstrip("."): kind
        for section, rows in SECTIONS.items()
        for kind, names in rows.items()
        for name in names.split()
    },
}
"""Every key as a dotted path."""

REMOVED = {
    "zero_optimization.mics_shard_size": "MiCS; engine.name=fsdp2 parallel.shard=N shards within groups",
    "zero_optimization.mics_hierarchical_params_gather": "MiCS",
    "zero_optimization.zeropp_loco_param": "LoCo",
}
"""Keys of older releases, and their features."""

WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a section",
}


def unknown(key: str, top: Iterable[str] = ()) -> str:
    """A message about ``key``, which is not in TYPES; ``top``: more known keys outside of sections."""
    gone = next((old for old in REMOVED if key == old or key.startswith(f"{old}.")), None)
    if gone is not None:
        return f"{key}: DeepSpeed 0.19 no longer has {REMOVED[gone]}"
    parts = key.split(".")
    heads = [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]
    section = next((head for head in heads if head in SECTIONS), "")
    known = [path for path in TYPES if path.rpartition(".")[0] == section]
    return f"{key}: DeepSpeed has no such key.{hint(key, known if section else [*known, *top])}"


def mistyped(key: str, given: Any) -> str | None:
    """The type that ``key`` must have; None if ``given`` has it."""
    kind = TYPES[key]
    if kind is list and key == "data_types.keep_in_fp32_modules" and given == "auto":
        return None
    return None if fits(given, kind) else WORDS[kind]


def fits(given: Any, kind: type) -> bool:
    """Whether ``given`` is of ``kind``; 5e8 is an integer."""
    if kind in (int, float):
        number = isinstance(given, (int, float)) and not isinstance(given, bool) and abs(given) < 2**63
        return number and (kind is float or given == int(given))
    return isinstance(given, kind)


def idle(key: str, stage: int, offload: str, folder: str | None) -> str | None:
    """Why ``key`` has no effect; None if it has. ``stage``, ``offload``, ``folder``: engine.zero_stage, offload, offload_folder."""
    section, _, name = key.rpartition(".")
    if key.startswith("zero_optimization.") and stage == 0 and name not in ("stage", "reduce_bucket_size"):
        return "engine.zero_stage is 0; it needs 1, 2 or 3"
    if section == "zero_optimization.offload_optimizer" and offload == "none":
        return "engine.offload is none; it needs optimizer or parameters"
    if section == "zero_optimization.offload_param" and offload != "parameters":
        return f"engine.offload is {offload}; it needs parameters"
    if section == "aio" and folder is None:
        return "engine.offload_folder is not set, so no disk is used"
    return None
