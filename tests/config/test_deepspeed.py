import pytest

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.config import deepspeed
from hpclm.config.fields import flattened

BASE = ["engine.name=deepspeed", "batch.global_size=32", "batch.micro_size=2", "budget.steps=1"]

DISK = ["engine.zero_stage=3", "engine.offload=parameters", "engine.offload_folder=/nvme"]


def json_for(precision, *words, processes=4):
    run = config.load(None, [*BASE, *words])
    return deepspeed.json_settings(run.for_engine(processes), precision)


@pytest.mark.parametrize(
    "words, precision, expected",
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
        (["engine.extra.zero_optimization.overlap_comm=false"], "fp32", {"zero_optimization.overlap_comm": False}),
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
def test_settings_become_deepspeeds_json(words, precision, expected):
    flat = flattened(json_for(precision, *words))
    assert {key: flat.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    "word, message",
    [
        ("zero_optimization.stage=2", "stage=2 contradicts 1"),
        ("zero_optimization={stage: 3}", "stage=3 contradicts 1"),
        ("zero_optimization=3", "would replace a whole section"),
        ("gradient_clipping=2", "gradient_clipping=2 contradicts 1.0"),
        ("train_batch_size=64", "train_batch_size=64 contradicts 32"),
        ("gradient_accumulation_steps=4", "the rest follows from settings"),
        ("optimizer.params.lr=1", "the rest follows from settings"),
        ("zero_optimization.offload_optimizer.device=cpu", "follows from the settings"),
        ("zero_optimization.round_robin_gradients=true", "could not be saved"),
        ("zero_optimization.zenflow={topk_ratio: 0.1}", "could not be saved"),
        ("zero_optimization.offload_optimizer.ratio=0.5", "could not be saved"),
        ("zero_optimization.cpu_offload_param=true", "follows from the settings"),
        ("wall_clock_breakdown=[", "is not YAML"),
        ("zero_optimisation.sub_group_size=1", "Did you mean 'zero_optimization'"),
    ],
)
def test_extra_keys_contradict_nothing_and_have_no_setting(word, message):
    with pytest.raises(ConfigError, match=message):
        config.load(None, [*BASE, "optim.clip=1", f"engine.extra.{word}"])


def test_settings_that_depend_on_the_device_are_checked_once_it_is_known():
    run = config.load(None, [*BASE, "engine.extra.bf16.enabled=true"])
    assert deepspeed.json_settings(run.for_engine(4), "bf16")["bf16"] == {"enabled": True}
    with pytest.raises(ConfigError, match=r"bf16.enabled=True contradicts False"):
        deepspeed.json_settings(run.for_engine(4), "fp32")


def test_apex_cannot_count_steps_at_stage_3():
    with pytest.raises(ConfigError, match="apex_adam does not work"):
        config.load(None, [*BASE, "optim.name=apex_adam", "engine.zero_stage=3"])
    config.load(None, [*BASE, "optim.name=apex_adam"])


def test_a_disk_is_used_at_stage_3_only():
    with pytest.raises(ConfigError, match=r"needs engine.zero_stage=3"):
        config.load(None, [*BASE, "engine.offload=optimizer", "engine.offload_folder=/nvme"])


def test_deepspeeds_timer_does_not_wait_for_the_device_unless_it_is_asked_for():
    assert json_for("bf16")["timers"]["throughput"] == {"enabled": False}
    assert json_for("bf16", "engine.extra.timers.throughput.enabled=true")["timers"]["throughput"] == {"enabled": True}


@pytest.mark.parametrize("stage", range(4))
def test_gradients_are_reduced_as_deepspeed_does_by_default(stage):
    key = "use_multi_rank_bucket_allreduce"
    assert key not in json_for("bf16", f"engine.zero_stage={stage}")["zero_optimization"]
    asked = json_for("bf16", f"engine.zero_stage={stage}", f"engine.extra.zero_optimization.{key}=false")
    assert asked["zero_optimization"][key] is False


def test_stage_0_still_reduces_in_buckets():
    words = ["engine.zero_stage=0", "engine.extra.zero_optimization.reduce_bucket_size=8"]
    assert json_for("fp32", *words)["zero_optimization"]["reduce_bucket_size"] == 8


def test_a_block_whose_parts_replicas_may_compile_in_another_order_is_not_compiled():
    own = ["engine.name=deepspeed", "model.block=tests.model.test_reports:Balanced"]
    with pytest.raises(ConfigError, match=r"does not work with DeepSpeed and model\.block=tests"):
        config.load("debug", [*own, "engine.compile=true"])
    config.load("debug", own)
    config.load("debug", ["engine.name=deepspeed", "engine.compile=true"])
