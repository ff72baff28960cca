"""A run's config.yaml is complete, or refused: nothing of it is ever taken from the defaults without a word."""

import pytest

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.config import compose, fields
from hpclm.config.compose import dumped
from hpclm.config.run_file import FIRST

RUN = config.load(None, ["optim.lr=3e-3", "budget.steps=5", "data.source=synthetic", "cluster.preflight=false"])
TEXT = dumped(RUN)
COUNTED = TEXT.removeprefix(FIRST).partition("\n")[0] + "\n"


def run_directory(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").touch()
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
    more = len(fields.keys()) - 6  # than optim.lr and the five that are named
    for name in ("checkpoints.saved", "events.jsonl"):
        (tmp_path / name).touch()  # a run has begun here, and what it wrote is gone
        with pytest.raises(
            ConfigError, match=f"lacks name, out, seed, stop_at, exit_interval and {more} more; a run's config"
        ):
            config.load(tmp_path / "config.yaml")
        (tmp_path / name).unlink()
    (tmp_path / "events.jsonl").touch()
    assert "lacks name, out, seed" in refused(tmp_path)
    (tmp_path / "config.yaml").rename(tmp_path / "mine.yaml")
    assert config.load(tmp_path / "mine.yaml").optim.lr == 0.1


def test_an_option_of_sbatch_may_stand_in_job(tmp_path):
    (tmp_path / "a.yaml").write_text("job: {account: me, qos: null, options: {}}\n")
    options = config.load(tmp_path / "a.yaml", ["job.constraint=[a|b]", "job={qos: high}"]).job.options
    assert options == {"account": "me", "constraint": "[a|b]", "qos": "high"}


def test_five_settings_that_are_missing_are_all_named(tmp_path):
    lost = ("seed:", "stop_at:", "exit_interval:", "exit_minutes:", "kill_switch:")
    fewer = [line for line in TEXT.splitlines(keepends=True) if not line.startswith(lost)]
    message = refused(run_directory(tmp_path / "run", "".join(fewer)))
    assert "lacks seed, stop_at, exit_interval, exit_minutes, kill_switch; a run's config.yaml" in message


def test_a_run_that_was_moved_is_continued_by_its_folder_and_not_by_its_settings_file(tmp_path):
    run_directory(tmp_path / "run", dumped(config.load(None, [f"out={tmp_path}/before", "budget.steps=5"])))
    file = str(tmp_path / "run/config.yaml")
    with pytest.raises(ConfigError, match=f"belongs to the run in {tmp_path}/run, but its out={tmp_path}/before is"):
        compose.from_cli([file])
    assert compose.from_cli([file, f"out={tmp_path}/other"]).out == f"{tmp_path}/other"
    assert compose.from_cli([str(tmp_path / "run")]).out == str(tmp_path / "run")


def test_settings_of_the_job_do_not_keep_a_run_from_being_read(tmp_path):
    out = run_directory(tmp_path / "run", TEXT.replace("  nodes: 1", "  nodes: many"))
    assert config.of_run(out, []).job == config.JobConfig()
    with pytest.raises(ConfigError, match=r"job\.nodes='many' must be a whole number"):
        config.load(out / "config.yaml")


@pytest.mark.parametrize("kind", ["a file", "nothing", "a folder"])
def test_what_is_no_run_directory_is_told_what_it_is(kind, tmp_path):
    out = tmp_path / "x"
    out.touch() if kind == "a file" else out.mkdir() if kind == "a folder" else None
    why = {"a file": "it is a file$", "nothing": "it does not exist; looked in ", "a folder": "it has no config.yaml$"}[
        kind
    ]
    with pytest.raises(ConfigError, match=f"x is not a run directory: {why}"):
        config.of_run(out, [])


def test_a_site_file_describes_the_cluster_and_nothing_else(tmp_path):
    site = tmp_path / "site.yaml"
    site.write_text("job: {partition: long}\nmodel: {layers: 2}\njb: {x: 1}\n")
    site.chmod(0o666)
    with pytest.raises(ConfigError) as caught:
        compose.load(None, [], site)
    writable, other, unknown = caught.value.problems
    assert writable == f"site file {site} is writable by everyone, so anyone could run code in your name; chmod o-w"
    assert other == f"model.layers cannot be set in a site file, only job and cluster ({site}:2)"
    assert unknown.startswith("unknown setting jb.x")
    site.write_text("job: {partition: long}\n")
    site.chmod(0o664)  # of a group of administrators
    assert compose.load(None, [], site).job.partition == "long"
    assert compose.load(None, ["job.partition=short"], site).job.partition == "short"
    out = run_directory(tmp_path / "run", TEXT)
    assert compose.load(out, [], site).job.partition is None  # it was read when the run began


def test_code_of_the_users_own_that_takes_part_in_training_is_listed():
    own = ["model.block=my.mod:Block", "optim.schedule=hpclm.optim.schedules:cosine", "data.source=other:source"]
    beside = ["log.sinks=[wandb, third:Sink]", "job.cluster=fourth:Cluster", "train.callbacks=[fifth:Stop]"]
    run = config.load(None, [*own, *beside, "budget.steps=5"])
    assert run.code_of_training() == ["model.block=my.mod:Block", "data.source=other:source"]


def test_settings_that_differ_are_shown_with_both_values():
    run = config.load(None, ["optim.lr=0.1", "batch.micro_size=auto", "budget.steps=5"])
    other = config.load(None, ["optim.lr=0.2", "budget.steps=5"])
    assert run.diff(other) == {"batch.micro_size": (0, 4), "optim.lr": (0.1, 0.2)}
    assert repr(run).splitlines()[2:] == ["  batch.micro_size = 'auto'", "  budget.steps = 5", "  optim.lr = 0.1"]
    with pytest.raises(ConfigError, match="compares settings with settings"):
        run.diff({})
