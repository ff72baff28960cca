"""Text settings keep what was typed, numbers read as numbers wherever they stand, and no key counts twice."""

import pytest

import hpclm
from hpclm import cli, config
from hpclm.base.errors import ConfigError
from hpclm.config import reading
from hpclm.launch import arguments

TYPED = [
    *(
        "3.10",
        "1.0",
        "0xff",
        "0b11",
        "1_2",
        "1_000",
        "0o17",
        "0123",
        "1e3",
        "1E3",
        "1.5e+3",
        ".5",
        "5.",
        "+.5",
        "+1",
        "-0",
    ),
    *(
        "-0.0",
        "1:30",
        "12:30:45",
        "2024-11-26",
        "2024-02-31",
        "2024_11_26",
        "2024-11-26T10:00:00",
        ".inf",
        "-.INF",
        ".nan",
    ),
    *("=", "<<", "12345678901234567890123", "0.10000000000000000001", "３.10", "n", "y", "None"),
]
"""Text that YAML readers take for numbers, dates or marks."""
WORDS = ["true", "True", "yes", "no", "on", "OFF"]
"""Words that YAML reads as true or false."""
NULLS = ["null", "~", "Null", ""]
KEYS = [text for text in TYPED if text not in ("<<", "n", "y")]


def of_file(tmp_path, text):
    (tmp_path / "typed.yaml").write_text(text)
    return config.load(tmp_path / "typed.yaml")


@pytest.mark.parametrize("typed", TYPED)
def test_text_settings_of_a_file_keep_what_was_typed(typed, tmp_path):
    run = of_file(
        tmp_path,
        f"name: {typed}\nout: out\njob:\n  conda: {typed}\n  modules:\n    - {typed}\n    - a\n  env: {{V: {typed}}}\n"
        f"  options: {{account: {typed}}}\ndata: {{blend: [a, {typed}x]}}\n",
    )
    assert (run.name, run.job.conda, run.job.modules) == (typed, typed, [typed, "a"])
    assert (run.job.env, run.job.options, run.data.blend) == ({"V": typed}, {"account": typed}, ["a", f"{typed}x"])
    config.dump(run, tmp_path / "config.yaml")
    assert config.load(tmp_path / "config.yaml") == run


@pytest.mark.parametrize("typed", TYPED)
def test_text_settings_of_a_command_line_and_of_a_sweep_keep_what_was_typed(typed):
    words = [f"name={typed}", f"job.env={{V: {typed}}}", f"job.env.W={typed}", f"job.modules=[{typed}, a]"]
    run = config.load(None, [*words, f"job.options={{account: {typed}}}", f"job.conda={typed}"])
    assert (run.name, run.job.conda, run.job.modules) == (typed, typed, [typed, "a"])
    assert (run.job.env, run.job.options) == ({"V": typed, "W": typed}, {"account": typed})
    first, second = arguments.variants([f"job.env.V={typed},x"])
    assert config.load(None, list(first.overrides)).job.env == {"V": typed}
    assert config.load(None, list(second.overrides)).job.env == {"V": "x"}


@pytest.mark.parametrize("typed", KEYS)
def test_names_in_mappings_keep_what_was_typed(typed, tmp_path):
    (tmp_path / "names.yaml").write_text(f"job: {{options: {{{typed}: x}}}}\n")
    with pytest.raises(ConfigError) as error:
        config.load(tmp_path / "names.yaml")
    assert f"job.options contains {typed!r}" in str(error.value)


@pytest.mark.parametrize("name", ["ON", "No", "Y", "NULL", "TRUE"])
def test_a_variable_may_be_called_as_a_word_that_yaml_reads_otherwise(name, tmp_path):
    assert of_file(tmp_path, f"job: {{env: {{{name}: a}}}}\n").job.env == {name: "a"}


@pytest.mark.parametrize("word", [*WORDS, *NULLS])
@pytest.mark.parametrize("shape", ["name: {}", "job: {{modules: [a, {}]}}", "job: {{env: {{V: {}}}}}"])
def test_a_word_that_yaml_reads_otherwise_is_never_respelled(shape, word, tmp_path):
    if not word and "[" in shape:  # [a, ] has one entry
        return
    if word in NULLS:
        with pytest.raises(ConfigError, match=r"(name|job.modules\[1\]|job.env.V) must be text, not empty"):
            of_file(tmp_path, shape.format(word) + "\n")
    for typed in [f"'{word or 'null'}'"] + [word] * (word in WORDS):
        run = of_file(tmp_path, shape.format(typed) + "\n")
        assert (word or "null") in (run.name, *run.job.modules, *run.job.env.values())


@pytest.mark.parametrize("word", ["job.modules=[~]", "job.modules=[[b], a]", "job.modules=[{a: b}]"])
def test_a_list_of_text_takes_only_text(word):
    with pytest.raises(ConfigError, match=r"job\.modules\[0\].* must be text.* \(command line\)"):
        config.load(None, [word])


def test_settings_printed_by_hpclm_config_read_back_as_typed(tmp_path, capfd):
    words = [f"job.env.V{number}={typed}" for number, typed in enumerate([*TYPED, *WORDS, " ", "#", "a: b", "'x'"])]
    assert cli.main(["config", "name=1.10", *words]) == 0
    (tmp_path / "printed.yaml").write_text(capfd.readouterr().out)
    assert config.load(tmp_path / "printed.yaml") == config.load(None, ["name=1.10", *words])


def test_text_settings_in_python_are_text():
    assert hpclm.settings("debug", {"name": "3.10", "job.modules": ["3.10"], "job.env": {"V": "1_0"}}).job.env == {
        "V": "1_0"
    }
    assert hpclm.settings("debug", {"name": 3.5, "job.env": {"V": 7}}).name == "3.5"
    for change in (
        {"name": True},
        {"name": None},
        {"job.env": {"V": None}},
        {"job.conda": False},
        {"job.modules": [True]},
    ):
        with pytest.raises(ConfigError, match=r"must be (a list of )?text"):
            hpclm.settings("debug", change)


def test_values_of_engine_extra_keep_their_form():
    with pytest.raises(ConfigError) as error:
        config.load(None, ["engine.extra={zero_optimization: {a: 5e8, b: 1_0, c: 1.50, d: [1.50, on]}}"])
    for form in ("zero_optimization.a: 5e8", "zero_optimization.b: 1_0", "zero_optimization.c: 1.50", "[1.5, 'on']"):
        assert form in str(error.value)


NUMBERS = {"8": 8, "1e1": 10, "1_0": 10, "0x10": 16, "'8'": 8, "8.0": 8, "+8": 8, "1.6e+1": 16, "'1_0'": 10}
"""Forms in which a setting that is a whole number may be written."""


@pytest.mark.parametrize("typed, number", NUMBERS.items(), ids=NUMBERS)
def test_a_list_of_numbers_takes_every_form_that_a_number_takes(typed, number, tmp_path):
    assert of_file(tmp_path, f"model: {{layers: {typed}}}\n").model.layers == number
    assert of_file(tmp_path, f"profile: {{steps: [{typed}, 20]}}\n").profile.steps == (number, 20)
    words = [f"batch.rampup=[{typed},{typed},{typed}]", f"batch.global_size={2 * number}", "batch.micro_size=1"]
    assert config.load(None, words).batch.rampup == (number,) * 3
    scaling = f"model: {{positions: rope, rope: {{scaling: {{rope_type: linear, factor: {typed}}}}}}}\n"
    assert of_file(tmp_path, scaling).model.rope.scaling["rope_type"] == "linear"


FRACTIONS = {"0.5": 0.5, ".5": 0.5, "5e-1": 0.5, "'5E-1'": 0.5, "0.5_0": 0.5, "0": 0.0, "0x0": 0.0}


@pytest.mark.parametrize("typed, number", FRACTIONS.items(), ids=FRACTIONS)
def test_a_list_of_fractions_takes_every_form_that_a_fraction_takes(typed, number, tmp_path):
    assert of_file(tmp_path, f"optim: {{momentum: {typed}, name: muon}}\n").optim.momentum == number
    assert of_file(tmp_path, f"optim: {{betas: [{typed}, {typed}]}}\n").optim.betas == (number, number)
    groups = of_file(tmp_path, f"optim: {{groups: [{{match: 1.0, lr: {typed}}}]}}\n").optim.groups
    assert groups[0]["match"] == "1.0" and reading.number(str(groups[0]["lr"])) == number
    if number:
        blend = of_file(tmp_path, f"data: {{blend: [{typed}, a, 0.5, b]}}\n").data
        assert blend.prefixes() == ["a", "b"]


@pytest.mark.parametrize("typed", ["1.5", "true", "x", "1K", "~", "[8]"])
def test_a_list_refuses_what_a_number_refuses(typed, tmp_path):
    for shape in ("model: {{layers: {}}}\n", "profile: {{steps: [{}, 20]}}\n"):
        with pytest.raises(ConfigError, match="must be a"):
            of_file(tmp_path, shape.format(typed))
    assert typed != "1K" or "1000, or 1e3" in str(_error(tmp_path, "profile: {steps: [1K, 2K]}\n"))


def _error(tmp_path, text):
    with pytest.raises(ConfigError) as error:
        of_file(tmp_path, text)
    return error.value


TWICE = {
    "seed: 1\nname: a\nseed: 2\n": "key 'seed' appears twice, in lines 1 and 3",
    "model:\n  layers: 3\n  hidden: 64\n  layers: 4\n": "key 'layers' appears twice, in lines 2 and 4",
    "model: {layers: 3, layers: 3}\n": "key 'layers' appears twice",
    "job:\n  env:\n    A: 1\n    'A': 2\n": "key 'A' appears twice, in lines 3 and 4",
    "optim:\n  groups:\n    - {match: a, lr: 1,\n       lr: 2}\n": "key 'lr' appears twice, in lines 3 and 4",
    "model:\n  layers: 3\nmodel.layers: 4\n": "model.layers is set twice, in lines 2 and 3",
    "model.layers: 4\nmodel: {layers: 4}\n": "model.layers is set twice, in lines 1 and 2",
    "job.env: {A: 1}\njob: {env: {A: 2}}\n": "job.env.A is set twice, in lines 1 and 2",
    "job.env.A: 1\njob:\n  env: {B: 1, A: 2}\n": "job.env.A is set twice, in lines 1 and 3",
    "job: {env.A: 1,\n  env: {A: 2}}\n": "job.env.A is set twice, in lines 1 and 2",
    "job:\n  account: a\n  options: {account: b}\n": "job.options.account is set twice, as job.options.account and as job.account, in lines 2 and 3",
    "engine:\n  extra:\n    zero_optimization: {stage: 1}\n    zero_optimization.stage: 2\n": (
        "engine.extra.zero_optimization.stage is set twice, in lines 3 and 4"
    ),
    "model: {<<: {layers: 3}}\n": "merge keys (<<) are not supported",
}


@pytest.mark.parametrize("text, answer", TWICE.items(), ids=TWICE)
def test_a_setting_that_a_file_has_twice_is_refused_with_both_lines(text, answer, tmp_path):
    assert answer in str(_error(tmp_path, text))


def test_what_a_file_sets_in_parts_is_kept_together(tmp_path):
    run = of_file(tmp_path, "model.layers: 4\nmodel: {hidden: 96}\njob.env: {A: 1}\njob: {env: {B: 2}}\n")
    assert (run.model.layers, run.model.hidden, run.job.env) == (4, 96, {"A": "1", "B": "2"})


def test_a_json_file_that_has_a_key_twice_is_refused(tmp_path):
    (tmp_path / "twice.json").write_text('{"a": {"b": 1, "b": 2}}')
    with pytest.raises(ConfigError, match="key 'b' appears twice"):
        reading.json_object(tmp_path / "twice.json")


LOOK_ALIKES = ["\u00a0seed", "seed\u200b", "\uff53eed", "\ufeffseed", "see\u200dd"]


@pytest.mark.parametrize("key", LOOK_ALIKES, ids=map(ascii, LOOK_ALIKES))
def test_a_key_that_only_looks_like_a_setting_is_shown_by_its_characters(key, tmp_path):
    said = str(_error(tmp_path, f"name: a\n{key}: 1\n"))
    assert ascii(key) in said and "only look like those of seed" in said
