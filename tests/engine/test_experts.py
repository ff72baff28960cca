"""Experts in all layouts: the same losses, norms, gradients, counts and biases as on one process."""

import pytest
import torch

from tests.parity import STYLES, errors, trained

EXPERTS = [
    *STYLES["llama"],
    *("engine.precision=fp32", "model.layers=3", "batch.micro_size=1", "optim.clip=0.5"),
    *(
        "model.experts=8",
        "model.experts_per_token=2",
        "model.expert_ffn=24",
        "model.mlp_pattern=[dense,experts,experts]",
    ),
]
BALANCE = {
    "none": [],
    "sequence and bias": ["model.router_score=sigmoid", "model.router_choice_bias=true", "model.balance_bias=0.01"]
    + ["model.balance_sequence=0.1", "model.shared_ffn=16", "model.router_groups=4", "model.router_top_groups=2"]
    + ["model.router_scale=1.5"],
    "step": ["model.balance_step=0.1", "model.router_z_loss=0.01", "model.mlp_bias=true", "model.router_bias=true"]
    + ["model.router_normalize=false", "model.activation=swiglu_clamped"],
    "micro-batch": ["model.balance_micro_batch=0.1"],
}
LAYOUTS = {
    "expert 2": (2, ["parallel.expert=2"]),
    "expert 4": (4, ["parallel.expert=4"]),
    "replicas": (2, []),
    "replicated experts": (4, ["parallel.expert=2"]),
    "ZeRO 1": (4, ["parallel.expert=2", "engine.zero_stage=1"]),
    "ZeRO 1 in groups": (4, ["parallel.expert=2", "engine.zero_stage=1", "parallel.shard=2"]),
    "fsdp2": (4, ["parallel.expert=2", "engine.name=fsdp2"]),
    "fsdp2 whole": (2, ["engine.name=fsdp2"]),
    "fsdp2 in groups": (4, ["parallel.expert=2", "engine.name=fsdp2", "parallel.shard=2", "engine.zero_stage=2"]),
    "tensor": (2, ["parallel.tensor=2"]),
    "tensor, whole experts": (2, ["parallel.tensor=2", "parallel.split_experts=false"]),
    "tensor and expert": (4, ["parallel.tensor=2", "parallel.expert=2"]),
    "tensor and whole experts shared out": (
        4,
        ["parallel.tensor=2", "parallel.expert=2", "parallel.split_experts=false"],
    ),
    "context": (2, ["parallel.context=2", "parallel.expert=2"]),
    "pipeline": (4, ["parallel.pipeline=2", "parallel.expert=2", "engine.name=pipelining"]),
    "recomputed": (2, ["parallel.expert=2", "engine.recompute=full"]),
    "deepspeed": (2, ["engine.name=deepspeed"]),
    "deepspeed 3": (2, ["engine.name=deepspeed", "engine.zero_stage=3"]),
    "fairscale": (2, ["engine.name=fairscale"]),
}


@pytest.mark.parametrize("balance", BALANCE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_computes_the_same(layout, balance):
    size, words = LAYOUTS[layout]
    words = [*EXPERTS, *BALANCE[balance], *words]
    alone = trained(1, *EXPERTS, *BALANCE[balance], steps=3)
    together = trained(size, *words, steps=3)
    assert together["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    assert together["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    assert together["evaluation"] == pytest.approx(alone["evaluation"], rel=1e-6)
    for mine, right in zip(together["reports"], alone["reports"], strict=True):
        assert mine == pytest.approx(right, rel=1e-5, abs=1e-6)
    assert together["tensors"].keys() == alone["tensors"].keys()
    for name, right in alone["tensors"].items():
        assert torch.allclose(together["tensors"][name], right, rtol=1e-3, atol=1e-5), name
    if together["gradients"]:
        assert max(errors(together["gradients"], alone["gradients"]).values()) < 1e-5
