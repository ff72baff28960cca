"""Optimizers of the user's own and experts: those of single values train in every layout, others are refused by name."""

import pytest

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.config.supports import SUPPORTS
from hpclm.engine.user_optimizers import check_optimizer
from tests.optim.test_user_optimizer import goes_through, named
from tests.parity import TINY

EXPERTS = ["model.experts.count=4", "model.experts.ffn=48", "model.experts.pattern=[dense,experts,experts]"]
EXPERT = "parallel.expert=2"


def checked(*words):
    """The settings of two processes, checked."""
    run = config.load(None, [*TINY, *EXPERTS, "engine.precision=fp32", "optim.eps=1e-8", *words])
    check_optimizer(run.for_engine(2), SUPPORTS[run.engine.name])


@pytest.mark.parametrize(
    "name, layouts",
    [
        ("Lion", [(2, [EXPERT, "engine.zero_stage=1"])]),
        pytest.param(
            "Counting",
            [
                (2, [EXPERT]),
                (4, [EXPERT, "parallel.tensor=2"]),
                (4, [EXPERT, "engine.zero_stage=1"]),
                (4, [EXPERT, "engine.name=fsdp2"]),
                (3, ["engine.name=fsdp2"]),
                (4, [EXPERT, "engine.name=pipelining", "parallel.pipeline=2"]),
            ],
            marks=pytest.mark.whole,
        ),
    ],
    ids=["ZeRO 1", "others"],
)
def test_an_update_of_single_values_trains_experts_alike_in_every_layout(name, layouts, tmp_path):
    goes_through(tmp_path, [*named(name), *EXPERTS, "optim.lr=1e-2"], layouts)


@pytest.mark.parametrize(
    "name, words, message",
    [
        (
            "WholeLamb",
            [],
            r"declares block0\.mlp\.experts\.up of the shape \[4, 48, 32\] in `matrices`.* optim\.name=muon",
        ),
        ("Factored", [], r"declares block0\.mlp\.experts\.up of the shape \[4, 48, 32\] in `matrices`"),
        (
            "Lamb",
            [EXPERT],
            r"parallel\.expert=2 divides the weights over processes, and optim\.name=\S+ does not declare",
        ),
    ],
)
def test_what_would_not_be_right_with_experts_is_refused_by_name(name, words, message):
    with pytest.raises(ConfigError, match=message):
        checked(*named(name), *words)
    checked(*named("Lion"), *words)


def test_an_update_of_whole_weights_trains_experts_on_one_process():
    checked(*named("Lamb"))
