import torch

from hpclm.diagnostics.miniature import Measured, MiniatureRun
from hpclm.parallel.mesh import Compute, Mesh
from tests.engine.test_native import LLAMA, settings


def test_experts_must_count_each_token_once():
    compute = Compute(torch.device("cpu"), torch.float32, Mesh())
    miniature = MiniatureRun(settings(LLAMA).for_engine(), compute, torch.zeros(1, 2, 4, 5), (False, False))
    plain, *others = [Measured({}, {}, {}, routed=tokens) for tokens in (32, 32, 24, 64)]
    text = "experts counted {} tokens of a step that has 32 for them"
    assert [miniature.lost_tokens(run, plain) for run in others] == ["", text.format(24), text.format(64)]
