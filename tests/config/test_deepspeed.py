import typing
from pathlib import Path

import pytest

from hpclm import config
from hpclm.config import deepspeed, deepspeed_keys
from hpclm.errors import ConfigError

BASE = ["engine.name=deepspeed", "batch.global_size=32", "batch.micro_size=2", "budget.steps=1"]

DISK = ["engine.zero_stage=3", "engine.offload=parameters", "engine.offload_folder=/nvme"]


def told(precision, *words, processes=4):
    run = config.load(None, [*BASE, *words])
    return deepspeed.settings(run, run.plan(processes), precision)


@pytest.mark.parametrize(
    "words, precision, wanted",
    [
        ([], "fp32", {"zero_optimization.stage": 1, "bf16.enabled": False, "fp16.enabled": False}),
        ([], "bf16", {"bf16.enabled": True, "train_batch_size": 32, "gradient_accumulation_steps": 4}),
        (["engine.zero_stage=0"], "bf16", {"bf16.enabled": False, "zero_optimization.stage": 0}),
        (["engine.zero_stage=0", "engine.precision=fp16"], "fp16", {"fp16.enabled": False}),
        (["engine.precision=fp16", "scaler.initial=1000"], "fp16", {"fp16.enabled": True, "fp16.loss_scale": 1000.0}),
        (["engine.gradients=fp32"], "bf16", {"data_types.grad_accum_dtype": "fp32", "communication_data_type": "fp32"}),
        (["engine.gradients=fp32", "engine.bucket_mb=4"], "bf16", {"zero_optimization.reduce_bucket_size": 2**20}),
        (["engine.bucket_mb=4"], "bf16", {"zero_optimization.reduce_bucket_size": 2**21}),
        (["engine.bucket_mb=4"], "fp32", {"zero_optimization.reduce_bucket_size": 2**20}),
        (["optim.clip=0.5"], "fp32", {"gradient_clipping": 0.5, "zero_optimization.overlap_comm": True}),
        (["engine.overlap=false"], "fp32", {"zero_optimization.overlap_comm": False}),
        (
            ["parallel.pipeline=2"],
            "fp32",
            {"pipeline.pipe_partitioned": False, "zero_optimization.overlap_comm": False},
        ),
        (["parallel.pipeline=2", "parallel.tensor=2"], "fp32", {"gradient_accumulation_steps": 16}),
        (["engine.offload=optimizer"], "bf16", {"zero_optimization.offload_optimizer.device": "cpu"}),
        (
            ["engine.offload=parameters", "engine.zero_stage=3", "engine.offload_folder=/nvme"],
            "bf16",
            {
                "zero_optimization.offload_param.device": "nvme",
                "zero_optimization.offload_param.nvme_path": "/nvme",
                "zero_optimization.offload_optimizer.device": "nvme",
                "zero_optimization.offload_optimizer.nvme_path": "/nvme",
            },
        ),
        (
            [*DISK, "engine.extra.zero_optimization.sub_group_size=1e8", "engine.extra.aio={block_size: 1048576}"],
            "fp32",
            {"zero_optimization.sub_group_size": 10**8, "zero_optimization.stage": 3, "aio.block_size": 1048576},
        ),
        (["engine.extra.gradient_clipping=1.0", "optim.clip=1"], "fp32", {"gradient_clipping": 1.0}),
    ],
)
def test_settings_become_deepspeeds_json(words, precision, wanted):
    flat = deepspeed.flattened(told(precision, *words))
    assert {key: flat.get(key) for key in wanted} == wanted


@pytest.mark.parametrize(
    "word, says",
    [
        ("zero_optimization.stage=2", "stage=2 contradicts 1"),
        ("zero_optimization={stage: 3}", "stage=3 contradicts 1"),
        ("zero_optimization=3", "would replace a whole section"),
        ("gradient_clipping=2", "gradient_clipping=2 contradicts 1.0"),
        ("train_batch_size=64", "train_batch_size=64 contradicts 32"),
        ("gradient_accumulation_steps=4", "follows from batch"),
        ("optimizer.params.lr=1", "set optim"),
        ("fp16.initial_scale_power=8", "scaler"),
        ("zero_optimization.offload_optimizer.device=cpu", "engine.offload"),
        ("zero_optimization.round_robin_gradients=true", "order"),
        ("gradient_cliping=1", "Did you mean 'gradient_clipping'"),
        ("wall_clock_breakdown=[", "is not YAML"),
        ("zero_optimization.sub_grop_size=1", "Did you mean 'zero_optimization.sub_group_size'"),
        ("zero_optimization.offload_optimizer.buffer_cout=1", "Did you mean '.*offload_optimizer.buffer_count'"),
        ("zero_optimization.sub_group_size.low=1", "sub_group_size.low: DeepSpeed has no such key"),
        ("zero_optimization.mics_shard_size=2", "no longer has MiCS"),
        ("zero_optimization.zeropp_loco_param.err_beta=0.5", "no longer has LoCo"),
        ("zero_optimization.gather_16bit_weights_on_model_save=true", "checkpoint"),
        ("zero_optimization.cpu_offload_param=true", "set engine.offload"),
        ("zero_optimization.sub_group_size=many", "sub_group_size=many must be a whole number"),
        ("zero_optimization.contiguous_gradients=1", "contiguous_gradients=1 must be true or false"),
        ("aio.block_size=hello", "aio.block_size=hello must be a whole number"),
        ("aio=3", "aio=3 must be a section"),
        ("aio.blok_size=1", "Did you mean 'aio.block_size'"),
        ("bf16.enabeld=true", "Did you mean 'bf16.enabled'"),
        ("data_types.buffer_type=fp32", "Did you mean 'data_types.buffer_dtype'"),
        ("timers.throughput.enable=true", "Did you mean 'timers.throughput.enabled'"),
        ("comms_logger.prof_ops=all", "prof_ops=all must be a list"),
        ("dump_state.now=true", "dump_state.now: DeepSpeed has no such key"),
    ],
)
def test_extra_keys_contradict_nothing_and_exist(word, says):
    with pytest.raises(ConfigError, match=says):
        config.load(None, [*BASE, "optim.clip=1", f"engine.extra.{word}"])


def test_settings_that_depend_on_the_device_are_checked_once_it_is_known():
    run = config.load(None, [*BASE, "engine.extra.bf16.enabled=true"])
    assert deepspeed.settings(run, run.plan(4), "bf16")["bf16"] == {"enabled": True}
    with pytest.raises(ConfigError, match=r"bf16.enabled=True contradicts False"):
        deepspeed.settings(run, run.plan(4), "fp32")


def test_apex_cannot_count_steps_at_stage_3():
    with pytest.raises(ConfigError, match="apex_adam does not work"):
        config.load(None, [*BASE, "optim.name=apex_adam", "engine.zero_stage=3"])
    config.load(None, [*BASE, "optim.name=apex_adam"])


def test_a_disk_is_used_at_stage_3_only():
    with pytest.raises(ConfigError, match=r"needs engine.zero_stage=3"):
        config.load(None, [*BASE, "engine.offload=optimizer", "engine.offload_folder=/nvme"])


@pytest.mark.parametrize(
    "words, key, without",
    [
        (["engine.zero_stage=0"], "zero_optimization.sub_group_size=8", "engine.zero_stage is 0"),
        ([], "aio.block_size=8", "engine.offload_folder is not set"),
        ([], "zero_optimization.offload_optimizer.buffer_count=8", "engine.offload is none"),
        (
            ["engine.offload=optimizer"],
            "zero_optimization.offload_param.buffer_count=8",
            "engine.offload is optimizer; it needs parameters",
        ),
    ],
)
def test_a_key_that_would_have_no_effect_is_refused(words, key, without):
    with pytest.raises(ConfigError, match=f"engine.extra.{key} would have no effect: {without}"):
        config.load(None, [*BASE, *words, f"engine.extra.{key}"])
    config.load(None, [*BASE, *DISK, f"engine.extra.{key}"])


def test_deepspeeds_timer_does_not_wait_for_the_device_unless_it_is_asked_for():
    assert told("bf16")["timers"]["throughput"] == {"enabled": False}
    assert told("bf16", "engine.extra.timers.throughput.enabled=true")["timers"]["throughput"] == {"enabled": True}


@pytest.mark.parametrize("stage, reduced", [(0, None), (1, False), (2, False), (3, None)])
def test_on_gpus_each_gradient_goes_only_to_the_replica_that_keeps_it(stage, reduced):
    key = "use_multi_rank_bucket_allreduce"
    run = config.load(None, [*BASE, f"engine.zero_stage={stage}"])
    for gpu in (False, True):
        found = deepspeed.settings(run, run.plan(4), "bf16", gpu)["zero_optimization"].get(key)
        assert found is (reduced if gpu else None)


def test_stage_0_still_reduces_in_buckets():
    words = ["engine.zero_stage=0", "engine.extra.zero_optimization.reduce_bucket_size=8"]
    assert told("fp32", *words)["zero_optimization"]["reduce_bucket_size"] == 8


def kind(annotation):
    """The type that a field of DeepSpeed's models takes in a JSON."""
    import pydantic

    inner = next((a for a in typing.get_args(annotation) if a is not type(None)), annotation)
    if typing.get_origin(annotation) is list:
        return list
    bases = {bool: bool, int: int, float: float, list: list, pydantic.BaseModel: dict, str: str, Path: str}
    return next(kind for base, kind in bases.items() if issubclass(inner, base))


def test_the_keys_are_those_of_the_installed_deepspeed():
    pytest.importorskip("deepspeed")
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime import config as top
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    def listed(section):
        return {
            key.rpartition(".")[2]: kind
            for key, kind in deepspeed_keys.TYPES.items()
            if key.rpartition(".")[0] == section
        }

    for section, model in {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }.items():
        fields = model.model_fields.items()
        names = {name: kind(field.annotation) for name, field in fields}
        names |= {field.alias: kind(field.annotation) for _, field in fields if field.alias}
        assert listed(section) == names, section
    assert listed("aio") == {name: type(value) for name, value in AIO_DEFAULT_DICT.items()}
    assert listed("flops_profiler").keys() == vars(DeepSpeedFlopsProfilerConfig({})).keys()
    types = {top.GRAD_ACCUM_DTYPE, top.PARAM_DTYPE, top.BUFFER_DTYPE, top.KEEP_IN_FP32_MODULES}
    assert listed("data_types").keys() == types
    gone = {key.rpartition(".")[2] for key in deepspeed_keys.REMOVED}
    assert gone == top._REMOVED_ZERO_CONFIG_KEYS.keys()
