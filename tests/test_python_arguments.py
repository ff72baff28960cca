"""Values of a wrong or similar type, for every argument of the Python interface: as meant, or one line of ConfigError each."""

import datetime
import decimal
import enum
import fractions
import inspect
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from omegaconf import OmegaConf

import hpclm
from tests.interop import made

SHAPE = dict(made.SHAPE, vocab_size=257, context=64)
TINY = {"model": {"layers": 1, "hidden": 16, "attention": {"heads": 2}, "context": 16}}


class Word(str, enum.Enum):  # noqa: UP042 - not StrEnum, whose str() would hide a fault
    CPU = "cpu"


class Number(enum.IntEnum):
    THREE = 3


class Plain(enum.Enum):
    CPU = "cpu"


class BytesPath:
    def __fspath__(self):
        return b"cpu"


class WithoutRepr:
    def __repr__(self):
        raise RuntimeError("no repr")


class Lines:
    def __repr__(self):
        return "two\nlines"


class NotComparable:
    __hash__ = None

    def __eq__(self, other):
        raise RuntimeError("no ==")


ITSELF = {}
ITSELF["model"] = ITSELF
TEXTS = {"text": "cpu", "np.str_": np.str_("cpu"), "enum of text": Word.CPU}
WHOLE = {
    **{"int": 3, "np.int64": np.int64(3), "np.uint8": np.uint8(3), "array of no dimension": np.array(3)},
    **{"tensor of no dimension": torch.tensor(3), "IntEnum": Number.THREE, "whole float": 3.0},
}
NUMBERS = {
    **{
        "float": 0.5,
        "np.float32": np.float32(0.5),
        "np.float16": np.float16(0.5),
        "Fraction": fractions.Fraction(1, 2),
    },
    **{"Decimal": decimal.Decimal("0.5"), "tensor with a float": torch.tensor(0.5)},
}
BOOLS = {"np.bool_": np.True_, "bool": True, "tensor with a bool": torch.tensor(True)}
LISTS = {
    **{
        "list": ["cpu"],
        "tuple": ("cpu",),
        "array of text": np.array(["cpu"]),
        "object array": np.array(["cpu"], object),
    },
    **{"Index": pandas.Index(["cpu"]), "Series of text": pandas.Series(["cpu"]), "keys": {"cpu": 1}.keys()},
    **{"values": {1: "cpu"}.values(), "ListConfig": OmegaConf.create(["cpu"])},
}
ALL_LIKE = {**TEXTS, **WHOLE, **NUMBERS, **BOOLS, **LISTS}
WRONG = {
    **{"bytes": b"cpu", "bytearray": bytearray(b"cpu"), "memoryview": memoryview(b"cpu"), "complex": 1j, "set": {"cpu"}},
    **{"frozenset": frozenset(), "generator": (x for x in "ab"), "items": {1: 2}.items(), "object": object(), "type": int},
    **{"2D array": np.ones((3, 3)), "array of objects": np.array([None, object()], object), "complex array": np.ones(2) * 1j},
    **{"datetime64": np.datetime64("2020-01-01"), "tensor": torch.ones(3, 2), "tensor without data": torch.ones(2, device="meta")},
    **{"dtype": torch.float32, "path of bytes": BytesPath(), "DataFrame": pandas.DataFrame({"a": [1]}), "NA": pandas.NA},
    **{"NaT": pandas.NaT, "Timestamp": pandas.Timestamp("2020-01-01"), "plain enum": Plain.CPU, "enum class": Word},
    **{"date": datetime.date(2020, 1, 1), "no repr": WithoutRepr(), "two lines": Lines(), "not comparable": NotComparable()},
    **{"function": len, "Ellipsis": ..., "exception": ValueError("x"), "list of None": [None], "list of a list": [["cpu"]]},
    **{"settings": hpclm.settings("debug"), "mapping": {"a": 1}, "mapping of itself": ITSELF, "10^400": 10**400},
    **{"10^5000": -(10**5000), "DictConfig": OmegaConf.create({"seed": "???"}), "nan": float("nan"), "np.nan": np.float64("nan")},
    **{"inf": float("inf"), "-inf": float("-inf"), "Decimal NaN": decimal.Decimal("NaN"), "2^70": 2**70, "-1": -1, "empty": ""},
    **{"half a character": "\ud800", "a NUL": "a\0b", "lines": "a\nb", "too long": "x" * 5000, "an option": "--help"},
    **{"no YAML": "{", "an interpolation": "${nowhere}", "None as text": "None", "empty list": [], "list of empty text": [""]},
}  # fmt: skip
SAME_TYPE = {
    "text": [
        "empty",
        "half a character",
        "a NUL",
        "lines",
        "too long",
        "an option",
        "no YAML",
        "an interpolation",
        "None as text",
    ]
}
VALUES = {**ALL_LIKE, **WRONG}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arguments")
    made.run(folder / "run", SHAPE, tokenizer="bytes")
    return hpclm.open(folder / "run")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listing(*folders):
    return sorted(str(path) for folder in folders for path in folder.rglob("*"))


def tried(call, values):
    """What ``call`` gives for each value that it takes; the others are refused, in one line for each problem and with nothing
    written; no other error."""
    found = {}
    for name, value in values.items():
        before = listing(Path.cwd())
        try:
            found[name] = call(value)
        except hpclm.HpclmError as error:
            problems = getattr(error, "problems", [str(error)])
            assert problems and all(problem and "\n" not in problem for problem in problems), (name, problems)
            assert listing(Path.cwd()) == before, name
    return found


def accepted(call, values=VALUES):
    """The names of the values with which ``call`` returns."""
    return {*tried(call, values)}


ANY_TEXT = {*TEXTS, *SAME_TYPE["text"]}
TAKES = {
    "steps": {*WHOLE},
    "lr": {*WHOLE, *NUMBERS, "2^70"},
    "seed": {*WHOLE},
    "out": {*TEXTS, "too long", "an option", "no YAML", "None as text"},
    "device": {*TEXTS},
}


@pytest.mark.parametrize("argument", TAKES)
def test_keywords_of_settings_take_what_is_meant_and_refuse_the_rest_by_name(argument, here):
    assert accepted(lambda value: hpclm.settings("debug", **{argument: value})) == TAKES[argument]


def test_a_setting_that_is_given_twice_is_refused(here):
    with pytest.raises(hpclm.ConfigError, match=r"model\.attention\.heads is set twice"):
        hpclm.settings("small", {"model": {"attention": {"heads": 2}}, "model.attention.heads": 4})


def test_the_settings_and_changes_of_a_run_are_names_and_mappings(here):
    assert accepted(hpclm.settings) == {"settings"}
    assert accepted(lambda value: hpclm.settings("debug", value)) == set()
    assert hpclm.settings("debug", OmegaConf.create({"optim": {"lr": 0.5}, "seed": 7})).optim.lr == 0.5


KINDS = {
    "model.layers": {*WHOLE},
    "optim.lr": {*WHOLE, *NUMBERS},
    "model.bias": {*BOOLS},
    "name": {*TEXTS, *WHOLE, *NUMBERS, "-1", "2^70", "10^400", "too long", "an option", "no YAML", "None as text"},
    "log.sinks": {"empty list"},
    "train.callbacks": {"empty list"},
    "engine.device": {*TEXTS},
    "job.modules": {*LISTS, "empty list"},
    "job.env": {"mapping"},
}


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=[] if key in ("name", "model.bias") else pytest.mark.whole) for key in KINDS]
)
def test_settings_take_values_of_numpy_pytorch_pandas_and_omegaconf_as_they_are_meant(key, here):
    found = tried(lambda value: hpclm.settings("debug", {key: value}), VALUES)
    assert found.keys() == KINDS[key]
    for names, plain in ((WHOLE, 3), (NUMBERS, 0.5), (BOOLS, True), (LISTS, ["cpu"]), (TEXTS, "cpu")):
        if like := names.keys() & KINDS[key]:
            expected = hpclm.settings("debug", {key: plain})
            assert {name for name in like if found[name] != expected} <= {"whole float"}


GENERATE = {
    "prompt": {*TEXTS, *LISTS, *SAME_TYPE["text"], "empty list", "list of empty text"} - {"half a character"},
    "tokens": {*WHOLE},
    "temperature": {*WHOLE, *NUMBERS, "2^70"},
    "top_k": {*WHOLE},
    "top_p": {*NUMBERS},
    "stop": {*TEXTS, *LISTS, *SAME_TYPE["text"], "empty list"} - {"half a character", "empty"},
    "seed": {*WHOLE, "-1"},
    "batch": {*WHOLE},
}
"""The values that each argument takes."""


@pytest.mark.parametrize("argument", GENERATE)
def test_generate_takes_what_is_meant_and_refuses_the_rest_in_one_line(argument, run, here):
    def call(value):
        return run.generate(**{"prompt": "a", "tokens": 2, argument: value})

    wrong = {name: value for name, value in VALUES.items() if name not in GENERATE[argument]}
    assert accepted(call, wrong) == set()
    for names, plain in ((WHOLE, 3), (NUMBERS, 0.5), (LISTS, ["cpu"]), (TEXTS, "cpu")):
        like = [names[name] for name in names.keys() & GENERATE[argument]]
        if like := like[:2] if argument != "stop" else like:  # each loads the model
            assert [call(value) for value in like] == [call(plain)] * len(like)


@pytest.mark.whole
@pytest.mark.parametrize("argument", GENERATE)
def test_generate_takes_every_value_that_may_be_meant(argument, run, here):
    assert accepted(lambda value: run.generate(**{"prompt": "a", "tokens": 2, argument: value})) == GENERATE[argument]


def test_a_text_stops_generation_as_a_list_of_it_does(run):
    whole = run.generate("so", tokens=60, temperature=1.0, seed=7)
    stop = whole[20:23]
    assert run.generate("so", tokens=60, temperature=1.0, seed=7, stop=stop) == whole[: whole.index(stop)]
    with pytest.raises(hpclm.ConfigError, match="stop='' is empty"):
        run.generate("so", stop="")


REFUSES = {
    "evaluate": {
        "part": {*VALUES},
        "data": {*VALUES},
        "text": {*VALUES},
        "samples": {*VALUES} - {*WHOLE},
        "tokens": {*VALUES},
    },
    "report": {
        "output": {*VALUES} - ANY_TEXT,
        "samples": {*VALUES} - ANY_TEXT | {"half a character"},
    },
    "convert": {"dtype": {*VALUES}, "shard_gb": {*VALUES}, "allow_nan": {*VALUES}},
    "resume": {"steps": {*VALUES}, "resume_step": {*VALUES}},
    "cancel": {"now": {*VALUES} - {*BOOLS}, "wait": {*VALUES} - {*WHOLE, *NUMBERS, "2^70", "inf"}},
}
"""The values that each argument refuses: a name that is nowhere, or a target that is there, is refused too."""


@pytest.mark.parametrize("method, argument", [(method, name) for method in REFUSES for name in REFUSES[method]])
def test_methods_of_a_run_refuse_what_cannot_be_meant_in_one_line(method, argument, run, monkeypatch):
    monkeypatch.chdir(run.path.parent)
    others = {"convert": {"target": "run"}}.get(method, {})
    values = {name: VALUES[name] for name in REFUSES[method][argument]}
    assert accepted(lambda value: getattr(run, method)(**{**others, argument: value}), values) == set()


FUNCTIONS = {
    "open": (hpclm.open, set()),
    "Run": (hpclm.Run, {*TEXTS, *SAME_TYPE["text"]} - {"half a character", "a NUL"}),
    "train base": (lambda value: hpclm.train(value, "nowhere=1"), set()),
    "train change": (lambda value: hpclm.train("debug", value), set()),
    "train data": (lambda value: hpclm.train("debug", data=value), set()),
    "sweep values": (lambda value: hpclm.sweep("debug", {"optim.lr": value}, "nowhere=1"), set()),
    "sweep value": (lambda value: hpclm.sweep("debug", {"optim.lr": [value], "name": [value]}, "nowhere=1"), set()),
    "sweep settings": (lambda value: hpclm.sweep("debug", value), set()),
    "sweep parallel": (lambda value: hpclm.sweep("debug", {"seed": [1]}, "nowhere=1", parallel=value), set()),
    "compare": (hpclm.compare, set()),
    "report": (hpclm.report, set()),
    "report output": (lambda value: hpclm.report("x", output=value), set()),
    "train tokenizer": (lambda value: hpclm.train("debug", data="text.jsonl", tokenizer=value), set()),
    **{
        f"submit {name}": (lambda value, name=name: hpclm.submit("debug", **{name: value}), set())
        for name in inspect.signature(hpclm.submit).parameters.keys() - {"base", "changes"}
    },
}
QUICK = (
    "open",
    "Run",
    "train change",
    "submit time",
    "sweep value",
    "sweep values",
    "sweep settings",
    "compare",
    "report",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.whole) for name in sorted(FUNCTIONS)]
)
def test_functions_refuse_what_cannot_be_meant_in_one_line(name, here, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no queue
    Path("text.jsonl").write_text('{"text": "x"}\n')
    call, takes = FUNCTIONS[name]
    assert accepted(call) == takes
    assert [*here.iterdir()] == [here / "text.jsonl"]


def test_text_that_becomes_no_dataset_leaves_no_folder(here):
    Path("text.jsonl").write_text('{"words": "x"}\n')
    with pytest.raises(hpclm.ConfigError, match="has no key 'text'"):
        hpclm.train("debug", data="text.jsonl")
    assert [*here.iterdir()] == [here / "text.jsonl"]
