"""What a forecast takes a run to be."""

import pytest

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.model import count
from hpclm.node.gpus import KINDS
from hpclm.planning import forecast


def test_fsdp2_shards_over_context_parallel_ranks_where_there_is_one_replica():
    run = config.load(None, ["engine.name=fsdp2", "job.gpus=4", "parallel.context=4", "engine.precision=bf16"])
    planned = forecast.predict(run, KINDS["H100"])
    assert planned.layout.data == 1 and planned.memory[0].weights == 4 * count.parameters(run.model) / 4


def test_products_in_fp8_take_half_as_long_where_a_gpu_multiplies_it_and_quantizing_costs_traffic():
    words = ["engine.precision=bf16", "engine.compile=true", "batch.micro_size=4", "optim.name=adamw"]
    plain, fp8 = (
        forecast.predict(config.load("configs/llama-7b.yaml", [*words, "job.gpus=8", *more]), KINDS["H100"])
        for more in ([], ["engine.fp8=rowwise"])
    )
    assert 0.6 * plain.step.compute < fp8.step.compute < 0.85 * plain.step.compute
    # as much of what the GPU could do, if quantizing cost nothing
    assert fp8.mfu < plain.mfu and fp8.mfu == pytest.approx(plain.mfu, rel=0.15)
    with pytest.raises(ConfigError, match="needs a GPU that multiplies FP8; these do: B200, H200"):
        forecast.predict(
            config.load("configs/llama-7b.yaml", [*words, "job.gpus=8", "engine.fp8=rowwise"]), KINDS["A100"]
        )
