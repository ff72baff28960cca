import torch

from hpclm.config import ParallelConfig
from hpclm.diagnostics.miniature import CLIP, MAX_TOKENS, MIN_CONTEXT, Measured, MiniatureRun, _half_the_experts
from hpclm.parallel.mesh import Compute, Mesh
from tests.engine.test_native import LLAMA, settings


def test_experts_must_count_each_token_once():
    compute = Compute(torch.device("cpu"), torch.float32, Mesh())
    miniature = MiniatureRun(settings(LLAMA).for_engine(), compute, torch.zeros(1, 2, 4, 5), (False, False))
    plain, *others = [Measured({}, {}, {}, routed=tokens) for tokens in (32, 32, 24, 64)]
    text = "experts counted {} tokens in a step with 32 tokens for them"
    assert [miniature.lost_tokens(run, plain) for run in others] == ["", text.format(24), text.format(64)]


def of(memory, processes=1, **more):
    model = {**LLAMA, "hidden": 64, "context": 2048, "dropout": 0.1, "attention.dropout": 0.1, "layers": 9, **more}
    run = settings(model, batch=dict(global_size=64 * processes, micro_size=64))
    mesh = Mesh.build(0, processes, run.parallel)
    return MiniatureRun.of(
        run.for_engine(processes), Compute(torch.device("cpu"), torch.float32, mesh), memory, (False, False)
    )


def test_a_miniature_has_two_blocks_of_the_model_and_no_more_tokens_than_the_plain_way_can_compute():
    miniature = of(1e15)
    model, plan = miniature.settings.model, miniature.settings.plan
    assert (model.layers, model.hidden, model.context, model.dropout, model.attention.dropout) == (
        2,
        64,
        2048,
        0.1,
        0.0,
    )
    assert miniature.rows.shape == (1, 2, 32, 2049) and MAX_TOKENS == 2 * 32 * 2048
    assert (plan.global_size, plan.micro_size) == (64, 32) and miniature.settings.optim.clip == CLIP


def test_with_little_memory_a_miniature_has_fewer_and_shorter_samples_of_at_least_256_tokens():
    assert of(1.0).rows.shape == (1, 2, 1, MIN_CONTEXT + 1)
    assert MIN_CONTEXT < of(1e9).rows.shape[3] - 1 < 2048


def test_experts_are_halved_as_long_as_all_that_divides_them_still_does():
    model = settings({**LLAMA, "experts.count": 8, "experts.ffn": 16}).model
    assert _half_the_experts(model, ParallelConfig()).experts.count == 4
    assert _half_the_experts(model, ParallelConfig(expert=8)) is None
    assert _half_the_experts(model.replaced({"experts.count": 5}), ParallelConfig()) is None
    assert _half_the_experts(model.replaced({"experts.count": 4, "experts.per_token": 3}), ParallelConfig()) is None


def test_layers_of_every_kind_are_in_a_miniature():
    more = {
        "attention.pattern": ["window", "window", "full"],
        "attention.window": 1500,
        "experts.count": 4,
        "experts.ffn": 16,
    }
    model = of(1e15, **{"experts.pattern": ["dense", *["experts"] * 8]}, **more).settings.model
    assert (model.layers, model.attention.pattern) == (3, ["window", "window", "full"])
    assert (
        model.experts.pattern == ["dense", "experts", "experts"] and model.attention.window == 1024
    )  # half of its context
