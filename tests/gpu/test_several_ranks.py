"""Layouts of several ranks, all on one device: over gloo, since NCCL refuses two ranks on one GPU. gloo sends nothing from one rank to
another there, so pipelines are left out."""

import functools
import importlib.util

import pytest

from hpclm.node import environment
from tests import parity, ranks
from tests.gpu.test_experts import EXPERTS

pytestmark = pytest.mark.gpu
DEEPSPEED = "engine.name=deepspeed"
LAYOUTS = {
    "tensor": (2, ["parallel.tensor=2"]),
    "context": (2, ["parallel.context=2"]),
    "ZeRO 1": (2, ["engine.zero_stage=1"]),
    "fsdp2, stage 2": (2, ["engine.name=fsdp2", "engine.zero_stage=2"]),
    "fsdp2, stage 3": (2, ["engine.name=fsdp2"]),
    "tensor and ZeRO 1": (4, ["parallel.tensor=2", "engine.zero_stage=1"]),
    "experts": (2, ["parallel.expert=2", *EXPERTS]),
    "experts, fsdp2": (4, ["engine.name=fsdp2", "parallel.expert=2", "batch.micro_size=2", *EXPERTS]),
    **{f"DeepSpeed {stage}": (2, [DEEPSPEED, f"engine.zero_stage={stage}"]) for stage in (1, 2, 3)},
}
COMPILED = ("tensor", "ZeRO 1", "fsdp2, stage 3", "experts")
"""Layouts whose blocks are compiled in bf16 on a GPU, as those of a run are; the others would compile much the same."""
STEPS = 6
TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2}


def learned(words, device):
    """As parity.train, of a rank that shares the first GPU."""
    environment.for_deepspeed(device, 0)
    return parity.train(words, STEPS, 0, None, device)


@functools.cache
def alone(*words):
    """What one process learns on a CPU."""
    [found] = ranks.run(1, learned, ["engine.precision=fp32", *words], "cpu")
    return found


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_share_a_gpu_learn_what_one_process_learns_on_a_cpu(layout, precision, device):
    size, words = LAYOUTS[layout]
    if DEEPSPEED in words and not importlib.util.find_spec("deepspeed"):
        pytest.skip("DeepSpeed is not installed")
    compiled = ["engine.compile=true"] if device.type == "cuda" and precision == "bf16" and layout in COMPILED else []
    found = ranks.run(size, learned, [f"engine.precision={precision}", *words, *compiled], device.type)
    expected, tolerance = alone(*(word for word in words if word.startswith("model."))), TOLERANCES[precision]
    for rank in found:
        assert rank["losses"] == found[0]["losses"] == pytest.approx(expected["losses"], rel=tolerance)
        assert rank["evaluation"] == pytest.approx(expected["evaluation"], rel=tolerance)
