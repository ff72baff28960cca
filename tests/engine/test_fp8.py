"""Training in FP8: near what bf16 learns, in every layout that bf16 can train in; what cannot be trained so is refused by name."""

import re

import pytest
import torch

from hpclm import config
from hpclm import engine as engines
from hpclm.base.errors import ConfigError
from hpclm.model.layers import ColumnLinear, RowLinear
from tests.engine import sharded
from tests.parity import TINY, alone, trained

WORDS = ["engine.precision=bf16", "model.layers=4", "batch.micro_size=2"]
ROWWISE, TENSORWISE = "engine.fp8=rowwise", "engine.fp8=tensorwise"
STEPS = 4
EXPERTS = [
    "model.experts.count=4",
    "model.experts.ffn=24",
    "model.experts.shared_ffn=32",
    "model.experts.pattern=[dense,experts]",
]
SAME = {
    "recomputed": (1, ["engine.recompute=full"], ROWWISE),
    "replicas": (2, [], ROWWISE),
    "stages": (2, ["engine.name=pipelining", "parallel.pipeline=2"], TENSORWISE),
    "zero bubble": (2, ["engine.name=pipelining", "parallel.pipeline=2", "parallel.schedule=zero_bubble"], ROWWISE),
}
"""Layouts that make the same sums: settings, and a recipe."""
NEAR = {
    "tensor": (2, ["parallel.tensor=2"], TENSORWISE),
    "tensor, zero bubble": (
        4,
        ["engine.name=pipelining", "parallel.pipeline=2", "parallel.tensor=2", "parallel.schedule=zero_bubble"],
        ROWWISE,
    ),
    "context": (2, ["parallel.context=2"], ROWWISE),
    "ZeRO 1": (4, ["engine.zero_stage=1", "parallel.tensor=2"], ROWWISE),
    "fsdp2": (2, ["engine.name=fsdp2"], TENSORWISE),
    "fsdp2, tensor": (4, ["engine.name=fsdp2", "engine.zero_stage=2", "parallel.tensor=2"], ROWWISE),
    "fairscale": (2, ["engine.name=fairscale"], ROWWISE),
    "fairscale 2": (2, ["engine.name=fairscale", "engine.zero_stage=2"], TENSORWISE),
    **{
        f"deepspeed {stage}": (2, ["engine.name=deepspeed", f"engine.zero_stage={stage}"], ROWWISE)
        for stage in range(4)
    },
    "deepspeed, stages": (2, ["engine.name=deepspeed", "parallel.pipeline=2"], ROWWISE),
    "experts": (2, ["parallel.expert=2", *EXPERTS], ROWWISE),
}
"""Others, as near as in bf16."""
OFTEN = ["replicas", "stages", "tensor", "fsdp2"]


def rows(table):
    return [
        pytest.param(*row, id=name, marks=[] if name in OFTEN else pytest.mark.whole) for name, row in table.items()
    ]


@pytest.mark.parametrize("size, words, recipe", rows(SAME))
def test_layouts_that_make_the_same_sums_learn_the_same_in_fp8(size, words, recipe):
    wanted, found = alone(*WORDS, recipe, steps=STEPS), trained(size, *WORDS, recipe, *words, steps=STEPS)
    assert found["losses"] == pytest.approx(wanted["losses"], abs=2e-6)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=2e-4)


@pytest.mark.parametrize("size, words, recipe", rows(NEAR))
def test_every_layout_learns_in_fp8_what_one_process_learns(size, words, recipe):
    shape = [word for word in words if word.startswith("model.")]
    wanted, found = alone(*WORDS, *shape, recipe, steps=STEPS), trained(size, *WORDS, recipe, *words, steps=STEPS)
    assert found["losses"] == pytest.approx(wanted["losses"], abs=0.03)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=0.1)
    assert found["evaluation"] == pytest.approx(wanted["evaluation"], abs=0.03)


@pytest.mark.parametrize("recipe", [ROWWISE, TENSORWISE])
def test_a_run_in_fp8_learns_nearly_what_it_learns_in_bf16(recipe):
    rounded, found = alone(*WORDS, steps=STEPS), alone(*WORDS, recipe, steps=STEPS)
    apart = [abs(mine - theirs) for mine, theirs in zip(found["losses"], rounded["losses"], strict=True)]
    assert 0 < max(apart) < 0.03
    assert found["evaluation"] == pytest.approx(rounded["evaluation"], abs=0.03)


def test_all_linear_layers_but_those_of_the_first_and_the_last_block_are_in_fp8():
    _, engine, _, _ = sharded.made([*WORDS, ROWWISE, *EXPERTS])
    linears = {name: m for name, m in engine.model.layers.named_modules() if isinstance(m, ColumnLinear | RowLinear)}
    in_fp8 = {name for name, module in linears.items() if module.fp8}
    assert in_fp8 == {name for name in linears if name.startswith(("block1.", "block2."))}
    assert {"block1.attention.qkv", "block1.mlp.shared.down", "block2.mlp.up"} <= in_fp8


@pytest.mark.parametrize("capability, answer", [((8, 0), "not NVIDIA A100"), ((9, 0), "")])
def test_a_gpu_that_cannot_multiply_fp8_is_refused_by_name(capability, answer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    settings = config.load(None, [*TINY, *WORDS, ROWWISE, "engine.device=cuda"]).for_engine()
    if not answer:
        engines.engine_class(settings, torch.device("cuda"))
        return
    with pytest.raises(ConfigError, match=f"engine.fp8=rowwise needs an NVIDIA GPU .* {answer}"):
        engines.engine_class(settings, torch.device("cuda"))


@pytest.mark.parametrize(
    "words, answer",
    {
        "model.hidden=60": "needs widths that are multiples of 16, and model.hidden is 60 wide",
        "model.ffn=48 parallel.tensor=2": "the MLP's inner width (model.ffn) on each of parallel.tensor=2 processes is 24 wide",
        "model.attention.kv_heads=1 model.attention.head_dim=4": "the projection to queries, keys and values is 24 wide",
        "model.attention.head_dim=2": "attention's output is 8 wide",
        "model.experts.count=4 model.experts.shared_ffn=40": "the shared experts' inner width (model.experts.shared_ffn) is 40 wide",
        "model.block=mine:Block": "engine.fp8=rowwise does not support model.block=mine:Block; it applies to gpt",
        "model.layers=2": "has no effect with model.layers=2: the first and the last block stay in bf16",
        "engine.precision=fp32": "needs engine.precision=bf16, not fp32",
    }.items(),
)
def test_what_fp8_cannot_multiply_is_refused_by_name(words, answer):
    with pytest.raises(ConfigError, match=re.escape(answer)):
        config.load(None, [*TINY, *WORDS, ROWWISE, *words.split()])


def test_fp8_where_auto_is_fp32_is_refused():
    settings = config.load(None, [*TINY, *WORDS, ROWWISE, "engine.precision=auto"]).for_engine()
    with pytest.raises(ConfigError, match="is fp32 here; set engine"):
        engines.engine_class(settings, torch.device("cpu"))
