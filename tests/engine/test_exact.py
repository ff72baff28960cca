"""A run that goes on in the same layout does bit for bit what one does that was never stopped."""

import pytest

from tests import ranks
from tests.engine import sharded

LAYOUTS = {
    "native": [],
    "native-tp2": ["parallel.tensor=2"],
    "native-small-buckets": ["engine.bucket_mb=0.02"],
    "fsdp2": ["engine.name=fsdp2"],
    "fairscale": ["engine.name=fairscale"],
    "deepspeed0": ["engine.name=deepspeed", "engine.zero_stage=0"],
    "deepspeed1": ["engine.name=deepspeed", "engine.zero_stage=1"],
    "deepspeed2": ["engine.name=deepspeed", "engine.zero_stage=2"],
    "deepspeed3": ["engine.name=deepspeed", "engine.zero_stage=3"],
    "deepspeed-pp2": ["engine.name=deepspeed", "parallel.pipeline=2"],
    "pipelining-pp2": ["engine.name=pipelining", "parallel.pipeline=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_of_four_processes_that_goes_on_is_the_same_to_the_last_bit(tmp_path, name):
    words = [*LAYOUTS[name], "batch.micro_size=1", "model.dropout=0.1", "engine.precision=fp32"]
    ((_, whole), *_) = ranks.run(4, sharded.goes_on, tmp_path / "whole", 8, words)
    ((_, first), *_) = ranks.run(4, sharded.goes_on, tmp_path / "parts", 4, words)
    ((_, second), *_) = ranks.run(4, sharded.goes_on, tmp_path / "parts", 8, words)
    assert [loss.hex() for loss in first[1:] + second[1:]] == [loss.hex() for loss in whole[1:]]
    files = sorted((tmp_path / "whole/step-00000008").glob("rank-*"))
    for file in files:
        assert file.read_bytes() == (tmp_path / "parts/step-00000008" / file.name).read_bytes()
