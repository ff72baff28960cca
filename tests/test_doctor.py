import json
import os
import secrets

import pytest

from hpclm import cli
from tests import runs
from tests.forks import hpclm

CALM = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "HPCLM_"))}


def test_doctor_and_env_show_what_this_process_has():
    shown = hpclm("doctor", check=0, env=CALM).stdout
    names = ("hpclm", "torch", "shm", "network", "  lo", "mpirun", "sbatch", "launcher", "collect_env", "  os")
    assert [name for name in names if f"\n{name} " not in f"\n{shown.replace(chr(10), ' ' + chr(10))}"] == []
    assert shown.endswith("\nno problems found\n")


def test_no_secret_is_shown():
    canary = secrets.token_hex(8)
    env = CALM | {"WANDB_API_KEY": canary, "NCCL_PASSWORD": canary, "SLURM_TOKEN": canary, "HPCLM_SECRET": canary}
    for words in ((), ("--json",)):
        assert canary not in hpclm("doctor", *words, env=env).stdout


def test_the_site_file_is_shown(tmp_path):
    shown = hpclm("doctor", env=CALM | {"HPCLM_SITE": str(tmp_path / "site.yaml")}).stdout
    assert f"{tmp_path}/site.yaml" in shown


def test_json_has_everything_and_the_problems():
    shown = json.loads(hpclm("doctor", "--json", check=0, env=CALM).stdout)
    assert shown["ok"] and shown["problems"] == []
    assert shown["found"]["launcher"] == "single" and shown["found"]["collect_env"]["os"]


def package(folder, name, code):
    """A package that Python finds before the installed one."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    return CALM | {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    "code, reason",
    [
        ("raise ImportError('no libcudart.so.12')", "and does not work here: ImportError: no libcudart.so.12"),
        ("import os; os.abort()", "PyTorch cannot be loaded (ended by signal 6)"),
    ],
)
def test_a_torch_that_cannot_be_loaded_or_crashes_is_a_problem(code, reason, tmp_path):
    shown = runs.hpclm("doctor", check=1, env=package(tmp_path, "torch", code)).stdout
    [problem] = [line for line in shown.splitlines() if line.startswith("problem: ")]
    assert reason in problem and f"torch comes from {tmp_path}/torch/__init__.py, outside the environment" in problem


def test_a_library_that_can_be_imported_but_is_too_old_is_a_problem(tmp_path):
    (tmp_path / "PyYAML-5.4.1.dist-info").mkdir()
    (tmp_path / "PyYAML-5.4.1.dist-info" / "METADATA").write_text("Name: PyYAML\nVersion: 5.4.1\n")
    shown = runs.hpclm("doctor", check=1, env=CALM | {"PYTHONPATH": str(tmp_path)}).stdout
    [problem] = [line for line in shown.splitlines() if line.startswith("problem: ")]
    assert problem.startswith("problem: hpclm needs PyYAML 6 or newer, but PyYAML 5.4.1 is installed; pip install")


def test_a_library_from_outside_the_environment_that_works_is_a_hint(tmp_path):
    code = "import sys; sys.path.remove(__path__[0][:-5]); del sys.modules['tqdm']; from tqdm import *"
    shown = runs.hpclm("doctor", check=0, env=package(tmp_path, "tqdm", code)).stdout
    assert f"hint: from outside the environment: tqdm ({tmp_path}/tqdm/__init__.py); take its folder" in shown


def test_variables_of_launchers_that_contradict_each_other_are_a_problem():
    env = CALM | {"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = hpclm("doctor", check=1, env=env | {"TORCHELASTIC_RUN_ID": "x"})
    assert "problem: torchrun says rank 5 of 2" in done.stdout


def test_each_process_of_a_launch_prints_a_line():
    launch = {
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "TORCHELASTIC_RUN_ID": "x",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }
    shown = hpclm("doctor", check=0, env=CALM | launch | {"RANK": "1", "LOCAL_RANK": "1"}).stdout
    assert shown.startswith("rank 1/3  ") and "  local 1/3  " in shown and shown.count("\n") == 1


def test_json_with_a_problem_ends_with_1(tmp_path, monkeypatch, capsys):
    for name, value in package(tmp_path, "torch", "import os; os.abort()").items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert not shown["ok"] and "PyTorch cannot be loaded (ended by signal 6)" in shown["problems"][0]
