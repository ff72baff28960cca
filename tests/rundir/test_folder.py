"""What a run directory may have in it."""

import pytest

from hpclm.base.errors import ConfigError
from hpclm.rundir import folder


@pytest.mark.parametrize("names, listed", [("dcba", "a, b, c, …"), ("cba", "a, b, c")])
def test_a_folder_with_other_files_and_no_run_is_refused_with_the_first_of_them(names, listed, tmp_path):
    for name in [*names, ".hidden", "job.sh", "x.out", "x.yaml", "save-now", "log.txt"]:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) as caught:
        folder.check_inside(tmp_path)
    has = f"is not empty, and has no run: it has {listed}; choose another out"
    assert str(caught.value) == f"run directory {tmp_path} {has}"
    (tmp_path / "config.yaml").touch()
    folder.check_inside(tmp_path)


def test_what_a_run_writes_to_must_be_files_and_folders_of_which_folders_may_be_links(tmp_path):
    out = tmp_path / "run"
    out.mkdir(mode=0o700)
    (out / "config.yaml").mkdir()
    (out / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    (out / "logs").touch()
    (out / "tensorboard").symlink_to(tmp_path)
    (out / "checkpoints").mkdir()
    (out / "checkpoints").chmod(0o770)
    with pytest.raises(ConfigError) as caught:
        folder.check_inside(out)
    told = "must be {}: a run writes there; move it away, or choose another out"
    assert sorted(caught.value.problems) == [
        f"{out}/checkpoints can be written by others (mode 0770): a run trusts its content; chmod go-w it, or choose another out",
        f"{out}/config.yaml is a folder and {told.format('a file')}",
        f"{out}/logs is a file and {told.format('a folder')}",
        f"{out}/metrics.jsonl is a link and {told.format('a file')}",
    ]


def test_what_is_lost_is_what_came_after_the_newest_checkpoint(tmp_path):
    assert folder.unsaved(tmp_path) == "nothing saved"
    (tmp_path / "checkpoints/step-00000012").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000012/MANIFEST.json").touch()
    assert folder.unsaved(tmp_path) == "not saved since step 12"
