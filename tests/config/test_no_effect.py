"""What has no effect, at the bounds; and what a run that has nothing left to train refuses."""

import pytest

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.config import no_effect, section
from hpclm.config.plan import Length


def run(*words):
    return config.load(None, ["data.source=synthetic", "batch={global_size: 8, micro_size: 2}", *words])


@pytest.mark.parametrize(
    "words, step, end, named",
    [
        (
            ["optim.lr=0.01"],
            10,
            10,
            "is at step 10 and its budget ends at step 10, so optim.lr=0.01 would have no effect",
        ),
        (["optim.lr=0.01", "seed=5"], 10, 10, "so seed=5, optim.lr=0.01 would have no effect"),
        (["model.attention.dropout=0.3"], 10, 10, "so model.attention.dropout=0.3 would have no effect"),
        (["optim.lr=0.01"], 9, 10, None),
        (["optim.lr=0.01"], 10, None, None),
        (["batch.micro_size=4"], 10, 10, None),
        (["log.every=5", "checkpoint.every=7", "evaluate.batches=3"], 10, 10, None),
        (["budget={steps: null, samples: 80}"], 10, 10, None),  # as long as before
        (["budget.steps=8"], 10, 8, "so budget.steps=8 would have no effect; raise the budget"),
    ],
)
def test_a_run_that_has_nothing_left_to_train_refuses_other_settings_of_training(words, step, end, named, tmp_path):
    config.dump(run(f"out={tmp_path}", "budget.steps=10"), tmp_path / "config.yaml")
    now = run(f"out={tmp_path}", "budget.steps=10", *words)
    if named is None:
        no_effect.check_finished(now, step, end)
        return
    with pytest.raises(ConfigError) as caught:
        no_effect.check_finished(now, step, end)
    assert named in str(caught.value)


def test_a_run_without_settings_to_compare_with_is_not_refused(tmp_path):
    no_effect.check_finished(run(f"out={tmp_path}", "optim.lr=0.01"), 10, 10)


@pytest.mark.parametrize(
    "words, steps, said",
    [
        (["stop_at=100", "optim.guard=skip_step", "profile.steps=[100,100]"], 100, []),
        (["stop_at=101"], 100, ["stop_at=101 has no effect: the run ends after 100 steps"]),
        (["exit_interval=2"], 1, ["exit_interval=2 has no effect: the run ends after 1 step"]),
        (["optim.guard=skip_step"], 64, []),
        (
            ["optim.guard=skip_step"],
            63,
            ["optim.guard=skip_step has no effect: it judges from about 64 steps on, and the run"],
        ),
        (["stop_at=101"], None, []),
    ],
)
def test_what_comes_with_the_last_step_has_an_effect_and_what_comes_after_it_has_none(words, steps, said):
    found = list(no_effect.by_facts(run(*words), length=Length(steps, None)))
    assert len(found) == len(said) and all(text.startswith(begin) for text, begin in zip(found, said, strict=True))


def test_an_epoch_that_ends_with_the_run_is_one():
    each = run("checkpoint.epochs=2")
    assert not list(no_effect.by_facts(each, length=Length(20, 160), per_epoch=80))
    assert list(no_effect.by_facts(each, length=Length(20, 160), per_epoch=81)) == [
        "checkpoint.epochs=2.0 has no effect: the run ends after 1.98 epochs"
    ]


@pytest.mark.parametrize(
    "words, processes",
    [
        (["batch.loss_norm=microbatch", "data.eod_mask_loss=true", "batch.micro_size=4"], 2),
        (["engine={name: fsdp2, defer_reduction: true}"], 2),
        (["engine.zero_stage=1", "parallel.shard=2"], 4),
        (["engine={name: deepspeed, gradients: fp32}"], 1),
        (["engine.zero_stage=0"], 1),
    ],
)
def test_what_processes_do_share_out_has_an_effect(words, processes):
    assert not list(no_effect.by_facts(run(*words), plan=run(*words).plan(processes)))


@pytest.mark.parametrize(
    "words",
    [
        ["model={context: 16, attention: {pattern: [window], window: 15}}"],
        ["scaler={consecutive: true, hysteresis: 2}", "engine.precision=fp16"],
        ["job={hostfile: /hosts, cluster: mpirun}"],
        ["checkpoint={every: 300, keep_best: 2}", "evaluate.every=100"],
        ["checkpoint={every: 300, keep_best: 2}", "evaluate.every=1"],
        ["checkpoint={every: 300, keep_every: 600}"],
    ],
)
def test_what_has_an_effect_is_not_named(words):
    assert not list(section.warnings(run(*words)))


def test_a_link_to_the_training_data_is_no_held_out_data(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "a")
    words = f"data={{source: indexed, train: [{tmp_path}/a], valid: [{tmp_path}/link]}}"
    [said] = section.warnings(config.load(None, [words]))
    assert said.startswith(f"data.valid has no effect as held-out data: data.train contains {tmp_path}/link too")
