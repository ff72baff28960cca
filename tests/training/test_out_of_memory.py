"""What is said when the memory is not enough."""

import re
from dataclasses import replace

import pytest
import torch

from hpclm import config
from hpclm.node.gpus import KINDS
from hpclm.planning import forecast
from hpclm.planning.forecast import GIB
from hpclm.training import out_of_memory
from tests.runs import hpclm, losses

WORDS = ["model={vocab_size: 50304, layers: 24, hidden: 2048, heads: 16, context: 2048}", "engine.precision=bf16",
         "batch={global_size: 128, micro_size: 16}", "job.gpus=8"]  # fmt: skip


@pytest.mark.parametrize("engine, first", [
    ("OfTheGPU", "CUDA out of memory. Tried to allocate 2.00 GiB."),
    ("OfTheMachine", "DefaultCPUAllocator: can't allocate memory"),
])  # fmt: skip
def test_the_error_says_what_held_the_memory_and_what_would_need_less(engine, first, tiny, tmp_path):
    told = hpclm("train", *tiny("run", f"engine.name=tests.training.hungry:{engine}"), check=93).stderr
    assert first in told and "see PyTorch's notes" not in told and "Warning" not in told
    assert 1 in losses(tmp_path / "run")
    [held] = re.findall(r"in use on rank 0: weights ([\d.]+) MiB, gradients ([\d.]+) MiB, optimizer ([\d.]+) MiB", told)
    weights, gradients, optimizer = map(float, held)
    assert (
        gradients == 0
        and weights == pytest.approx(30080 * 4 / 2**20, abs=0.1)
        and optimizer == pytest.approx(2 * weights, abs=0.2)
    )
    assert re.search(r"the planner expected [\d.]+ [GM]iB: weights .*, activations ", told)
    assert first in (tmp_path / "run" / "log.txt").read_text()


def test_the_settings_that_are_named_fit_by_the_planner_and_change_one_thing_where_that_is_enough():
    run, kind = config.load(None, WORDS), KINDS["A100"]
    assert forecast.of(run, kind).room != "fits"
    found = out_of_memory.fitting(run, kind)
    assert found and all(each.forecast.room == "fits" for each in found)
    words = [" ".join(each.words) for each in found]
    assert any(re.fullmatch(r"batch.micro_size=\d", word) for word in words) and "engine.recompute=full" in words, words
    alone = next(each for each in found if each.words[0].startswith("batch.micro_size") and len(each.words) == 1)
    larger = config.load(None, [*WORDS, f"batch.micro_size={2 * alone.run.batch.micro_size}"])
    assert forecast.of(larger, kind).room != "fits"  # it is the largest


def test_weights_that_are_sharded_within_nodes_can_be_sharded_over_all():
    run = config.load("configs/llama-7b.yaml", ["job.nodes=8", "job.gpus=8", "batch.micro_size=2"])
    found = out_of_memory.fitting(run, replace(KINDS["H100"], memory=60))
    assert ("parallel.shard=null",) in [each.words for each in found]


def test_what_the_planner_underestimated_and_what_others_use_is_taken_off():
    run, kind = config.load(None, WORDS), KINDS["A100"]
    free = out_of_memory.fitting(run, kind)[0].forecast
    less = out_of_memory.fitting(run, kind, others=20 * GIB, more=1.2)[0].forecast
    assert less.memory[0].total * 1.2 + 20 * GIB <= kind.memory * GIB < free.memory[0].total * 1.2 + 20 * GIB
    assert out_of_memory.fitting(run, kind, others=kind.memory * GIB) == []


def test_the_largest_blocks_of_the_allocator_are_summed_up():
    used, free = dict(size=3 << 29, state="active_allocated"), dict(size=5 << 30, state="inactive")
    small = dict(size=512, state="active_allocated")
    assert out_of_memory.blocks([{"blocks": [used, free, small]}, {"blocks": [used]}]) == "2 x 1.50 GiB"
    assert out_of_memory.blocks([{"blocks": [small]}]) == ""


def test_weights_gradients_and_optimizer_state_are_told_apart():
    cpu = torch.device("cpu")
    before = out_of_memory.held_by_part(cpu)
    layer = torch.nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    held = {part: size - before[part] for part, size in out_of_memory.held_by_part(cpu).items()}
    assert held["weights"] == held["gradients"] == 40_000 and 80_000 <= held["optimizer"] < 80_100


def test_other_errors_pass_through(tiny):
    run = config.load(None, tiny())
    with pytest.raises(RuntimeError, match="of another kind"), out_of_memory.explained(run, None, torch.device("cpu")):
        raise RuntimeError("of another kind")
