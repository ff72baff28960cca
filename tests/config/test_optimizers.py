"""What the table of optimizers says of their state and of what their updates cost."""

from hpclm.config import OptimConfig
from hpclm.config.optimizers import OPTIMIZERS, MatrixCost, newton_schulz, optimizers_with, readers, row
from hpclm.parallel.placement import Placement

MATRIX = Placement((2, 2))


def test_newton_schulz_costs_three_products_of_each_step():
    """Of an 8 x 4 matrix: X X^T of 2 x 4 x 4 x 8, its square of 2 x 4^3, and a product with X as large as the first."""
    flops = 5 * (2 * 4 * 4 * 8 + 2 * 4**3 + 2 * 4 * 4 * 8)
    assert newton_schulz(OptimConfig(name="muon"), [(8, 4)]) == MatrixCost(flops, 2, 2 * 2 * (32 + 16))
    in_fp32 = OptimConfig(name="muon", newton_schulz_type="fp32", newton_schulz_steps=1)
    assert newton_schulz(in_fp32, [(8, 4)]) == MatrixCost(flops / 5, 4, 4 * 2 * (32 + 16))


def test_parts_of_a_matrix_cost_less_alone_than_as_stored():
    apart, together = (
        newton_schulz(OptimConfig(name="muon", split=split), [(4, 4), (8, 4)]) for split in (True, False)
    )
    assert apart.flops == 5 * (4 * 4**3 + 2 * 4**3 + 4 * 4 * 4 * 8 + 2 * 4**3)
    assert together.flops == 5 * (4 * 4 * 4 * 12 + 2 * 4**3) and together.scratch == apart.scratch == 4 * (48 + 16)


def test_state_and_settings_are_those_of_each_optimizer():
    assert {name: kind.bytes_per_parameter(MATRIX) for name, kind in OPTIMIZERS.items()} == {
        **dict.fromkeys(("adamw", "apex_adam", "cpu_adam"), 8),
        "muon": 4,
    }
    muon = OPTIMIZERS["muon"]
    assert [muon.bytes_per_parameter(weight) for weight in (Placement((2,)), Placement((2, 2), use="embedding"))] == [
        8,
        8,
    ]
    assert muon.bytes_per_parameter(Placement((4, 2, 2), stacked=True)) == 4
    assert muon.bytes_per_parameter(Placement((4, 2), stacked=True)) == 8
    assert readers("momentum") == ["muon"] and readers("eps") == [*OPTIMIZERS] and readers("lr") == []
    assert optimizers_with("nesterov") == "optim.name=muon|own"
    assert {kind.reference for kind in OPTIMIZERS.values()} == {None, "adamw"} and row("my:O").family == ""
    assert [name for name, kind in OPTIMIZERS.items() if kind.offloaded] == ["cpu_adam"]
    assert [name for name, kind in OPTIMIZERS.items() if kind.matrices] == ["muon"]
