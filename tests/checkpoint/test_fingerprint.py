"""What must not change when a run is resumed."""

import pytest

from hpclm.checkpoint.fingerprint import differences, fingerprint
from hpclm.config import ModelConfig


def test_a_setting_that_a_checkpoint_does_not_know_yet_had_its_default_then():
    now = fingerprint(ModelConfig(rope_base=5.0, positions="rope"), 1)
    older = {"model": {name: value for name, value in now["model"].items() if name != "norm_eps"}, "seed": now["seed"]}
    assert differences(older, now) == []
    del older["model"]["rope_base"]
    assert differences(older, now) == ["model.rope_base was 10000.0 and is now 5.0"]


def test_another_optimizers_state_is_refused_by_name_also_of_a_checkpoint_that_does_not_tell_it():
    was, now = (fingerprint(ModelConfig(), 1, optimizer=name) for name in ("apex_adam", "muon"))
    older = {name: value for name, value in was.items() if name != "optim"}
    assert differences(was, now) == differences(older, now) == ["optim.name was 'adamw' and is now 'muon'"]
    assert differences(now, was) == ["optim.name was 'muon' and is now 'adamw'"]
    assert differences(older, was) == differences(older, fingerprint(ModelConfig(), 1)) == []


def test_only_a_loss_over_each_micro_batch_keeps_the_micro_batches():
    def of(coefficient, size, experts=4):
        return fingerprint(ModelConfig(experts=experts, balance_micro_batch=coefficient), 1, micro_size=size)

    assert of(0.1, 2)["batch"] == {"micro_size": 2} and "batch" not in of(0.1, 0) | of(0.0, 2)
    [difference] = differences(of(0.1, 2), of(0.2, 4))
    assert difference.startswith("batch.micro_size was 2 and is now 4, and model.balance_micro_batch")
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
            ["data.prefix, data.train or data.blend: there were 1 training datasets and are now 2"],
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
