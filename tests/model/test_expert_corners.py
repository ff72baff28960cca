"""Experts at the edges: none, one or all of the tokens, one expert, all of them chosen, widths that grouped_mm cannot take, every type."""

import pytest
import torch

from hpclm.config import EngineConfig, ModelConfig
from hpclm.model import gpt, weights
from hpclm.model.balance_losses import add_balance_losses
from hpclm.model.context import LayerContext, Reports
from hpclm.model.expert_mlp import ExpertAxes, ExpertMLP, Routing, grouped, one_by_one
from hpclm.model.stack import Stack
from hpclm.parallel.dispatch import route
from hpclm.parallel.mesh import SINGLE
from tests.engine.plain_experts import PlainGPT
from tests.engine.test_experts import BALANCE, EXPERTS, LAYOUTS, differences
from tests.parity import trained

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
COUNTS = {
    "uneven": [3, 0, 1, 7, 0, 5],
    "all to one": [0, 0, 9, 0, 0, 0],
    "one token": [0, 0, 0, 0, 0, 1],
    "no token": [0, 0, 0, 0, 0, 0],
}
ROUTING = {
    "some experts without a token": dict(experts=6, experts_per_token=2, tokens=5, favourites=[1, 4, 5]),
    "all tokens to the same experts": dict(experts=6, experts_per_token=2, tokens=7, favourites=[2, 3]),
    "one token": dict(experts=6, experts_per_token=2, tokens=1, favourites=[]),
    "one expert": dict(experts=1, experts_per_token=1, tokens=5, favourites=[]),
    "all experts for each token": dict(experts=4, experts_per_token=4, tokens=5, favourites=[]),
}


def with_gradients(multiply, dtype, counts, scaled):
    """The result of a product of some rows with their experts' matrices, and all gradients."""
    generator = torch.Generator().manual_seed(sum(counts))
    sizes = [(sum(counts), 16), (len(counts), 24, 16)]
    inputs = [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]
    factors = torch.rand(sum(counts), 1, generator=generator).to(dtype).requires_grad_() if scaled else None
    y = multiply(*inputs, torch.tensor(counts).cumsum(0).to(torch.int32), factors)
    inputs += [factors] * scaled
    y.backward(torch.randn(y.shape, generator=generator).to(dtype))
    return [y.detach(), *(x.grad for x in inputs)]


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_grouped_mm_and_the_loop_give_the_same(dtype, counts, scaled):
    by_groups, by_loop = (with_gradients(multiply, dtype, counts, scaled) for multiply in (grouped, one_by_one))
    for one, other in zip(by_groups, by_loop, strict=True):
        assert one.dtype == other.dtype == dtype
        assert torch.allclose(one.double(), other.double(), rtol=TOLERANCES[dtype] / 4, atol=TOLERANCES[dtype] / 4)
    # what reduces gradients over replicas needs one of each expert, also of those without a token
    for gradient in (by_groups[2], by_loop[2]):
        assert all((gradient[expert] == 0).all() == (count == 0) for expert, count in enumerate(counts))


def expert_mlp(width, experts, experts_per_token, favourites, **more):
    """Experts of a model with hidden size 16, whose choice bias prefers some of them."""
    config = ModelConfig.of(
        {
            "layers": 2,
            "hidden": 16,
            "attention.heads": 2,
            "norm": "rmsnorm",
            "activation": "swiglu",
            "bias": False,
            "mlp_bias": True,
            "init_std": 0.3,
            "experts.count": experts,
            "experts.per_token": experts_per_token,
            "experts.ffn": width,
            "experts.router_choice_bias": True,
            **more,
        }
    )
    table = weights.block(config, config.blocks[0]).parts["mlp"]
    mlp = ExpertMLP(config, config.experts, table, torch.Generator().manual_seed(3), SINGLE, ExpertAxes())
    with torch.no_grad():
        mlp.experts.up_bias.normal_(generator=torch.Generator().manual_seed(4))
        mlp.experts.down_bias.normal_(generator=torch.Generator().manual_seed(5))
        mlp.router.choice_bias[favourites] = 100.0
    return config, mlp


@pytest.mark.parametrize("routing", ROUTING.values(), ids=ROUTING.keys())
@pytest.mark.parametrize("width", [8, 10], ids=["grouped", "loop"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_any_choice_gives_the_results_and_gradients_of_a_plain_loop(dtype, width, routing):
    tokens = routing["tokens"]
    config, mlp = expert_mlp(width, **{name: value for name, value in routing.items() if name != "tokens"})
    assert mlp.experts.groups(dtype) == (width == 8)
    if dtype != torch.float32:  # as engines compute with copies
        for weight in mlp.parameters():
            weight.data = weight.data.to(dtype).float()
    x = torch.randn(tokens, 1, 16, generator=torch.Generator().manual_seed(6)).to(dtype).requires_grad_()
    mlp(x, LayerContext(None, None, None, None)).backward(torch.ones_like(x))
    weights = {f"block0.mlp.{name}": tensor.detach() for name, tensor in mlp.state_dict().items()}
    plain, exact = PlainGPT(weights, config), x.detach().double().squeeze(1).requires_grad_()
    y, (_, _, chosen) = plain.experts(exact, 0)
    y.backward(torch.ones_like(y))
    assert plain.margin > 1e-3
    used = {expert for choice in chosen for expert in choice}
    close = dict(rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert torch.allclose(mlp(x, LayerContext(None, None, None, None)).double().squeeze(1), y, **close)
    assert torch.allclose(x.grad.double().squeeze(1), exact.grad, **close)
    for name, weight in mlp.named_parameters():
        right = plain.weights[f"block0.mlp.{name}"].grad
        assert (weight.grad.double() - right).norm() <= 2 * TOLERANCES[dtype] * (right.norm() + 1), name
        if name.startswith("experts"):
            for expert in range(config.experts.count):
                assert (weight.grad[expert] == 0).all() == (expert not in used)


def test_loaded_weights_have_the_choice_biases_too():
    config = expert_mlp(8, 6, 2, [])[0]
    stack = Stack(config, gpt.layers(config, EngineConfig(), torch.float32, 0), torch.float32)
    given = {name: torch.rand(placement.shape) for name, placement in stack.placements.items()}
    stack.load_weights(given)
    for name, layer in stack.layers.items():
        for place, tensor in layer.state_dict().items():
            assert torch.equal(tensor, given[f"{name}.{place}"])


def test_rows_come_back_in_order_though_all_experts_have_as_many():
    x = torch.arange(12.0).view(6, 2)
    chosen = torch.tensor([[2, 0], [1, 2], [0, 1], [1, 0], [2, 1], [0, 2]])
    factors = torch.arange(12.0).view(6, 2)
    way = route(chosen, 3, SINGLE)
    rows, of_rows = way.send(x), way.send_factors(factors)
    assert way.counts.tolist() == [4, 4, 4]
    assert rows[:, 0].tolist() == [0, 4, 6, 10, 2, 4, 6, 8, 0, 2, 8, 10]
    assert of_rows.tolist() == [1, 4, 7, 10, 2, 5, 6, 9, 0, 3, 8, 11]
    assert torch.equal(way.give_back(rows * of_rows[:, None]), x * factors.sum(1, keepdim=True))


def test_scores_that_are_all_zero_have_a_finite_balance_loss():
    config = expert_mlp(8, 6, 2, [], **{"experts.router_score": "sigmoid", "experts.balance_sequence": 0.1})[0]
    logits = torch.full((3, 1, 6), -200.0, requires_grad=True)
    chosen = torch.tensor([0, 1]).expand(3, 1, 2)
    x, reports = torch.ones(3, 1, 16, requires_grad=True), Reports()
    metadata = LayerContext(None, None, None, None, weights=torch.ones(3, 1) / 3, reports=reports)
    routing = Routing(logits, logits.sigmoid(), chosen, torch.ones(3, 1, 2))
    add_balance_losses(x, metadata, config.experts, routing, None, (SINGLE, SINGLE)).sum().backward()
    assert reports.values["balance_loss_sequence"].isfinite()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("layout", ["expert 2", pytest.param("ZeRO 1", marks=pytest.mark.whole)])
def test_a_process_whose_experts_get_no_token_trains_on(layout):
    size, more = LAYOUTS[layout]
    words = [
        *EXPERTS,
        *BALANCE["sequence and bias"],
        "model.experts.router_groups=1",
        "model.experts.router_top_groups=1",
        "batch.micro_size=1",
    ]
    saved = trained(1, *words, steps=1)
    for name, tensor in saved["tensors"].items():
        if name.endswith("choice_bias"):
            tensor.copy_(torch.tensor([9.0, 9.0, 0, 0, 0, 0, 0, 0]))
    alone, together = (
        trained(count, *words, *layout_words, steps=3, first=1, saved=saved)
        for count, layout_words in ((1, []), (size, more))
    )
    everything = alone["expert_counts"][0][0][0]
    assert together["expert_counts"] == alone["expert_counts"] == [[[everything] * 2 + [0] * 6] * 2] * 2
    assert max(differences(together["tensors"], alone["tensors"]).values()) < 1e-6


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_experts_train_in_16_bits_as_in_32(precision):
    words = [*EXPERTS, *BALANCE["step"], "batch.micro_size=4"]
    words = [word for word in words if not word.startswith("engine.precision")]
    exact = trained(1, *words, "engine.precision=fp32", steps=2)
    # fp16 skips steps until its loss scale fits
    rounded = trained(
        1, *words, f"engine.precision={precision}", *["scaler.initial=64"] * (precision == "fp16"), steps=2
    )
    assert rounded["losses"] == pytest.approx(exact["losses"], rel=2e-2)
    assert rounded["norms"] == pytest.approx(exact["norms"], rel=5e-2)
