"""A run's config.yaml is complete, or refused: nothing of it is ever taken from the defaults without a word."""

import pytest

from hpclm import config
from hpclm.config.compose import dumped
from hpclm.config.run_file import FIRST
from hpclm.errors import ConfigError

RUN = config.load(None, ["optim.lr=3e-3", "budget.steps=5", "data.source=synthetic", "cluster.preflight=false"])
TEXT = dumped(RUN)
COUNTED = TEXT.removeprefix(FIRST).partition("\n")[0] + "\n"


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


@pytest.mark.parametrize("new", ["  lr:", "seed:", "  preflight:", "  layers:", "  split_by:"])
def test_a_setting_that_is_newer_than_a_run_has_its_default(new, tmp_path):
    lines = TEXT.splitlines(keepends=True)
    fewer = [line for line in lines if not line.startswith(new)]
    assert len(fewer) == len(lines) - 1
    fewer[1] = f"# {int(COUNTED.split()[1]) - 1} settings\n"  # as it was written by a version without that setting
    out = run_directory(tmp_path / "run", "".join(fewer))
    run = config.load(out / "config.yaml")
    assert run == config.of_run(out, []) and run.data == RUN.data and run.seed == 1234
    for end in (fewer[-1], fewer[-1][-2:]):  # a file that was cut
        assert "lacks" in refused(run_directory(out, "".join(fewer).removesuffix(end)))


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


def test_an_option_of_sbatch_may_stand_in_job(tmp_path):
    (tmp_path / "a.yaml").write_text("job: {account: me, qos: null, options: {}}\n")
    options = config.load(tmp_path / "a.yaml", ["job.constraint=[a|b]", "job={qos: high}"]).job.options
    assert options == {"account": "me", "constraint": "[a|b]", "qos": "high"}
