"""Runs of models with experts, as a person starts them."""

from tests.forks import hpclm

EXPERTS = ["model.experts=4", "model.activation=swiglu", "model.balance_micro_batch=0.1", "budget.steps=4"]


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
            assert f"batch.micro_size was 4 and is now {size}, and model.balance_micro_batch" in refused(
                *command, *again
            )
        assert "batch.micro_size was 4" in refused("resume", run, "--cluster", "local", longer, change)
    hpclm("train", run / "config.yaml", longer, "batch.micro_size=auto", check=0)  # which keeps the 4
    hpclm("train", run / "config.yaml", "budget.steps=9", "batch.micro_size=2", "model.balance_micro_batch=0", check=0)


def test_micro_batches_that_a_start_would_choose_anew_are_refused_before_the_queue(tmp_path, tiny):
    hpclm("train", *tiny("run"), *EXPERTS, "batch.micro_size=auto", check=0)
    again = tmp_path / "run" / "config.yaml", "budget.steps=8", "--dry-run"
    hpclm("submit", *again, check=0)
    # micro-batches of 8 do not divide a batch of 8 over two replicas
    assert "batch.micro_size was 8 and is now 'auto'" in refused("submit", *again, "--gpus", "2")


def test_every_size_of_micro_batches_may_follow_another_without_such_a_loss(tmp_path, tiny):
    words = [*EXPERTS, "model.balance_micro_batch=0", "model.balance_sequence=0.1"]
    hpclm("train", *tiny("run"), *words, check=0)
    for size in (1, 2):
        again = tmp_path / "run" / "config.yaml", "budget.steps=8", f"batch.micro_size={size}", "--gpus", 2
        hpclm("submit", "--dry-run", *again, check=0)
