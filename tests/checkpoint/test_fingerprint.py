"""What must not change when a run is resumed."""

import pytest

from hpclm.checkpoint.fingerprint import differences, fingerprint
from hpclm.config import ModelConfig, OptimConfig


def test_another_network_is_refused_by_the_names_of_its_settings():
    was, now = (fingerprint(ModelConfig.of({"rope.base": base, "positions": "rope"}), 1) for base in (10000.0, 5.0))
    assert differences(was, now) == ["model.rope.base was 10000.0 and is now 5.0"]


def test_another_optimizers_state_is_refused_by_name():
    was, now = (fingerprint(ModelConfig(), 1, optim=OptimConfig(name=name)) for name in ("apex_adam", "muon"))
    assert differences(was, now) == ["optim.name was adamw and is now muon"]
    assert differences(was, fingerprint(ModelConfig(), 1)) == []


def test_other_arguments_of_a_users_optimizer_are_refused_by_name():
    optims = [OptimConfig(name="mine:Lion", arguments=words) for words in ({"betas": [0.9, 0.98]}, {"amsgrad": True})]
    assert differences(*(fingerprint(ModelConfig(), 1, optim=optim) for optim in optims)) == [
        "optim.arguments.amsgrad was null and is now true",
        "optim.arguments.betas was [0.9, 0.98] and is now null",
    ]


def test_only_a_loss_over_each_micro_batch_keeps_the_micro_batches():
    def of(coefficient, size, experts=4):
        return fingerprint(
            ModelConfig.of({"experts.count": experts, "experts.balance_micro_batch": coefficient}), 1, micro_size=size
        )

    assert of(0.1, 2)["batch"] == {"micro_size": 2} and "batch" not in of(0.1, 0) | of(0.0, 2)
    [difference] = differences(of(0.1, 2), of(0.2, 4))
    assert difference.startswith("batch.micro_size was 2 and is now 4, and model.experts.balance_micro_batch")
    assert not any(differences(of(a, 2), of(b, 4)) for a, b in ((0.0, 0.1), (0.1, 0.0), (0.0, 0.0)))
    assert differences(of(0.1, 2), of(0.1, 2)) == differences(of(0.1, 2), of(0.1, None)) == []


ONE = {"bin": "a", "idx": "b", "span": [0, 9], "content": None}


@pytest.mark.parametrize(
    "before, after, said",
    [
        ([ONE], [{**ONE, "content": "c"}], []),  # hashes may have been added since
        ([{**ONE, "content": "d"}], [{**ONE, "content": "c"}], ["the training dataset has other tokens"]),
        ([ONE], [{**ONE, "bin": "x", "y": 1}], ["the training dataset has other tokens, another y"]),
        (
            [ONE, ONE],
            [ONE, {**ONE, "span": [0, 8]}],
            ["training dataset 2 of 2 has another part in use (data.split, data.split_by)"],
        ),
        (
            [ONE],
            [ONE, ONE],
            ["data.prefix, data.train or data.blend: training datasets: 1 before, 2 now"],
        ),
    ],
)
def test_changed_datasets_are_named(before, after, said):
    saved, now = (
        {"data": {"datasets": each, "weights": [1], "tokenizer": {"x": id(each)}}} for each in (before, after)
    )
    assert differences(saved, now) == said
    now["data"]["weights"] = [2]
    assert differences(saved, now) == ["data.weights was [1] and is now [2]", *said]
