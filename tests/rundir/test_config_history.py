"""A run's config.yaml, and the versions of it that came before."""

import pytest

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


@pytest.mark.parametrize(
    "stray, kept",
    {
        "a number without zeros": ("2.yaml", "0002.yaml"),
        "a larger number": ("17.yaml", "0002.yaml"),
        "other digits": ("\uff11\uff12\uff13\uff14.yaml", "0002.yaml"),
        "a word": ("mine.yaml", "0002.yaml"),
        "zero": ("0000.yaml", "0002.yaml"),
        "more digits than a version has": (f"{'9' * 200}.yaml", "0002.yaml"),
        "a folder": ("0007.yaml/", "0009.yaml"),
        "a link to nothing": ("0007.yaml@", "0009.yaml"),
        "a version of its own": ("0007.yaml", "0009.yaml"),
    }.values(),
)
def test_a_stray_file_beside_the_versions_stops_no_start_and_costs_no_version(stray, kept, tmp_path):
    config_history.replace(tmp_path, "first")
    path = tmp_path / "config-history" / stray.rstrip("/@")
    if stray.endswith("/"):
        path.mkdir()
    elif stray.endswith("@"):
        path.symlink_to("nowhere")
    else:
        path.write_text("stray")
    assert config_history.replace(tmp_path, "second") == (
        b"first",
        f"config-history/{kept}",
    )  # and "first" before it, anew
    assert (tmp_path / "config-history" / kept).read_text() == "second"
    assert config_history.replace(tmp_path, "second") == (b"second", f"config-history/{kept}")
