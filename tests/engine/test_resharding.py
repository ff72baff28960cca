"""A checkpoint goes from any engine and layout to any other, and the run learns what one process learns."""

import pytest

from tests import ranks
from tests.engine import sharded
from tests.parity import STYLES, alone

WORDS = ["engine.precision=fp32", "batch.global_size=12", "batch.micro_size=1", "model.layers=3"]
FSDP2, FAIRSCALE, DEEPSPEED = (f"engine.name={name}" for name in ("fsdp2", "fairscale", "deepspeed"))
ZERO1, ZERO2, ZERO3 = (f"engine.zero_stage={stage}" for stage in (1, 2, 3))
SHARD, TENSOR, PIPELINE, CONTEXT = (f"parallel.{axis}=2" for axis in ("shard", "tensor", "pipeline", "context"))
MUON = ["optim.name=muon", "optim.newton_schulz_type=fp32", *STYLES["llama"]]
CHAINS = {
    "native": [(2, [ZERO1]), (1, []), (3, [ZERO1])],
    "sharded": [(3, [FSDP2]), (4, [FAIRSCALE, TENSOR]), (2, [FSDP2, ZERO2]), (1, [])],
    "hybrid": [(4, [FSDP2, SHARD]), (4, [ZERO1, SHARD]), (4, [FSDP2, "parallel.shard=4"]), (4, [FSDP2, SHARD])],
    "zero1": [(1, []), (4, [DEEPSPEED, ZERO1]), (3, [DEEPSPEED, ZERO1]), (1, [])],
    "zero3": [(1, []), (3, [DEEPSPEED, ZERO3]), (2, [DEEPSPEED, ZERO3]), (1, [])],
    "pipeline": [(1, []), (2, [DEEPSPEED, PIPELINE]), (2, ["engine.name=pipelining", PIPELINE]), (1, [])],
    "context": [(2, [CONTEXT]), (4, [FSDP2, CONTEXT]), (4, ["engine.name=pipelining", PIPELINE, CONTEXT, ZERO1]), (1, [])],
    "zero2": [(4, [ZERO1, TENSOR]), (4, [DEEPSPEED, ZERO2]), (2, [DEEPSPEED, ZERO2]), (2, [DEEPSPEED, "engine.zero_stage=0"])],
    "muon": [(3, [FSDP2]), (4, [ZERO1, TENSOR]), (4, ["engine.name=pipelining", PIPELINE, ZERO1]), (4, [FSDP2, SHARD]), (1, [])],
    "fairscale": [(3, [FAIRSCALE, ZERO2]), (4, [ZERO1, TENSOR]), (3, [FAIRSCALE]), (1, [ZERO1])],
}  # fmt: skip
OFTEN = ("native", "context", "sharded", "pipeline", "muon")
CASES = [pytest.param(name, marks=[pytest.mark.whole] * (name not in OFTEN)) for name in CHAINS]


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_goes_to_any_other_layout_and_back(tmp_path, name):
    own = [*WORDS, *(STYLES["llama"] if name == "fairscale" else []), *(MUON if name == "muon" else [])]
    losses = []
    for number, (size, words) in enumerate(CHAINS[name]):
        found = ranks.run(size, sharded.goes_on, tmp_path, 2 * number + 2, [*own, *words])
        assert all(other == found[0] for other in found)
        losses += found[0][1][1:]
    assert losses == pytest.approx(alone(*own)["losses"][: len(losses)], abs=1e-5)
