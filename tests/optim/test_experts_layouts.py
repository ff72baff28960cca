"""Muon with experts in all layouts: the same weights, and momentum that any other layout can resume from."""

import pytest
import torch

from tests.engine.test_experts import EXPERTS
from tests.parity import trained

WORDS = [
    *EXPERTS,
    "model.mlp_bias=true",
    "model.experts.shared_ffn=16",
    "optim.name=muon",
    "optim.newton_schulz_type=fp32",
]
WORDS += ["optim.clip=0.0"]
ZERO, FSDP2, EXPERT = "engine.zero_stage=1", "engine.name=fsdp2", "parallel.expert=2"
LAYOUTS = {
    "native": (2, [EXPERT]),
    "expert 4": (4, ["parallel.expert=4"]),
    "replicas of parts": (4, [EXPERT]),
    "ZeRO 1": (4, [EXPERT, ZERO]),
    "ZeRO 1 whole": (3, [ZERO, "batch.global_size=12"]),
    "ZeRO 1 in groups": (4, [EXPERT, ZERO, "parallel.shard=2"]),
    "ZeRO 1, tensor": (4, [ZERO, "parallel.tensor=2"]),
    "ZeRO 1, tensor and expert": (8, [EXPERT, ZERO, "parallel.tensor=2"]),
    "ZeRO 1, whole experts": (4, [ZERO, "parallel.tensor=2", "parallel.split_experts=false"]),
    "fsdp2": (4, [EXPERT, FSDP2]),
    "fsdp2 whole": (3, [FSDP2, "batch.global_size=12"]),
    "fsdp2 in groups": (4, [EXPERT, FSDP2, "parallel.shard=2"]),
    "fsdp2, tensor": (4, [FSDP2, "parallel.tensor=2"]),
    "tensor": (2, ["parallel.tensor=2"]),
    "tensor, whole experts": (2, ["parallel.tensor=2", "parallel.split_experts=false"]),
    "tensor and expert": (4, ["parallel.tensor=2", EXPERT]),
    "tensor, whole experts shared out": (4, ["parallel.tensor=2", EXPERT, "parallel.split_experts=false"]),
    "context": (2, ["parallel.context=2", EXPERT]),
    "pipeline": (4, ["parallel.pipeline=2", EXPERT, "engine.name=pipelining"]),
}
IN_CI = ("native", "ZeRO 1", "fsdp2", "pipeline")


def rows(names):
    return [pytest.param(name, marks=() if name in IN_CI else pytest.mark.whole, id=name) for name in names]


@pytest.mark.parametrize("layout", rows(LAYOUTS))
def test_every_layout_makes_the_updates_of_one_process_and_resumes_what_another_saved(layout):
    size, words = LAYOUTS[layout]
    first = [*WORDS, *words]
    alone_words = [*WORDS, *(word for word in words if word.startswith("batch."))]
    alone, half = trained(1, *alone_words, steps=4), trained(size, *first, steps=2)
    rest = trained(1, *alone_words, steps=4, first=2, saved=half)
    moved = trained(size, *first, steps=4, first=2, saved=half)
    straight = trained(size, *first, steps=4)
    assert moved["losses"] == straight["losses"][2:]
    for name, right in alone["tensors"].items():
        assert torch.equal(moved["tensors"][name], straight["tensors"][name]), name
        for other in (straight, rest):
            scale = right.abs().max().item()
            assert torch.allclose(other["tensors"][name], right, rtol=1e-4, atol=2e-5 * scale), name
    assert straight["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    assert rest["losses"] == pytest.approx(alone["losses"][2:], rel=1e-6)
