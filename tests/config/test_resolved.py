"""A run's config.yaml is whole, or refused: nothing of it is ever taken from the defaults without a word."""

from pathlib import Path

import pytest

from hpclm import config
from hpclm.config.compose import dumped
from hpclm.config.resolved import FIRST, FIRST_OF_OLD
from hpclm.errors import ConfigError
from hpclm.rundir import config_history

RUN = config.load(None, ["optim.lr=3e-3", "budget.steps=5", "data.source=synthetic", "cluster.bind=false"])
TEXT = dumped(RUN)
LINES = TEXT.splitlines(keepends=True)
OLD = (Path(__file__).parent / "without_last_line.yaml").read_text()  # as an older version wrote it
CUTS = [
    *range(0, len(TEXT), 151),
    len(FIRST) - 1,
    len(FIRST),
    TEXT.index("lr: 0.003") + 9,
    len(TEXT) - 1,
    len(TEXT) - len(LINES[-1]) - 1,
    len(TEXT) - len(LINES[-1]),
]


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


def test_a_complete_config_is_used_unchanged(tmp_path):
    out = run_directory(tmp_path / "run", TEXT)
    assert config.load(out / "config.yaml") == config.of_run(out, []) == RUN


def test_a_complete_config_from_before_there_was_a_last_line_is_used(tmp_path):
    out = run_directory(tmp_path / "run", OLD)
    found = config.load(out / "config.yaml")
    assert found == config.of_run(out, []) and (found.optim.lr, found.budget.steps) == (0.003, 5)


@pytest.mark.parametrize("place", CUTS)
def test_a_truncated_config_is_refused(place, tmp_path):
    assert refused(run_directory(tmp_path / "run", TEXT[:place]))


@pytest.mark.whole
@pytest.mark.parametrize("part", range(8))
def test_a_config_truncated_at_any_byte_is_refused(part, tmp_path):
    for place in range(part, len(TEXT), 8):
        assert refused(run_directory(tmp_path / "run", TEXT[:place])), place


@pytest.mark.parametrize("first", [FIRST, FIRST_OF_OLD])
@pytest.mark.parametrize("lost", ["  lr:", "seed:", "  bind:", "  layers:", "none of them"])
def test_a_config_that_lost_its_last_line_and_any_other_is_refused(lost, first, tmp_path):
    fewer = [line for line in LINES[1:-1] if not line.startswith(lost)]
    assert "truncated" in refused(run_directory(tmp_path / "run", first + "".join(fewer)))


@pytest.mark.parametrize("lost", [1, 40, 80, -2, -1])
def test_a_config_of_an_older_version_that_lost_a_line_is_refused(lost, tmp_path):
    lines = OLD.splitlines(keepends=True)
    del lines[lost]
    assert refused(run_directory(tmp_path / "run", "".join(lines)))


def test_removed_lines_are_named_with_what_to_do(tmp_path):
    out = run_directory(tmp_path / "run", "".join(line for line in LINES if "  lr:" not in line and "seed" not in line))
    said = refused(out)
    assert f"lacks 2 of its {LINES[-1].split()[4]} settings, such as seed, optim.lr" in said
    assert f"attempts.jsonl and jobs.jsonl in {out}" in said and "Restore the file" in said


def test_every_setting_is_one_line_so_that_no_line_of_a_list_or_mapping_is_lost_unnoticed(tmp_path):
    words = ["data.source=indexed", "data.blend=[0.3,a,0.3,b,0.4,c]", "job.env={A: '1', B: '2'}"]
    run = config.load(None, [*words, "budget.steps=5", 'job.setup=["module load x\\ny", "z: #"]'])
    text = dumped(run)
    sections = sum(line.endswith(":") for line in text.split("\n"))
    assert len(text.splitlines()) == 2 + sections + int(text.split()[-2])
    out = run_directory(tmp_path / "run", text)
    assert config.load(out / "config.yaml") == run
    for part in ("0.3", "B:", "module load"):
        fewer = "".join(line for line in text.splitlines(keepends=True) if part not in line)
        assert "lacks 1 of its" in refused(run_directory(out, fewer))


def test_what_to_do_about_a_cut_config_names_the_last_whole_version(tmp_path):
    out = run_directory(tmp_path / "run", TEXT)
    for text in (TEXT, TEXT.replace("0.003", "0.001"), TEXT[:999]):
        config_history.use(out, text)
    for cut in (TEXT[:999], "".join(LINES[:-1])):  # of which the first is no YAML
        config_history.replace(out, cut)
        assert f"used or replaced is {out}/config-history/0002.yaml: copy it there" in refused(out)


def test_an_edited_config_is_used(tmp_path):
    edited = TEXT.replace("lr: 0.003", "lr: 0.001  # lower").replace(FIRST, FIRST + "# mine\n") + "\n# and a note\n"
    out = run_directory(tmp_path / "run", edited)
    assert config.load(out / "config.yaml").optim.lr == config.of_run(out, []).optim.lr == 0.001


def test_a_config_of_an_older_version_with_fewer_settings_is_complete(tmp_path):
    fewer = [line for line in LINES[:-1] if "  lr:" not in line]  # as if optim.lr were new
    out = run_directory(tmp_path / "run", "".join(fewer) + f"# End of the {int(LINES[-1].split()[4]) - 1} settings.\n")
    assert config.load(out / "config.yaml").optim.lr == 6e-4


def test_other_settings_files_need_not_be_complete(tmp_path):
    (tmp_path / "config.yaml").write_text("optim: {lr: 0.1}\n")
    assert config.load(tmp_path / "config.yaml").optim.lr == 0.1
    (tmp_path / "attempts.jsonl").touch()  # a run has begun here, and what it wrote is gone
    assert "was not written by hpclm" in refused(tmp_path)
    (tmp_path / "config.yaml").rename(tmp_path / "mine.yaml")
    assert config.load(tmp_path / "mine.yaml").optim.lr == 0.1


def test_a_removed_setting_may_stand_there_with_the_value_that_changes_nothing(tmp_path):
    """As an earlier version wrote it."""
    path = tmp_path / "config.yaml"
    path.write_text("budget: {steps: 3}\nlog: {style: hpclm, every: 7}\n")
    assert config.load(path).log.every == 7
    path.write_text("budget: {steps: 3}\nlog: {style: megatron, every: 7}\n")
    with pytest.raises(ConfigError, match=r"unknown setting log\.style"):
        config.load(path)
