"""How weights are converted, and what is said of tensors that do not fit."""

import pytest
import torch

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.interop import rules
from hpclm.interop.run import ImportedWeights, finite
from tests.interop import made

CONFIG = ModelConfig.of(
    {**made.LLAMA, "attention.heads": 4, "hidden": 8, "attention.kv_heads": 2, "vocab_size": 5, "vocab_multiple": 8}
)
Q, K, V = torch.arange(16.0).view(8, 2), torch.arange(8.0).view(4, 2) + 100, torch.arange(8.0).view(4, 2) + 200


def test_the_fused_projection_has_the_queries_of_each_group_before_its_key_and_value():
    fused = rules.fused([Q, K, V], 2)
    assert fused[:, 0].tolist() == [0, 2, 4, 6, 100, 102, 200, 202, 8, 10, 12, 14, 104, 106, 204, 206]
    assert all(torch.equal(part, back) for part, back in zip((Q, K, V), rules.unfused(fused, 2, 2), strict=True))


@pytest.mark.parametrize(
    "rule, theirs",
    [
        (rules.separate("a", "qkv", CONFIG), [Q, K, V]),
        (rules.in_one("a", "b", CONFIG), [torch.cat([Q, K, V])]),
        (rules.reordered(rules.stacked("a", "qkv"), torch.tensor([1, 2, 3, 0])), [K, K + 50, V]),
        (rules.shifted(rules.same("a", "b")), [Q]),
        (rules.transposed(rules.same("a", "b")), [Q]),
        (rules.stacked("a", ["gate", "up"]), [K, V]),
    ],
)
def test_what_is_converted_there_and_back_is_the_same(rule, theirs):
    there = rule.split(rule.join(theirs))
    assert all(torch.equal(one, other) for one, other in zip(there, theirs, strict=True))


def test_each_rule_changes_what_it_says():
    assert torch.equal(rules.shifted(rules.same("a", "b")).join([Q]), Q + 1)
    assert torch.equal(rules.stacked("a", ["gate", "up"]).join([K, V]), torch.cat([K, V]))
    swapped = rules.reordered(rules.stacked("a", "qkv"), torch.tensor([1, 2, 3, 0])).join([Q, K, V])
    assert swapped[:, 0].tolist() == [2, 4, 6, 0, 10, 12, 14, 8, 102, 104, 106, 100, 200, 202, 204, 206]


def test_an_embedding_is_padded_here_and_must_have_the_rows_of_the_vocabulary():
    rule = rules.table("tokens.weight", "wte.weight", CONFIG)
    here = rule.join([torch.ones(5, 2)])
    assert here.sum(1).tolist() == [2.0] * 5 + [0.0] * 3 and rule.split(here)[0].shape == (5, 2)
    with pytest.raises(ConfigError, match=r"wte.weight has 6 rows, but model.vocab_size is 5"):
        rule.join([torch.ones(6, 2)])


def test_a_weight_that_the_other_format_lacks_must_have_its_value():
    rule = rules.absent("norm.weight", (3,), 1.0)
    assert rule.theirs == () and list(rule.split(torch.ones(3))) == [] and rule.join([]).tolist() == [1.0] * 3
    with pytest.raises(ConfigError, match=r"norm.weight is not 1 everywhere, and the other format has no such weight"):
        rule.split(torch.tensor([1.0, 1.0, 2.0]))


def test_tensors_that_are_missing_or_unexpected_are_named_up_to_five():
    rules.check_names(["a", "b"], {"b", "a"}, "x")
    with pytest.raises(ConfigError) as refused:
        rules.check_names(["a", "b"], [*"gfedch", "b"], "x")
    assert refused.value.problems == [
        "x has no a",
        "x has tensors that this network does not use: c, d, e, f, g and 1 more",
    ]


def test_there_are_tensors_for_all_layers():
    rules.check_depth(CONFIG, 2, "x")
    with pytest.raises(ConfigError, match="x has 1 tensors, too few for the 2 layers of its settings"):
        rules.check_depth(CONFIG, 1, "x")


def test_what_is_to_be_ignored_must_be_there_and_not_be_needed():
    assert rules.without({"a": 1, "b": 2}, ["a"], ["b"], "setting") == {"b": 2}
    with pytest.raises(ConfigError) as refused:
        rules.without({"a": 1, "b": 2}, ["c", "b"], ["b"], "setting")
    assert refused.value.problems == [
        "--ignore c: the source has no such setting",
        "--ignore b: hpclm needs this setting",
    ]


class Tensors(dict):
    """A source of tensors."""

    def names(self):
        return set(self)

    read = dict.__getitem__


@pytest.mark.parametrize(
    "change, said",
    [
        (
            lambda x: x[:, :7],
            r"x: their.block0.attention.out.weight gives block0.attention.out.weight of shape \(8, 7\), but the settings need",
        ),
        (lambda x: x.clone().fill_(float("nan")), "x: their.block0.attention.out.weight: values are not finite"),
        (lambda x: x.clone().fill_(float("inf")), "x: their.block0.attention.out.weight: values are not finite"),
    ],
)
def test_imported_tensors_have_their_shapes_and_finite_values(change, said):
    shapes = {name: placement.shape for name, placement in rules.placements(CONFIG).items()}
    source = Tensors({f"their.{name}": torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()})
    weights = ImportedWeights(CONFIG, source, [rules.same(name, f"their.{name}") for name in shapes], "x")
    shards = list(weights.tensors())
    assert [shard.name for shard in shards] == [f"model.{name}" for name in shapes] and weights.scalars() == {
        "optimizer_steps": 0
    }
    source["their.block0.attention.out.weight"] = change(source["their.block0.attention.out.weight"])
    with pytest.raises(ConfigError, match=said):
        list(weights.tensors())


@pytest.mark.parametrize(
    "value, fine", [(3e38, True), (float("inf"), False), (-float("inf"), False), (float("nan"), False)]
)
def test_one_value_that_is_not_finite_is_found(value, fine):
    assert finite(torch.tensor([0.0, value, 1.0])) == fine


def test_of_several_tensors_the_one_that_is_not_finite_is_named():
    name = "block0.mlp.up.weight"
    shapes = {name: placement.shape for name, placement in rules.placements(CONFIG).items()}
    theirs = {ours: ["gate", "up"] if ours == name else [ours] for ours in shapes}
    rows = shapes[name][0] // 2
    source = Tensors({ours: torch.ones(shape) for ours, shape in shapes.items() if ours != name})
    source |= {"gate": torch.ones(rows, 8), "up": torch.full((rows, 8), float("nan"))}
    weights = ImportedWeights(CONFIG, source, [rules.stacked(ours, names) for ours, names in theirs.items()], "x")
    with pytest.raises(ConfigError, match="x: up: values are not finite"):
        list(weights.tensors())
