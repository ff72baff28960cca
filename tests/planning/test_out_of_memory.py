"""What is said when the memory is not enough."""

import re

import pytest

from hpclm import config
from hpclm.node.gpus import KINDS
from hpclm.planning import out_of_memory
from tests.runs import hpclm, losses

WORDS = ["model={vocab_size: 50304, layers: 24, hidden: 2048, heads: 16, context: 2048}", "engine.precision=bf16",
         "batch={global_size: 128, micro_size: 16}", "job.gpus=8"]  # fmt: skip


@pytest.mark.parametrize("engine, first", [
    ("OfTheGPU", "CUDA out of memory. Tried to allocate 2.00 GiB."),
    ("OfTheMachine", "DefaultCPUAllocator: can't allocate memory"),
])  # fmt: skip
def test_the_error_says_what_held_the_memory_and_what_would_need_less(engine, first, tiny, tmp_path):
    told = hpclm("train", *tiny("run", f"engine.name=tests.planning.hungry:{engine}"), check=93).stderr
    assert first in told and "see PyTorch's notes" not in told and "Warning" not in told
    assert 1 in losses(tmp_path / "run")
    assert re.search(r"the planner expected [\d.]+ [GM]iB: weights .*, activations ", told)
    assert first in (tmp_path / "run" / "log.txt").read_text()


def test_the_settings_that_are_named_change_one_thing_and_need_less():
    run, kind = config.load(None, WORDS), KINDS["A100"]
    changes = out_of_memory.smaller(run, kind)
    assert list(changes) == ["batch.micro_size=8", "engine.recompute=full", "engine.name=fsdp2 engine.zero_stage=3"]
    for settings, expected in changes.items():
        other = config.load(None, [*WORDS, *settings.split()])
        assert out_of_memory.peak(other, kind).total == expected < out_of_memory.peak(run, kind).total


def test_weights_that_are_sharded_within_nodes_can_be_sharded_over_all():
    run = config.load("configs/llama-7b.yaml", ["job.nodes=8", "job.gpus=8", "batch.micro_size=2"])
    assert "parallel.shard=null" in out_of_memory.smaller(run, KINDS["H100"])


def test_other_errors_pass_through(tiny):
    run = config.load(None, tiny())
    with pytest.raises(RuntimeError, match="of another kind"), out_of_memory.explained(run, None):
        raise RuntimeError("of another kind")
