"""Runs of models with experts, as a person starts them."""

import pytest

from hpclm import cli
from tests.forks import hpclm

EXPERTS = [
    "model.experts.count=4",
    "model.activation=swiglu",
    "model.experts.balance_micro_batch=0.1",
    "budget.steps=4",
]


def refused(*command):
    """What a command says that exits with 64."""
    return hpclm(*command, check=64).stderr


def test_a_resume_with_other_micro_batches_is_refused_where_the_loss_depends_on_them(tmp_path, tiny):
    run, longer = tmp_path / "run", "budget.steps=8"
    hpclm("train", *tiny("run"), *EXPERTS, check=0)
    for change in ("batch.micro_size=2", "batch.micro_size=8"):
        again = run / "config.yaml", longer, change
        for command in (["train"], ["submit", "--dry-run"], ["submit", "--cluster", "local"]):
            size = change.partition("=")[2]
            assert f"batch.micro_size was 4 and is now {size}, and model.experts.balance_micro_batch" in refused(
                *command, *again
            )
        assert "batch.micro_size was 4" in refused("resume", run, "--cluster", "local", longer, change)
    hpclm("train", run / "config.yaml", longer, "batch.micro_size=auto", check=0)  # which keeps the 4
    hpclm(
        "train",
        run / "config.yaml",
        "budget.steps=9",
        "batch.micro_size=2",
        "model.experts.balance_micro_batch=0",
        check=0,
    )


def test_micro_batches_that_a_start_would_choose_anew_are_refused_before_the_queue(tmp_path, tiny):
    hpclm("train", *tiny("run"), *EXPERTS, "batch.micro_size=auto", check=0)
    again = tmp_path / "run" / "config.yaml", "budget.steps=8", "--dry-run"
    hpclm("submit", *again, check=0)
    # micro-batches of 8 do not divide a batch of 8 over two replicas
    assert "batch.micro_size was 8 and is now 'auto'" in refused("submit", *again, "--gpus", "2")


def test_every_size_of_micro_batches_may_follow_another_without_such_a_loss(tmp_path, tiny):
    words = [*EXPERTS, "model.experts.balance_micro_batch=0", "model.experts.balance_sequence=0.1"]
    hpclm("train", *tiny("run"), *words, check=0)
    for size in (1, 2):
        again = tmp_path / "run" / "config.yaml", "budget.steps=8", f"batch.micro_size={size}", "--gpus", 2
        hpclm("submit", "--dry-run", *again, check=0)


WRONG = {
    "6 experts over 4": (
        4,
        ["model.experts.count=6", "parallel.expert=4"],
        "model.experts.count=6 must be a multiple of parallel.exp",
    ),
    "3 ranks over 2": (
        3,
        ["parallel.expert=2", "batch.global_size=12"],
        "parallel.expert=2 does not divide the 3 data-p",
    ),
    "more parts than ranks": (
        2,
        ["parallel.expert=4"],
        "parallel.expert=4 does not divide the 2 data-parallel ranks of 2",
    ),
    "tensor ranks": (
        4,
        ["parallel.expert=4", "parallel.tensor=2"],
        "does not divide the 2 data-parallel ranks of 4 process",
    ),
    "one process": (
        1,
        ["parallel.expert=2"],
        "parallel.expert=2 does not divide the 1 data-parallel ranks of 1 process",
    ),
    "too many a token": (
        1,
        ["model.experts.per_token=5"],
        "model.experts.per_token=5 must be from 1 to model.experts.count=4\n",
    ),
    "one a token, normalised": (1, ["model.experts.per_token=1"], "needs model.experts.router_normalize=false"),
    "none a token": (1, ["model.experts.per_token=0"], "model.experts.per_token=0 must be at least 1\n"),
    "groups": (
        1,
        ["model.experts.router_groups=3"],
        "model.experts.router_groups=3 must be a divisor of model.experts.count=4",
    ),
    "too few in groups": (
        1,
        ["model.experts.count=8", "model.experts.router_groups=4", "model.experts.per_token=3"],
        "model.experts.per_token=3 is more than the 2 experts of model.experts.router_top_groups=1 groups",
    ),
    "no experts": (
        2,
        ["model.experts.count=0", "parallel.expert=2"],
        "parallel.expert=2 has no effect with model.experts.count=0",
    ),
    "no top-k": (
        1,
        ["model.experts.count=0", "model.experts.per_token=1"],
        "model.experts.per_token=1 has no effect with model.ex",
    ),
    "deepspeed": (2, ["engine.name=deepspeed", "parallel.expert=2"], "engines that do: native, fsdp2\n"),
    "fairscale": (2, ["engine.name=fairscale", "parallel.expert=2"], "'fairscale' does not support parallel.expert=2"),
    "another block": (
        1,
        ["model.block=mine:Block"],
        "has no effect with model.block=mine:Block, which has its own MLP",
    ),
    "a bias that is not there": (
        1,
        ["model.experts.balance_bias=0.1"],
        "with model.experts.router_choice_bias=false: it moves that bias",
    ),
    "no layer": (1, ["model.experts.pattern=[dense]"], "no layer of model.experts.pattern=[dense] is of kind experts"),
    "an odd width": (2, ["model.experts.ffn=25", "parallel.tensor=2"], "or set parallel.split_experts=false"),
    "not a number": (
        1,
        ["model.experts.balance_sequence=nan"],
        "model.experts.balance_sequence=nan must be at least 0 and finite",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_experts_cannot_do_is_refused_before_the_queue(case, tiny, tmp_path, capsys):
    processes, more, answer = WRONG[case]
    words = [*tiny("run", "model.experts.count=4", "batch.micro_size=1"), *more]
    assert cli.main(["submit", "--dry-run", "--gpus", str(processes), *words]) == 64
    assert answer in capsys.readouterr().err
    if processes == 1:
        assert cli.main(["train", *words]) == 64
        assert answer in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
