"""What an optimizer that updates whole matrices sends, by hand."""

from hpclm.config import ModelConfig, OptimConfig
from hpclm.planning import layout, matrices


def test_pieces_of_a_matrix_are_gathered_and_those_of_its_update_sent_back():
    model, shape = ModelConfig(layers=1, hidden=64, heads=4), layout.Layout(tensor=2)
    [stage] = layout.stages(model, shape)
    found = matrices.exchange(model, shape, OptimConfig(name="muon"), 0, stage)
    # two processes share two rounds, of up and down with 4 C C values each and of qkv with 3 C C and out; half of a matrix is elsewhere
    assert found.sent == 2 * 2 * (4 + 3) * 64 * 64 / 2
