"""~ and $NAME in the settings that hold paths: one rule, the same for every verb, and nothing is expanded twice."""

import re
from operator import attrgetter
from pathlib import Path

import pytest

from hpclm import cli, config
from hpclm.base import paths
from hpclm.base.errors import ConfigError
from hpclm.config import RunConfig
from hpclm.config.fields import docs, keys, path_separator, type_of
from hpclm.launch.arguments import whole

PATH_SETTINGS = [key for key in keys() if path_separator(key) is not None]
NO_PATHS = (
    *("name", "data.source", "data.split", "data.tokenizer", "job.exclude", "job.nodelist"),
    *("job.options", "job.setup", "job.env"),
)
"""Settings whose explanation mentions files or folders, but that hold no path."""
COMPANIONS = (
    {"data.tokenizer_files": ["data.tokenizer=json"], "job.mounts": ["job.container=image"]}
    | {f"data.{part}": ["data.train=[a]"] for part in ("valid", "test")}
    | {"data.phases": ["data.order=per_dataset", "data.train=[a]"]}
    | {"engine.offload_folder": ["engine.name=deepspeed", "engine.zero_stage=3", "engine.offload=optimizer"]}
)
"""What else a setting needs."""
ALONE = ("job.venv", "job.conda", "data.prefix", "data.blend", "data.valid", "data.test", "data.phases")
"""Settings that others exclude."""


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DATA", "/data/mine")
    monkeypatch.setenv("QUOTED_HOME", "~/quoted")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("UNSET_NAME", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed_setting(key, path):
    """``path`` as the value of ``key``, as a command line has it."""
    value = {"=": f"law={path}", ":": f"{path}:/inside"}.get(path_separator(key), path)
    if key == "data.phases":
        return f"[{{from: 8, data.train: ['{value}']}}]"
    return f"['{value}']" if type_of(key) == list[str] else value


def path_of(run, key):
    """The path that setting ``key`` of a run has."""
    value = attrgetter(key)(run)
    if key == "data.phases":
        value = value[0]["data.train"]
    return (value[0] if isinstance(value, list) else value).removeprefix("law=").removesuffix(":/inside")


def write_all(path):
    """A settings file with ``path`` in every setting that takes one beside the others, and what these need."""
    lines = [f"{key}: {typed_setting(key, path)}" for key in PATH_SETTINGS if key not in ALONE]
    Path("paths.yaml").write_text("\n".join(lines) + "\n")
    return config.load("paths.yaml", ["data.tokenizer=json", *COMPANIONS["engine.offload_folder"]])


def test_every_setting_that_holds_a_path_is_declared_as_one():
    sections = {key.rpartition(".")[0] for key in keys()}
    explanations = {section: docs(type_of(section) if section else RunConfig) for section in sections}
    for key in keys():
        section, _, name = key.rpartition(".")
        explanation = explanations[section][name]
        if re.search(
            r"\b(path|paths|folder|folders|file|files|directory|directories|image|datasets?)\b", explanation, re.I
        ):
            text = type_of(key) in (str, str | None, list[str], dict[str, str])
            assert not text or path_separator(key) is not None or key in NO_PATHS, key
    assert not set(NO_PATHS) & set(PATH_SETTINGS)
    assert {"job.conda", "job.container", "job.venv", "data.prefix", "out"} <= set(PATH_SETTINGS)


FORMS = {
    "~/x": "{home}/x",
    "$DATA/x": "/data/mine/x",
    "${DATA}/x": "/data/mine/x",
    "${oc.env:DATA}/x": "/data/mine/x",
    "$QUOTED_HOME/x": "{home}/quoted/x",
    "./a~b/~": "./a~b/~",
    "a$/b": "a$/b",
    "\\$DATA/x": "$DATA/x",
    "./~/x": "{here}/~/x",
    "~root/x": "/root/x",
    "runs/${name}": "runs/run",
}


@pytest.mark.parametrize("typed, meant", FORMS.items(), ids=FORMS)
def test_a_path_means_the_same_in_every_setting_of_a_file_and_for_ever(typed, meant, surroundings):
    run = write_all(typed)
    paths_of_run = {key: path_of(run, key) for key in PATH_SETTINGS if key not in ALONE}
    assert set(paths_of_run.values()) == {meant.format(home=surroundings / "home", here=surroundings)}, paths_of_run
    config.dump(run, Path("config.yaml"))
    assert config.load("config.yaml") == run
    assert config.changed(run, []) == run


@pytest.mark.parametrize("key", PATH_SETTINGS)
def test_a_path_of_a_command_line_means_what_it_means_in_a_file(key, surroundings):
    run = config.load(None, [*COMPANIONS.get(key, []), f"{key}={typed_setting(key, '~/$DATA')}"])
    assert path_of(run, key) == f"{surroundings}/home//data/mine"


REFUSED = {
    "$UNSET_NAME/x": "environment variable UNSET_NAME",
    "${UNSET_NAME}": "environment variable UNSET_NAME",
    "$EMPTY/x": "EMPTY is empty",
    "${oc.env:UNSET_NAME}": "UNSET_NAME is not set",
    "~no-such-user/x": "no home folder ~no-such-user",
}


@pytest.mark.parametrize("typed, answer", REFUSED.items(), ids=REFUSED)
def test_an_unset_variable_or_an_unknown_user_is_refused_by_name_in_every_setting(typed, answer, surroundings):
    with pytest.raises(ConfigError) as error:
        write_all(typed)
    for key in set(PATH_SETTINGS) - set(ALONE):
        assert any(key in problem and answer in problem for problem in error.value.problems), key
    assert [path.name for path in surroundings.iterdir()] == ["paths.yaml"]


def test_what_is_for_a_shell_or_no_path_is_not_expanded():
    words = [
        "name=~",
        "job.env={A: ~/x $DATA}",
        "job.setup=['cd $DATA ~/x ${DATA}']",
        "job.notify=[$HOOK]",
        "data.eod=$DATA",
    ]
    run = config.load(None, [*words, "data.tokenizer=bytes"])
    assert (run.name, run.out, run.job.env, run.data.eod) == (
        *("~", "runs/~"),
        *({"A": "~/x $DATA"}, "$DATA"),
    )
    assert (run.job.setup, run.job.notify) == (["cd $DATA ~/x ${DATA}"], ["$HOOK"])


def test_weights_stand_beside_paths_that_are_expanded(surroundings):
    run = config.load(None, ["data.blend=[0.30, ~/a, 0.7, $DATA]"])
    assert run.data.blend == ["0.30", f"{surroundings}/home/a", "0.7", "/data/mine"]
    both = config.load(None, ["job.container=image", "job.mounts=[~/m, '~/a:~/b', '$DATA:/b:ro']"]).job.mounts
    home = surroundings / "home"
    assert both == [f"{home}/m", f"{home}/a:{home}/b", "/data/mine:/b:ro"]


@pytest.mark.parametrize("typed", ["~/runs/x", "$DATA/x", "./~/x", "\\$DATA/x"])
def test_train_and_submit_mean_the_same_run_directory(typed):
    run = config.load(None, [f"out={typed}"])
    assert Path(whole(run).out) == Path(run.out).absolute()


def test_settings_printed_by_hpclm_config_read_back_with_the_same_paths(capfd):
    words = ["out=\\$DATA/~/${name}", "kill_switch=./~/stop", "name=${seed}", "job.container=\\${DATA}.sif"]
    assert cli.main(["config", *words]) == 0
    Path("printed.yaml").write_text(capfd.readouterr().out)
    assert config.load("printed.yaml") == config.load(None, words)
    assert config.load("printed.yaml").out == "$DATA/~/1234"


def test_a_path_as_text_names_that_very_path(surroundings):
    for path in ("~/x", "$DATA", "a\\$DATA", "${DATA}/~", "x\\", "a b", "${seed}"):
        assert Path(paths.expanded(paths.literal(path))).absolute() == Path(path).absolute()
        assert Path(config.load(None, [f"out={paths.literal(path)}"]).out).absolute() == Path(path).absolute()
