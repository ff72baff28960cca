"""The wheel, installed where no clone is: a virtual environment that has what hpclm requires, without any extra."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from hpclm.extras import EXTRAS
from tests.runs import ROOT

pytestmark = pytest.mark.xdist_group("wheel")  # one worker builds it
SOURCES = (
    "hpclm",
    "configs",
    "slurm",
    "setup.py",
    "setup.cfg",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
)


def run(*words, cwd, check=0):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HPCLM"))}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == check, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, since a build leaves folders beside the sources."""
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, folder / name)
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "wheel", *offline, "-w", folder / "dist", folder, cwd=folder)
    [built] = (folder / "dist").glob("hpclm-*.whl")
    return built


@pytest.fixture(scope="module")
def bin_folder(wheel, tmp_path_factory):
    """The programs of an environment in which the wheel is installed; it sees this one's libraries but those of extras."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    if shutil.which("git"):  # as the environment of a project has one around it
        run("git", "init", "-q", folder.parent, cwd="/")
        who = ["-c", "user.name=me", "-c", "user.email=me@localhost"]
        run("git", *who, "commit", "-q", "--allow-empty", "-m", "other", cwd=folder.parent)
    venv.create(folder, symlinks=True)
    [site] = folder.glob("lib/python*/site-packages")
    installed = [each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")]
    hidden = f"import sys; sys.modules.update(dict.fromkeys({sorted(EXTRAS)}))"  # Python's way to say: not there
    (site / "libraries.pth").write_text("\n".join([*installed, hidden, ""]))
    offline = ["--no-deps", "--no-index", "--ignore-installed", "--disable-pip-version-check"]
    run(folder / "bin/python", "-m", "pip", "install", *offline, wheel, cwd=folder)
    return folder / "bin"


def test_the_wheel_has_the_package_its_presets_and_its_job_templates(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    files = (path for pattern in ("*.py", "*.yaml") for path in (ROOT / "hpclm").rglob(pattern))
    tracked = {path.relative_to(ROOT).as_posix() for path in files}
    presets = {f"hpclm/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    templates = {f"hpclm/slurm/{path.name}" for path in (ROOT / "slurm").glob("*.sbatch")}
    assert presets and templates
    assert {name for name in names if ".dist-info/" not in name} == tracked | presets | templates
    for extra in {*EXTRAS.values(), "all"}:
        assert f"Provides-Extra: {extra}\n" in metadata


def test_the_installed_commands_work_in_any_folder(bin_folder, tmp_path):
    hpclm = bin_folder / "hpclm"
    where = run(bin_folder / "python", "-c", "import hpclm; print(hpclm.__file__)", cwd=tmp_path).stdout
    assert Path(where.strip()).is_relative_to(bin_folder.parent)
    assert "name: gpt2-345m" in run(hpclm, "config", "gpt2-345m", cwd=tmp_path).stdout
    script = run(hpclm, "submit", "--dry-run", "--nodes", "2", "--gpus", "2", "engine.device=cpu", cwd=tmp_path).stdout
    assert "#SBATCH --nodes=2" in script and str(ROOT) not in script
    assert "standard library" in run(hpclm, "demo", "--help", cwd=tmp_path).stdout
    assert "--vocab-size" in run(hpclm, "train-tokenizer", "--help", cwd=tmp_path).stdout
    assert not list(tmp_path.iterdir())


def test_an_installed_preset_trains_without_any_extra(bin_folder, tmp_path):
    words = ["configs/debug.yaml", "engine.device=cpu", "budget.steps=5", "evaluate.every=0"]
    run(bin_folder / "hpclm", "train", *words, cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "runs/debug/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    attempt = json.loads((tmp_path / "runs/debug/attempts.jsonl").read_text())
    assert attempt["git"] is None  # a repository around the environment is not hpclm's


def test_a_missing_extra_is_named_and_nothing_is_written(bin_folder, tmp_path):
    told = run(bin_folder / "hpclm", "train", "debug", "engine.name=deepspeed", cwd=tmp_path, check=64).stderr
    assert "engine.name=deepspeed needs deepspeed, which is not installed: pip install 'hpclm[deepspeed]'" in told
    told = run(bin_folder / "hpclm", "convert", ".", "out", cwd=tmp_path, check=64).stderr
    assert "hpclm convert needs safetensors, which is not installed: pip install 'hpclm[convert]'" in told
    assert not list(tmp_path.iterdir())
