"""A run that resumes in the same layout does bit for bit what one does that was never stopped."""

import math

import pytest
import torch

from tests import ranks
from tests.engine import sharded
from tests.parity import trained

LAYOUTS = {
    "native": [],
    "native-tp2": ["parallel.tensor=2"],
    "native-small-buckets": ["engine.bucket_mb=0.02"],
    "native1": ["engine.zero_stage=1"],
    "native1-tp2": ["engine.zero_stage=1", "parallel.tensor=2"],
    "fsdp2": ["engine.name=fsdp2"],
    "native1-shard2": ["engine.zero_stage=1", "parallel.shard=2"],
    "fsdp2-shard2": ["engine.name=fsdp2", "parallel.shard=2"],
    "fairscale": ["engine.name=fairscale"],
    "deepspeed0": ["engine.name=deepspeed", "engine.zero_stage=0"],
    "deepspeed1": ["engine.name=deepspeed", "engine.zero_stage=1"],
    "deepspeed2": ["engine.name=deepspeed", "engine.zero_stage=2"],
    "deepspeed3": ["engine.name=deepspeed", "engine.zero_stage=3"],
    "deepspeed-pp2": ["engine.name=deepspeed", "parallel.pipeline=2"],
    "pipelining-pp2": ["engine.name=pipelining", "parallel.pipeline=2"],
    "pipelining1-pp2": ["engine.name=pipelining", "parallel.pipeline=2", "engine.zero_stage=1"],
}


ALWAYS = ["native", "native1", "fsdp2", "deepspeed3", "deepspeed-pp2"]
STOPPABLE = ["native", "native1", "fsdp2", "fairscale", "deepspeed0", "deepspeed1", "deepspeed2", "deepspeed3"]


def each(names):
    """Some of them always, the rest with -m whole."""
    marked = [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.whole) for name in names]
    return pytest.mark.parametrize("name", marked)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.whole)])
@each(LAYOUTS)
def test_a_run_of_several_processes_that_goes_on_is_the_same_to_the_last_bit(tmp_path, name, processes):
    words = [*LAYOUTS[name], "batch.micro_size=1", "model.dropout=0.1", "engine.precision=fp32"]
    ((_, whole), *_) = ranks.run(processes, sharded.goes_on, tmp_path / "whole", 4, words)
    ((_, first), *_) = ranks.run(processes, sharded.goes_on, tmp_path / "parts", 2, words)
    ((_, second), *_) = ranks.run(processes, sharded.goes_on, tmp_path / "parts", 4, words)
    assert [loss.hex() for loss in first[1:] + second[1:]] == [loss.hex() for loss in whole[1:]]
    same(tmp_path / "whole/step-00000004", tmp_path / "parts/step-00000004")


@each(STOPPABLE)
def test_a_step_that_is_left_between_two_micro_batches_leaves_the_state_from_before(tmp_path, name):
    ranks.run(2, sharded.left, tmp_path, [*LAYOUTS[name], "batch.micro_size=1", "engine.precision=fp32"])
    same(tmp_path / "before/step-00000002", tmp_path / "after/step-00000002")


@pytest.mark.parametrize(
    "name", ["deepspeed3", *(pytest.param(n, marks=pytest.mark.whole) for n in LAYOUTS if n != "deepspeed3")]
)
def test_after_damage_that_one_rank_finds_as_it_loads_all_go_on_from_the_checkpoint_before(tmp_path, name):
    words = [*LAYOUTS[name], "batch.micro_size=1", "engine.precision=fp32"]
    ranks.run(2, sharded.goes_on, tmp_path, 1, words)
    ((_, first), _) = ranks.run(2, sharded.goes_on, tmp_path, 2, words)
    spoiled = tmp_path / "step-00000002/rank-00001.safetensors"
    content = bytearray(spoiled.read_bytes())
    content[-1] ^= 1
    spoiled.write_bytes(content)
    ((_, again), _) = ranks.run(2, sharded.goes_on, tmp_path, 2, words)
    assert [loss.hex() for loss in again] == [loss.hex() for loss in first]
    reason = (tmp_path / ".bad-step-00000002/REASON.txt").read_text()
    assert reason == "rank-00001.safetensors differs from what was saved (its hash is wrong)\n"


@each(["native", "fsdp2", "fairscale", "deepspeed1", "deepspeed3", "pipelining-pp2", "deepspeed-pp2"])
def test_nothing_of_a_state_stays_where_weights_alone_are_loaded_over_it(tmp_path, name):
    words = [*LAYOUTS[name], "batch.micro_size=1", "engine.precision=fp16", "scaler.window=1", "scaler.initial=16"]
    ((first, again), _) = ranks.run(2, sharded.begun_anew, tmp_path, words)
    assert again == first and len({scale for _, scale in first}) == 2


BF16 = {
    "deepspeed1-bf16": [*LAYOUTS["deepspeed1"], "engine.precision=bf16"],
    "deepspeed3-bf16-fp32": [*LAYOUTS["deepspeed3"], "engine.precision=bf16", "engine.gradients=fp32"],
}


@each([*LAYOUTS, *BF16])
def test_a_step_that_is_not_finite_changes_nothing(name):
    shape = ["engine.precision=fp32", "batch.micro_size=1", "model.layers=2"]
    saved = trained(1, *shape, steps=3)
    saved["tensors"]["model.norm.weight"][0] = 3e38
    found = trained(2, *shape, *{**LAYOUTS, **BF16}[name], steps=5, first=3, saved=saved)
    assert found["skipped"] == [True, True] and not any(map(math.isfinite, found["losses"]))
    assert found["scalars"]["optimizer_steps"] == 3
    assert found["tensors"].keys() == saved["tensors"].keys()
    for tensor, value in saved["tensors"].items():
        assert torch.equal(found["tensors"][tensor], value), tensor


def same(one, other):
    """Both checkpoints have the same tensors, to the last bit."""
    files = sorted(one.glob("rank-*"))
    assert files
    for file in files:
        assert file.read_bytes() == (other / file.name).read_bytes()
