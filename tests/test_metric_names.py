"""Which names of metrics are hpclm's own, and which are reported under names of their own."""

import pytest

from hpclm.base.metric_names import is_reserved, reported


@pytest.mark.parametrize(
    "name, reserved",
    [
        ("loss", True),
        ("mine_seconds", True),
        ("mine/", True),
        ("qk_max", True),
        ("dead_experts/block0", True),
        ("expert_tokens", True),
    ]
    + [("mine", False), ("mine/loss", False), ("losses", False), ("expert_load", False)],
)
def test_names_of_hpclms_own_are_reserved(name, reserved):
    assert is_reserved(name) == reserved


def test_what_only_some_runs_have_and_what_users_report_is_reported_of_steps_alone():
    row = {"step": 3, "loss": 1.0, "step_seconds": 2.0, "mine": 0.5, "none": None, "text": "x", "flag": True}
    own = {"z_loss": 0.1, "qk_max": 7.0, "expert_entropy/block0": 0.9}
    assert [*reported(row | own).items()] == [*own.items(), ("mine", 0.5), ("none", None)]
    assert reported(row | {"part": "valid"}) == reported(row | {"tasks": {}}) == {}
