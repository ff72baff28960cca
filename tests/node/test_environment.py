import getpass
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hpclm.base.errors import ConfigError
from hpclm.node import environment
from tests.runs import ROOT

SLURM = {"SLURM_JOB_ID": "12"}
OWN = {"TORCH_EXTENSIONS_DIR": f"TMP/hpclm-extensions-12-0-{os.geteuid()}"}


@pytest.mark.parametrize(
    "before, builds, after",
    [
        ({}, False, {}),
        ({"LOCAL_RANK": "3"}, False, {}),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}, False, {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}),
        (SLURM, False, SLURM),
        (SLURM, True, {**SLURM, **OWN}),
        ({"TORCH_EXTENSIONS_DIR": "/mine", **SLURM}, True, {"TORCH_EXTENSIONS_DIR": "/mine", **SLURM}),
        ({}, True, {}),
    ],
)
def test_deepspeed_gets_the_device_and_a_build_folder(before, builds, after, temporary):
    env = dict(before)
    environment.for_deepspeed("cuda", 1, builds, env)
    after = {name: value.replace("TMP", str(temporary)) for name, value in after.items()}
    assert env == {**after, "DS_ACCELERATOR": "cuda", "LOCAL_RANK": "1"}


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A folder for temporary files, as /tmp."""
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def compiled_in():
    env = {"SLURM_JOB_ID": "12"}
    environment.for_deepspeed("cpu", 0, True, env)
    environment.for_inductor(env)
    return [Path(env["TORCH_EXTENSIONS_DIR"]), Path(env["TORCHINDUCTOR_CACHE_DIR"])]


def test_compiled_code_is_kept_in_folders_of_this_user_alone_which_all_ranks_of_a_node_share(temporary):
    folders = compiled_in()
    assert compiled_in() == folders and {folder.parent for folder in folders} == {temporary}
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700, 0o700]
    for name in ("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        env = {name: "/mine", "SLURM_JOB_ID": "12"}
        environment.for_deepspeed("cpu", 0, True, env)
        environment.for_inductor(env)
        assert env[name] == "/mine"


@pytest.mark.parametrize("prepare", [environment.for_inductor, environment.for_code_that_may_compile])
def test_only_a_folder_that_the_user_chose_replaces_hpclm_s_for_compiled_code(prepare, temporary):
    private = temporary / f"hpclm-inductor-{os.geteuid()}"
    of_pytorch = f"torchinductor_{getpass.getuser()}"
    for chosen in (
        "",
        f"{temporary}/{of_pytorch}",
        f"/other/{of_pytorch}",
        "/of/the/submitting/machine/hpclm-inductor-7",
    ):
        env = {"TORCHINDUCTOR_CACHE_DIR": chosen}
        for _ in range(2):
            prepare(env)
            assert env["TORCHINDUCTOR_CACHE_DIR"] == str(private), chosen
    for chosen in ("/mine", f"/mine/{of_pytorch}/cache"):
        env = {"TORCHINDUCTOR_CACHE_DIR": chosen}
        prepare(env)
        assert env["TORCHINDUCTOR_CACHE_DIR"] == chosen


def test_without_a_safe_folder_a_run_that_does_not_compile_starts_all_the_same(temporary):
    temporary.chmod(0o777)
    env = {}
    environment.for_code_that_may_compile(env)
    assert env["TORCHINDUCTOR_CACHE_DIR"] == environment.NOWHERE and not list(temporary.iterdir())


FOREIGN = {
    "another user's": lambda path: (path.mkdir(), os.chown(path, 65534, 65534)),
    "one that others can write": lambda path: (path.mkdir(), path.chmod(0o777)),
    "a link": lambda path: (path.with_name("other").mkdir(exist_ok=True), path.symlink_to(path.with_name("other"))),
    "a file": lambda path: path.touch(),
}


@pytest.mark.parametrize("made", FOREIGN)
def test_a_folder_that_another_user_has_made_beforehand_is_not_used(made, temporary, caplog):
    if made == "another user's" and os.geteuid():
        pytest.skip("only root can give a folder away")
    expected = [temporary / f"hpclm-{name}-{os.geteuid()}" for name in ("extensions-12-0", "inductor")]
    for path in expected:
        FOREIGN[made](path)
    for used, path in zip(compiled_in(), expected, strict=True):
        assert used != path and f"{path} was made by another user, or others can write to it" in caplog.text
        assert used.parent == temporary and used.stat().st_mode & 0o777 == 0o700 and used.stat().st_uid == os.geteuid()


def test_code_is_not_compiled_in_a_folder_whose_files_others_can_replace(temporary):
    temporary.chmod(0o777)
    with pytest.raises(
        ConfigError, match=r"others could replace it there \(mode 0777\); set TMPDIR to your own folder"
    ):
        compiled_in()
    assert not list(temporary.iterdir())


def test_where_no_folder_can_be_made_pytorch_is_imported_and_no_other_folder_is_used(tmp_path):
    """In a process of its own: PyTorch makes its folder when torch._dynamo is imported."""
    program = """
import os, tempfile
from hpclm.node import environment
from tests.runs import ROOT
tempfile.tempdir = "/proc/self"
for _ in range(2):
    try:
        environment.for_inductor()
        print("no error")
    except OSError:
        print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
import torch._dynamo
print(os.environ["TORCHINDUCTOR_CACHE_DIR"], os.listdir("."))
"""
    env = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.split("\n") == ["/proc/self", "/proc/self", "/proc/self []", ""], done.stderr
