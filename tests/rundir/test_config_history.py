"""A run's config.yaml, and the versions of it that came before."""

from hpclm.rundir import config_history


def history(out):
    return {path.name: path.read_text() for path in sorted((out / "config-history").iterdir())}


def test_every_version_that_was_replaced_or_used_is_kept(tmp_path):
    (tmp_path / "config.yaml").write_text("made before there was a history")
    assert config_history.replace(tmp_path, "submitted")[0] == b"made before there was a history"
    (tmp_path / "config-history/0002.yaml.tmp-elsewhere-1-abc").write_text("hal")  # left by a killed process
    for _ in range(2):
        assert config_history.replace(tmp_path, "submitted") == (b"submitted", "config-history/0002.yaml")
    (tmp_path / "config-history/0002.yaml.tmp-elsewhere-1-abc").unlink()
    assert config_history.replace(tmp_path, "submitted again")[0] == b"submitted"
    assert (tmp_path / "config.yaml").read_text() == "submitted again"
    assert config_history.replace(tmp_path, "by hand")[1] == "config-history/0004.yaml"
    assert config_history.replace(tmp_path, "submitted")[1] == "config-history/0005.yaml"
    versions = ["made before there was a history", "submitted", "submitted again", "by hand", "submitted"]
    assert history(tmp_path) == {f"000{number}.yaml": text for number, text in enumerate(versions, 1)}


def test_a_replacement_can_be_undone(tmp_path):
    config_history.restore(tmp_path, config_history.replace(tmp_path, "first")[0])
    assert not (tmp_path / "config.yaml").exists()
    config_history.replace(tmp_path, "first")
    config_history.restore(tmp_path, config_history.replace(tmp_path, "refused")[0])
    assert (tmp_path / "config.yaml").read_text() == "first"
    assert config_history.replace(tmp_path, "second")[1] == "config-history/0004.yaml"
