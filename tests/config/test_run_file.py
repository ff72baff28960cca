"""A run's config.yaml is complete, or refused: nothing of it is ever taken from the defaults without a word."""

from pathlib import Path

import pytest

from hpclm import config
from hpclm.config.compose import dumped
from hpclm.config.run_file import FIRST, HARMLESS, REMOVED
from hpclm.errors import ConfigError

RUN = config.load(None, ["optim.lr=3e-3", "budget.steps=5", "data.source=synthetic", "cluster.preflight=false"])
TEXT = dumped(RUN)
COUNTED = TEXT.removeprefix(FIRST).partition("\n")[0] + "\n"
OLDER = (Path(__file__).parent / "older_config.yaml").read_text()  # as a version with fewer settings wrote it


def run_directory(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "attempts.jsonl").touch()
    (folder / "config.yaml").write_text(text)
    return folder


def refused(out):
    for load in (lambda: config.load(out / "config.yaml"), lambda: config.of_run(out, [])):
        with pytest.raises(ConfigError) as raised:
            load()
        assert str(out / "config.yaml") in str(raised.value)
    return str(raised.value)


def test_a_complete_config_is_used_unchanged_and_may_be_edited(tmp_path):
    out = run_directory(tmp_path / "run", TEXT)
    assert config.load(out / "config.yaml") == config.of_run(out, []) == RUN
    run_directory(out, TEXT.replace("lr: 0.003", "lr: 0.001  # lower") + "\n# and a note\n")
    assert config.load(out / "config.yaml").optim.lr == config.of_run(out, []).optim.lr == 0.001


def test_an_older_versions_config_takes_the_defaults_of_settings_that_did_not_exist_then(tmp_path):
    out = run_directory(tmp_path / "run", OLDER)
    run = config.load(out / "config.yaml")
    assert run == config.of_run(out, []) and (run.optim.lr, run.budget.steps) == (0.003, 5)
    fewer = "".join(line for line in TEXT.splitlines(keepends=True) if "  lr:" not in line)
    run_directory(out, fewer.replace(FIRST + COUNTED, FIRST.replace("hpclm 0", "hpclm 0.0")))
    assert config.load(out / "config.yaml").optim.lr == 6e-4


@pytest.mark.parametrize("new", ["  lr:", "seed:", "  preflight:", "  layers:", "  split_by:"])
def test_a_setting_that_is_newer_than_a_run_of_the_same_version_has_its_default(new, tmp_path):
    lines = TEXT.replace(COUNTED, "").splitlines(keepends=True)
    fewer = [line for line in lines if not line.startswith(new)]
    assert len(fewer) == len(lines) - 1
    out = run_directory(tmp_path / "run", "".join(fewer))
    run = config.load(out / "config.yaml")
    assert run == config.of_run(out, []) and run.data == RUN.data and run.seed == 1234
    for end in (fewer[-1], fewer[-1][-2:]):  # a file that was cut
        assert "lacks" in refused(run_directory(out, "".join(fewer).removesuffix(end)))
    counted = [fewer[0], f"# {len(fewer)} settings\n", *fewer[1:]]  # what lacks it says how many settings it had
    sections = sum(not line.startswith(" ") and line.endswith(":\n") for line in fewer)
    counted[1] = f"# {len(fewer) - 1 - sections} settings\n"
    assert config.load(run_directory(out, "".join(counted)) / "config.yaml") == run


DATA = {
    "data.prefix=x": "documents",
    "data.blend=[x]": "documents",
    "data.train=[x]": None,
    "data.source=synthetic": None,
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("version", ["hpclm 0.0", "hpclm 0"])
def test_runs_from_before_datasets_were_divided_by_tokens_keep_their_documents(data, version, tmp_path):
    text = dumped(config.load(None, [data])).replace(COUNTED, "").replace("hpclm 0", version)
    out = run_directory(tmp_path / "run", text.replace("  split_by: null\n", ""))
    assert config.load(out / "config.yaml").data.split_by == config.of_run(out, []).data.split_by == DATA[data]
    assert config.compose.flat_of_run(out).get("data.split_by") == DATA[data]
    run_directory(out, text)  # of a job that has not begun
    assert config.load(out / "config.yaml").data.split_by is None


@pytest.mark.parametrize("lost", ["  lr:", "seed:", "  preflight:", "  layers:"])
@pytest.mark.parametrize("first", [FIRST, ""])
def test_a_missing_setting_is_named_with_what_to_do(lost, first, tmp_path):
    fewer = [line for line in TEXT.removeprefix(FIRST).splitlines(keepends=True) if not line.startswith(lost)]
    message = refused(run_directory(tmp_path / "run", first + "".join(fewer)))
    assert "lacks " in message and lost.strip(" :") in message and "config-history" in message


@pytest.mark.parametrize("size", range(0, len(TEXT) - 40, 397))
def test_a_truncated_config_is_refused(size, tmp_path):
    assert "holds all of its settings" in refused(run_directory(tmp_path / "run", TEXT[:size]))


def test_other_settings_files_need_not_be_complete(tmp_path):
    (tmp_path / "config.yaml").write_text("optim: {lr: 0.1}\n")
    assert config.load(tmp_path / "config.yaml").optim.lr == 0.1
    (tmp_path / "attempts.jsonl").touch()  # a run has begun here, and what it wrote is gone
    assert "lacks name, out, seed" in refused(tmp_path)
    (tmp_path / "config.yaml").rename(tmp_path / "mine.yaml")
    assert config.load(tmp_path / "mine.yaml").optim.lr == 0.1


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_setting_may_stand_there_with_the_value_that_changes_nothing(key, tmp_path):
    path, (section, name) = tmp_path / "older.yaml", key.split(".")
    path.write_text(f"{section}: {{{name}: {config.compose.as_yaml(REMOVED[key][0])}}}\nbudget: {{steps: 3}}\n")
    assert config.load(path).budget.steps == 3
    path.write_text(f"{section}: {{{name}: another}}\n")
    if key in HARMLESS:
        assert config.load(path)
        return
    with pytest.raises(ConfigError, match=rf"{key} no longer exists; ."):
        config.load(path)


def test_an_option_of_sbatch_may_have_its_old_name(tmp_path):
    (tmp_path / "a.yaml").write_text("job: {account: me, qos: null, options: {}}\n")
    options = config.load(tmp_path / "a.yaml", ["job.constraint=[a|b]", "job={qos: high}"]).job.options
    assert options == {"account": "me", "constraint": "[a|b]", "qos": "high"}


@pytest.mark.parametrize("value", ["true", "false", "null"])
def test_a_setting_that_was_renamed_is_read_by_its_old_name(value, tmp_path):
    text = TEXT.replace("  self_check: null", f"  prove: {value}")
    assert text != TEXT
    out = run_directory(tmp_path / "run", text)
    read = {config.load(out / "config.yaml").cluster.self_check, config.of_run(out, []).cluster.self_check}
    assert read == {config.load(None, [f"cluster.prove={value}"]).cluster.self_check}
    assert read == {dict(true=True, false=False, null=None)[value]}
