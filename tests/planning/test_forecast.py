"""What a forecast takes a run to be."""

from hpclm import config
from hpclm.model import count
from hpclm.node.gpus import KINDS
from hpclm.planning import forecast


def test_fsdp2_shards_over_context_parallel_ranks_where_there_is_one_replica():
    run = config.load(None, ["engine.name=fsdp2", "job.gpus=4", "parallel.context=4", "engine.precision=bf16"])
    planned = forecast.of(run, KINDS["H100"])
    assert planned.layout.data == 1 and planned.memory[0].weights == 4 * count.parameters(run.model) / 4
