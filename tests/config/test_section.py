"""A setting that is declared once is checked and documented, and rules between settings report everything at once."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args, get_origin

import pytest

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.config import RunConfig
from hpclm.config.fields import required, type_of
from hpclm.config.section import Rule, Section, all_fields, build_section
from hpclm.config.setting import Condition, declared, setting


@dataclass(frozen=True)
class Inner(Section, key="toy.inner"):
    """A section inside another."""

    size: int = setting(4, "Size.", at_least=1, at_most=8, unit="bytes")
    share: float = setting(0.5, "Share.", more_than=0, less_than=1, only_with="toy.mode=fast|own")

    rules: ClassVar[tuple[Rule, ...]] = (Rule(lambda inner: inner.size % 2, "{toy.inner.size} must be even"),)


@dataclass(frozen=True)
class Toy(Section, key="toy"):
    """A section."""

    mode: str = setting("slow", "Mode.")
    limit: float = setting(1.0, "Limit.", more_than=0, infinite=True)
    folder: str | None = setting(None, "Folder.", path=True)
    keep: int = setting(0, "Kept.", at_least=0, only_with="toy.folder", advice="use 0 to keep nothing")
    pair: tuple[int, int] = setting((1, 2), "Pair.", at_least=1)
    inner: Inner = Inner()

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(lambda toy: toy.keep > toy.inner.size, "{toy.keep} must be at most {toy.inner.size}"),
    )


@pytest.mark.parametrize("values, problems", [
    ({}, []),
    ({"toy.limit": float("inf")}, []),
    ({"toy.limit": float("nan")}, ["toy.limit=nan must be more than 0 and finite"]),
    ({"toy.inner.size": 9}, ["toy.inner.size=9 must be from 1 to 8"]),
    ({"toy.inner.size": 3}, ["toy.inner.size=3 must be even"]),
    ({"toy.inner.share": 1.0, "toy.mode": "fast"}, ["toy.inner.share=1.0 must be more than 0 and less than 1"]),
    ({"toy.pair": (0, 1)}, ["toy.pair=[0, 1] must each be at least 1"]),
    ({"toy.keep": -1, "toy.folder": "a"}, ["toy.keep=-1 must be at least 0; use 0 to keep nothing"]),
    ({"toy.keep": 2}, ["toy.keep=2 has no effect without toy.folder. Leave it out, or set toy.keep=0"]),
    ({"toy.inner.share": 0.1}, [
        "toy.inner.share=0.1 has no effect with toy.mode=slow; it applies to fast. Leave it out, or set toy.inner.share=0.5"
    ]),
    ({"toy.inner.share": 0.1, "toy.mode": "my.mod:Mode"}, []),
    ({"toy.keep": 5, "toy.folder": "a"}, ["toy.keep=5 must be at most toy.inner.size=4"]),
    # a rule that reads what is refused is skipped
    ({"toy.keep": 9, "toy.folder": "a", "toy.inner.size": 0}, ["toy.inner.size=0 must be from 1 to 8"]),
], ids=str)  # fmt: skip
def test_a_declaration_is_checked(values, problems):
    assert build_section(Toy, values, ())[1] == problems


def test_rules_that_read_a_value_that_could_not_be_read_are_skipped():
    assert build_section(Toy, {"toy.keep": 9, "toy.folder": "a"}, ["toy.inner.size"])[1] == []
    assert build_section(Toy, {"toy.keep": 9, "toy.folder": "a"}, ["toy.keep"])[1] == []
    with pytest.raises(ConfigError, match=r"toy\.inner\.size=0 must be from 1 to 8"):
        Inner(size=0)


def test_the_documentation_has_the_range_and_the_conditions():
    texts = {key: declared(entry).text for key, entry in all_fields(Toy, "toy")}
    assert texts["toy.inner.size"] == "Size. From 1 to 8."
    assert texts["toy.inner.share"] == "Share. More than 0 and less than 1. Only with toy.mode=fast or your own."
    assert texts["toy.keep"] == "Kept. At least 0. Only with toy.folder."


def test_a_condition_names_a_setting_and_values_that_it_can_have():
    for key, entry in all_fields(RunConfig):
        for condition in declared(entry).only_with + declared(entry).warn_without:
            kind = required(type_of(condition.key))
            assert kind is not None and condition.key != key
            choices = get_args(kind) if get_origin(kind) is Literal else condition.values
            assert condition.sign == ">" or {*condition.values} <= {*choices}, key
        assert entry.default is None or not declared(entry).problem(entry.default), key


@pytest.mark.parametrize("text, value, holds", [
    ("a.b", 0, False), ("a.b", 1, True), ("a.b", "none", False), ("a.b", [], False),
    ("not a.b", None, True), ("not a.b", "x", False), ("a.b>1", 1, False), ("a.b>1", 2, True),
    ("a.b!=x", "x", False), ("a.b!=x", "y", True), ("a.b=x|y: why", "y", True), ("a.b=x|own", "my.mod:F", True),
    ("a.b=x", "my.mod:F", False), ("a.b=true", True, True),
])  # fmt: skip
def test_a_condition_holds_or_does_not(text, value, holds):
    assert Condition.parse(text).holds(value) is holds


@pytest.mark.parametrize("words, problems", [
    (
        ["parallel={tensor: 2, pipeline: 2, expert: 2}", "engine.zero_stage=2", "model.experts.count=4"],
        [
            "engine 'native' does not support parallel.pipeline=2",
            "no engine supports all that these settings ask for: deepspeed lacks engine.zero_stage=2, parallel.expert=2; "
            "fairscale lacks parallel.pipeline=2, parallel.expert=2; fsdp2 lacks parallel.pipeline=2; pipelining lacks engine.zero_stage=2",
        ],
    ),
    (
        ["parallel={pipeline: 2, context: 2}", "engine.name=deepspeed", "optim.guard=skip_step"],
        [
            "engine 'deepspeed' does not support parallel.context=2; engines that do: pipelining",
            "engine 'deepspeed' does not support optim.guard=skip_step, since its updates are the library's; engines that do: pipelining",
        ],
    ),
    (
        ["parallel.shard=2"],
        [
            "engine 'native' does not support parallel.shard=2 at engine.zero_stage=0; it supports it at stage 1 without a pipeline; "
            "engines that do: native with engine.zero_stage=1, fsdp2"
        ],
    ),
])  # fmt: skip
def test_everything_that_stands_against_an_engine_is_said_once_with_the_engines_that_have_it_all(words, problems):
    with pytest.raises(ConfigError) as caught:
        config.load("debug", words)
    assert caught.value.problems == problems
