"""Malformed or surprising settings files: each gives settings, or a message and exit code 64."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hpclm import cli, config
from hpclm.base.errors import ConfigError
from hpclm.config import fields

NUMBER = "1" * 100_000
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 12))
TEXTS = {
    "a list for a key": "? [a, b]\n: 1\n",
    "a mapping for a key": "model: {{a: 1}: 2}\n",
    "a list for a key further in": "job: {env: {? [a] : b}}\n",
    "a number of 100,000 digits": f"budget: {{steps: {NUMBER}}}\n",
    "a fraction of 100,000 digits": f"optim: {{lr: 0.{NUMBER}}}\n",
    "100,000 hexadecimal digits": f"seed: 0x{NUMBER}\n",
    "100,000 digits in quotes": f"budget: {{steps: '{NUMBER}'}}\n",
    "a number that is none": "seed: !!int x\n",
    "a float that is none": "optim: {lr: !!float x}\n",
    "nothing as a number": "seed: !!int ''\n",
    "bytes that are none": "name: !!binary x\n",
    "a tag of Python's": "name: !!python/object/apply:os.system [ls]\n",
    "a set": "model: !!set {layers}\n",
    "an alias of what it is in": "model: &m {layers: *m}\n",
    "a list in itself": "model: &m [*m]\n",
    "aliases that multiply": BOMB,
    "merges that multiply": MERGES,
    "very deep": "[" * 20_000,
    "very deep and closed": "a: " + "[" * 600 + "]" * 600 + "\n",
    "a list": "- a\n",
    "a zero byte": "name: a\0b\n",
    "a zero byte, spelled": 'out: "a\\0b"\n',
    "half a character": 'out: "\\ud800"\n',
    "two documents": "seed: 1\n---\nseed: 2\n",
    "a key of no text": "1: 2\n",
    "a null key": "~: 2\n",
    "a date as a key": "2024-01-01: 2\n",
    "nothing but tabs": "\t\t",
    "an unknown resolver": "name: ${nowhere:x}\n",
    "settings that stand for each other": "name: ${out}\nout: ${name}\n",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_settings_file_that_cannot_be_is_refused_with_its_path(text, tmp_path, capfd):
    (tmp_path / "odd.yaml").write_text(text)
    assert cli.main(["config", str(tmp_path / "odd.yaml")]) == 64
    said = capfd.readouterr().err
    assert f"{tmp_path}/odd.yaml" in said and "Traceback" not in said and "\x1b" not in said and len(said) < 4000


MEANT = {
    "seed: 007": {"seed": 7},
    "seed: 010": {"seed": 10},
    "seed: 0x10": {"seed": 16},
    "seed: 1e3": {"seed": 1000},
    "seed: '5'  # five": {"seed": 5},
    "\ufeffseed: 5\r\n": {"seed": 5},
    "? seed\n: 5": {"seed": 5},
    "budget: {tokens: 100e3}": {"budget.tokens": 100_000},
    "name: yes": {"name": "yes", "out": "runs/yes"},
    "name: ???\nout: x": {"name": "???", "out": "x"},
    "job: {time: 12:30}": {"job.time": "12:30"},
    "job: {time: null, mem: ~, partition: }": {},
    "budget: {steps: Null}": {},
    "model: {bias: OFF}": {"model.bias": False},
    "model: {bias: 0}": {"model.bias": False},
    "model: '{layers: 3}'": {"model.layers": 3},
    "job: {modules: '[a, 1.10, on]'}": {"job.modules": ["a", "1.10", "on"]},
    "job.env.A: on\njob: {env: '{B: 007}'}": {"job.env": {"A": "on", "B": "007"}},
    "job: {setup: ['${', 'echo ${x}'], env: {A: '${'}}": {"job.setup": ["${", "echo ${x}"], "job.env": {"A": "${"}},
    "seed: ${batch.global_size}": {"seed": 32},
    "data: {train: [a, b], valid: '${data.train}'}": {"data.train": ["a", "b"], "data.valid": ["a", "b"]},
    "optim: {groups: [{match: 1.10, lr: 1e-1}]}": {"optim.groups": [{"match": "1.10", "lr": 0.1}]},
    "optim: {name: 'a.b:C', arguments: {a: 1e-8, b: 007, c: yes, d: null, e: 'null', f: '1e-8', g: [1_0, .inf], h: true}}": {
        "optim.name": "a.b:C",
        "optim.arguments": {
            **{
                "a": 1e-8,
                "b": "007",
                "c": "yes",
                "d": None,
                "e": "null",
                "f": "1e-8",
                "g": [10, float("inf")],
                "h": True,
            }
        },
    },
    "": {},
    "---\n# nothing\n": {},
}


@pytest.mark.parametrize("text, values", MEANT.items(), ids=MEANT)
def test_a_value_is_what_its_field_reads_in_its_text(text, values, tmp_path):
    (tmp_path / "odd.yaml").write_text(text)
    run = config.load(tmp_path / "odd.yaml")
    assert {key: mine for key, (mine, _) in run.diff().items()} == {"out": "runs/run"} | values
    config.dump(run, tmp_path / "odd.yaml")
    assert config.load(tmp_path / "odd.yaml") == config.changed(run, []) == run


REFUSED = {
    "seed: 12:30\noptim: {lr: x}\nseed: 1": [
        "key 'seed' appears twice, in lines 1 and 3 (FILE:3)",
        "seed='12:30' must be a whole number (FILE:1)",
        "optim.lr='x' must be a number (FILE:2)",
    ],
    "batch:\n  rampup:\n  - 1.5\n  - ~\n  - 3": [
        "batch.rampup[0]=1.5 must be a whole number (FILE:3)",
        "batch.rampup[1] must be a whole number, not empty (FILE:4)",
    ],
    "budget: {steps: 'null'}": ["budget.steps='null' must be a whole number or null (FILE:1)"],
    "model: {bias: y}": ["model.bias='y' must be true or false (FILE:1)"],
    "model: {layers: 1__0}": ["model.layers='1__0' must be a whole number (FILE:1)"],
    "optim: {lr: inf}": ["optim.lr=inf must be at least 0 and finite"],
    "seed: !!int 5": ["tags (!!int) are not supported; leave it out (FILE:1)"],
    "name: ~": ["name must be text, not empty; if you mean the word ~, put quotes around it (FILE:1)"],
    "job: {options: {A:1}}": [
        "job.options has no space after the ':' of A, which YAML needs (value not shown) (FILE:1)"
    ],
    "name: ${": ["name='${': ${...} is not complete; write \\${ for these characters (FILE:1)"],
    "model:\n\tlayers: 3": [
        "settings file FILE:2 is not YAML: while scanning for the next token, found character '\\t' that cannot start any token; "
        "indent with spaces, not with a tab"
    ],
    "seed: 1\n---\nseed: 2": [
        "settings file FILE:2 is not YAML: expected a single document in the stream, but found another document"
    ],
}


@pytest.mark.parametrize("text, problems", REFUSED.items(), ids=REFUSED)
def test_every_problem_of_a_file_is_reported_with_its_line(text, problems, tmp_path):
    (tmp_path / "odd.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        config.load(tmp_path / "odd.yaml")
    assert [problem.replace(str(tmp_path / "odd.yaml"), "FILE") for problem in error.value.problems] == problems


def test_every_reference_that_stands_for_nothing_is_reported(tmp_path):
    (tmp_path / "odd.yaml").write_text("seed: ${nope}\nbudget: {steps: '${gone}'}\nname: a-${nada}\n")
    with pytest.raises(ConfigError) as error:
        config.load(tmp_path / "odd.yaml")
    assert [problem.partition(":")[0] for problem in error.value.problems] == [
        "seed='${nope}'",
        "budget.steps='${gone}'",
        "name='a-${nada}'",
    ]


@pytest.mark.parametrize(
    "word",
    [f"budget.steps={NUMBER}", f"optim.lr={NUMBER}", "seed=!!int x", "batch.rampup=[[" + "[" * 5000, f"seed=0x{NUMBER}"]
    + [
        "name=\x1b[2J",
        "data.tokenizer_files={a: *b}",
        "job.options={? [a] : b}",
        "batch.rampup=[1, 2]",
        "batch.rampup=[x, y, z]",
    ]
    + [f"batch.rampup=[{'9' * 300}, 1, 1]", f"model.layers={'9' * 300}", f"batch.global_size={'9' * 330}"],
    ids=lambda word: word[:20],
)
def test_an_invalid_value_is_refused_with_a_short_message(word, capfd):
    assert cli.main(["config", word]) == 64
    said = capfd.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said and len(said) < 2000


def test_a_number_that_is_too_long_is_said_to_be_that(capfd):
    assert cli.main(["config", f"budget.steps={NUMBER}", f"optim.lr={NUMBER}"]) == 64
    assert capfd.readouterr().err.count(": it has 100000 digits, and at most 400 are allowed") == 2


def test_a_file_larger_than_any_settings_is_not_read(tmp_path):
    with (tmp_path / "huge.yaml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"huge.yaml cannot be read: larger than 4.2 MB"):
        config.load(tmp_path / "huge.yaml")


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**63, 10**300, 10**4000]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(
        ["", "${seed}", "${oc.env:HOME}", "a:b", "1e999", "\x1b[31m", "a\nb", "../..", "a\0b", "nan", "1_000"]
    ),
)
TREES = st.recursive(
    ODD,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(fields.keys()), TREES, min_size=1, max_size=4))
def test_any_value_of_any_setting_gives_settings_or_problems(tmp_path_factory, values):
    file = tmp_path_factory.mktemp("odd") / "odd.yaml"
    try:
        file.write_text(yaml.safe_dump(values, allow_unicode=False))
    except (yaml.YAMLError, ValueError):  # not even YAML can say it
        return
    try:
        made = config.load(file)
    except ConfigError as error:
        assert error.problems and all(error.problems)
    else:
        config.dump(made, file)
        assert config.load(file) == made


@settings(max_examples=50)
@given(st.sampled_from(fields.keys()), TREES.map(json.dumps) | st.text(max_size=10))
def test_any_word_gives_settings_or_problems(key, value):
    try:
        config.load(None, [f"{key}={value}"])
    except ConfigError as error:
        assert error.problems and all(error.problems)
