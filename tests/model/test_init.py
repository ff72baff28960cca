"""The first values of weights: any part of a weight, at any time, is that part of the whole."""

import math

import pytest
import torch

from hpclm.config import EngineConfig, ModelConfig
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.engine.sharded_parameter import blocks as sharded_blocks
from hpclm.model import gpt, init
from hpclm.model.init import InitSpec
from hpclm.parallel.mesh import SINGLE, Axis
from hpclm.parallel.placement import Fused, Placement

PLACEMENTS = {
    "rows": Placement((24, 10), 0),
    "columns": Placement((24, 10), 1),
    "gated": Placement((24, 10), 0, Fused(1, (4, 12, 8))),
    "columns in two": Placement((24, 12), 1, Fused(1, (4, 8))),
    "everybody": Placement((23, 10)),
    "vector": Placement((24,), 0),
    "cube": Placement((24, 2, 5), 0),
    "last of a cube": Placement((24, 2, 6), 2),
}


def axis(size, rank):
    return Axis(size, rank, None, tuple(range(size)))


def whole(initial):
    return initial.parameter(SINGLE).detach()


@pytest.mark.parametrize("band", [1, 30, 70, 1 << 20])
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_any_run_of_what_a_process_holds_is_that_run_of_the_whole(placement, band, monkeypatch):
    monkeypatch.setattr(init, "BAND", band)
    initial = InitSpec(placement, std=0.5, seed=3)
    for tp in (SINGLE, axis(2, 0), axis(2, 1)):
        mine = torch.cat([piece_of(whole(initial), piece) for piece in placement.pieces(tp)], placement.dim or 0)
        assert torch.equal(initial.parameter(tp), mine)
        mine = mine.flatten()
        for begin in range(0, len(mine), 7):
            for length in (0, 1, 7, 50, len(mine) - begin):
                run = torch.full((min(length, len(mine) - begin),), torch.nan)
                initial.fill(run, begin, tp)
                assert torch.equal(run, mine[begin : begin + length]), (tp.rank, begin, length)


SPLIT = {
    "first dimension": Placement((4, 6, 10), data_ranks=4),
    "first, and rows over tensor ranks": Placement((4, 6, 10), 1, data_ranks=2),
    "first, and the gate and up rows": Placement((2, 8, 5), 1, Fused(1, (4, 4)), data_ranks=2),
    "columns": Placement((6, 8), data_dim=1, data_ranks=2),
    "columns, and rows over tensor ranks": Placement((6, 8), 0, data_dim=1, data_ranks=4),
    "rows, and columns over tensor ranks": Placement((8, 6), 1, data_dim=0, data_ranks=2),
    "vector": Placement((8,), data_ranks=2),
}


@pytest.mark.parametrize("band", [1, 30, 1 << 20])
@pytest.mark.parametrize("placement", SPLIT.values(), ids=SPLIT.keys())
def test_what_data_parallel_ranks_hold_of_a_weight_they_split_is_their_part_of_the_whole(placement, band, monkeypatch):
    monkeypatch.setattr(init, "BAND", band)
    initial = InitSpec(placement, std=0.5, seed=3)
    everything = InitSpec(Placement(placement.shape), std=0.5, seed=3).parameter(SINGLE).detach()
    for tp in (SINGLE, axis(2, 0), axis(2, 1)):
        for data_rank in range(5):
            part = everything.chunk(placement.data_ranks, placement.data_dim)[data_rank % placement.data_ranks]
            if placement.dim is not None and tp.size > 1:
                blocks = part.split(placement.parts, placement.dim)
                part = torch.cat([block.chunk(2, placement.dim)[tp.rank] for block in blocks], placement.dim)
            assert torch.equal(initial.parameter(tp, data_rank=data_rank), part)
            run = torch.empty(part.numel() - 3)
            initial.fill(run, 2, tp, data_rank)
            assert torch.equal(run, part.flatten()[2:-1])
            weight = ShardedParameter("w", torch.nn.Parameter(part), placement, data_rank=data_rank)
            for start, block in sharded_blocks(weight, 2, run, tp):
                place = tuple(slice(low, low + n) for low, n in zip(start, block.shape, strict=True))
                assert torch.equal(everything[place], block)


def piece_of(tensor, piece):
    return tensor[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size))]


def test_only_bands_that_a_run_has_a_part_of_are_drawn(monkeypatch):
    drawn, band = [], InitSpec._band
    monkeypatch.setattr(InitSpec, "_band", lambda self, number, rows: drawn.append(number) or band(self, number, rows))
    rows = init.BAND // 1024
    initial = InitSpec(Placement((20 * rows, 1024)), std=1.0)
    initial.fill(torch.empty(rows * 1024 + 2), (7 * rows + 3) * 1024 - 1, SINGLE)
    assert drawn == [7, 8]


def test_values_are_the_bands_own_and_have_the_spread_that_was_asked_for():
    values = whole(InitSpec(Placement((4096, 512), 0), mean=2.0, std=0.5, seed=1))
    assert values.mean().item() == pytest.approx(2.0, abs=1e-3) and values.std().item() == pytest.approx(0.5, abs=1e-3)
    first, second = values.split(2048)
    assert not torch.equal(first, second)
    assert torch.equal(whole(InitSpec(Placement((3,)), mean=1.0)), torch.ones(3))


@pytest.mark.parametrize(
    "more", [{}, {"positions": "sinusoidal", "tied": False, "activation": "swiglu", "attention.qk_norm": True}]
)
def test_a_layer_that_is_filled_later_is_the_layer_that_is_built_whole(more):
    config = ModelConfig.of(
        {"layers": 1, "hidden": 64, "attention.heads": 4, "context": 8, "vocab_size": 100, "embed_norm": True, **more}
    )
    for tp in (SINGLE, axis(2, 1)):
        for spec in gpt.layers(config, EngineConfig(), torch.float32, 5, tp):
            layer = spec.build()
            assert all(p.is_meta for p in layer.parameters()) and not any(b.is_meta for b in layer.buffers())
            filled = init.materialize_on(torch.device("cpu"), tp)(spec.name, layer).state_dict()
            built = spec.module(**spec.kwargs).state_dict()
            assert filled.keys() == built.keys() and all(torch.equal(filled[name], built[name]) for name in built)
            assert math.isfinite(sum(p.sum().item() for p in filled.values()))
