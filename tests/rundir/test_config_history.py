"""A run's config.yaml, and the versions of it that came before."""

from hpclm.rundir import config_history


def history(out):
    return {path.name: path.read_text() for path in sorted((out / "config-history").iterdir())}


def test_every_version_that_was_replaced_or_used_is_kept(tmp_path):
    (tmp_path / "config.yaml").write_text("made before there was a history")
    assert config_history.replace(tmp_path, "submitted").before == b"made before there was a history"
    assert (
        config_history.use(tmp_path, "submitted")
        == config_history.use(tmp_path, "submitted")
        == "config-history/0002.yaml"
    )
    assert config_history.replace(tmp_path, "submitted again").before == b"submitted"
    assert (tmp_path / "config.yaml").read_text() == "submitted again"
    assert config_history.use(tmp_path, "by hand") == "config-history/0004.yaml"
    assert config_history.use(tmp_path, "submitted") == "config-history/0005.yaml"
    words = ["made before there was a history", "submitted", "submitted again", "by hand", "submitted"]
    assert history(tmp_path) == {f"000{number}.yaml": text for number, text in enumerate(words, 1)}


def test_a_replacement_can_be_undone(tmp_path):
    config_history.restore(tmp_path, config_history.replace(tmp_path, "first"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "config.yaml").write_text("by hand")
    config_history.restore(tmp_path, config_history.replace(tmp_path, "refused"))
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    config_history.use(tmp_path, "first")
    known = history(tmp_path)
    config_history.restore(tmp_path, config_history.replace(tmp_path, "refused"))
    assert (tmp_path / "config.yaml").read_text() == "first" and history(tmp_path) == known


def test_a_file_left_by_a_killed_process_is_not_a_version(tmp_path):
    config_history.use(tmp_path, "first")
    (tmp_path / "config-history/0002.yaml.tmp-elsewhere-1-abc").write_text("hal")
    assert config_history.use(tmp_path, "second") == "config-history/0002.yaml"
    assert config_history.use(tmp_path, "second") == "config-history/0002.yaml"
