"""What an optimizer that updates whole matrices sends, by hand."""

from hpclm.config import ModelConfig, OptimConfig
from hpclm.planning import layout, matrices


def test_pieces_of_a_matrix_are_gathered_and_those_of_its_update_sent_back():
    model, shape = ModelConfig.of({"layers": 1, "hidden": 64, "attention.heads": 4}), layout.Layout(tensor=2)
    [stage] = layout.stages(model, shape)
    found = matrices.exchange(model, shape, OptimConfig(name="muon"), 0, stage)
    # two processes share two rounds, of up and down with 4 C C values each and of qkv with 3 C C and out; half of a matrix is elsewhere
    assert found.sent == 2 * 2 * (4 + 3) * 64 * 64 / 2


def test_a_process_has_the_weights_of_the_experts_that_are_not_of_others():
    model = ModelConfig.of(
        {
            "layers": 1,
            "hidden": 64,
            "attention.heads": 4,
            "experts.count": 8,
            "experts.ffn": 32,
            "activation": "swiglu",
            "bias": False,
        }
    )
    shared_out = layout.Layout(data=4, expert=4)
    [stage] = layout.stages(model, shared_out)
    found = [(name, weight.matrices) for name, weight in matrices.of_experts(model, shared_out, stage)]
    every = [("block0.mlp.experts.up", [(32, 64)] * 2), ("block0.mlp.experts.down", [(64, 32)])]
    assert sorted(found) == sorted(every * 2)
    assert len(matrices.of_experts(model, layout.Layout(data=4), stage)) == 2 * 8


def test_experts_that_ranks_share_out_have_rounds_of_their_own():
    model = ModelConfig.of({"layers": 1, "hidden": 64, "attention.heads": 4, "experts.count": 8, "experts.ffn": 32})
    muon, shared_out = OptimConfig(name="muon"), layout.Layout(data=4, expert=4)
    [stage] = layout.stages(model, shared_out)
    both = matrices.exchange(model, shared_out, muon, 0, stage)
    rest = matrices._exchange(matrices.matrices(model, stage), shared_out, muon, 0)
    own = matrices._exchange(matrices.of_experts(model, shared_out, stage), shared_out.of_experts, muon, 0)
    assert own.flops > 0 and own.memory > 0
    assert both == matrices.ExchangeCost(rest.flops + own.flops, rest.sent + own.sent, max(rest.memory, own.memory))
