"""The wheel, installed where no clone is: a virtual environment that has what hpclm requires, without any extra."""

import ast
import email
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from hpclm.base import shipped
from hpclm.base.extras import EXTRAS
from tests.events import began
from tests.runs import PATIENCE, ROOT

pytestmark = pytest.mark.xdist_group("wheel")  # one worker builds it
SOURCES = (
    "hpclm",
    "configs",
    "slurm",
    "docs",
    "setup.py",
    "setup.cfg",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "LICENSE",
)


def run(*words, cwd, check=0):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HPCLM"))}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE)
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


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_has_the_package_and_what_is_beside_it_in_a_clone(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = (path for pattern in ("*.py", "*.yaml", "py.typed") for path in (ROOT / "hpclm").rglob(pattern))
    tracked = {path.relative_to(ROOT).as_posix() for path in files}
    beside = {f"hpclm/{name}" for name in ("ARCHITECTURE.md", "CHANGELOG.md")}
    for folder in ("configs", "slurm", "docs"):
        there = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.*") if path.suffix not in (".js", ".css")}
        beside |= {f"hpclm/{path.as_posix()}" for path in there}
    assert {"hpclm/slurm/sites/cloud.yaml", "hpclm/configs/recipes/bigscience.yaml", "hpclm/docs/data.md"} <= beside
    assert {name for name in names if ".dist-info/" not in name} == tracked | beside


def test_a_package_index_can_show_the_wheel(metadata):
    assert {*EXTRAS.values(), "all"} <= set(metadata.get_all("Provides-Extra"))
    assert metadata["Author"] and metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload(decode=True).decode()
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert all(link.startswith("https://") for link in links), links
    named = re.findall(r"`hpclm docs ([^`]*)`", text)
    assert len(named) > 20 and set(named) <= shipped.pages().keys()


def test_the_installed_commands_work_in_any_folder(bin_folder, tmp_path):
    hpclm = bin_folder / "hpclm"
    where = run(bin_folder / "python", "-c", "import hpclm; print(hpclm.__file__)", cwd=tmp_path).stdout
    assert Path(where.strip()).is_relative_to(bin_folder.parent)
    assert "name: gpt2-345m" in run(hpclm, "config", "gpt2-345m", cwd=tmp_path).stdout
    script = run(hpclm, "submit", "--dry-run", "--nodes", "2", "--gpus", "2", "engine.device=cpu", cwd=tmp_path).stdout
    assert "#SBATCH --nodes=2" in script and str(ROOT) not in script
    assert "standard library" in run(hpclm, "demo", "--help", cwd=tmp_path).stdout
    assert run(hpclm, "docs", "reliability", cwd=tmp_path).stdout.startswith("# Reliability\n")
    assert "--vocab-size" in run(hpclm, "train-tokenizer", "--help", cwd=tmp_path).stdout
    assert not list(tmp_path.iterdir())


def test_an_installed_preset_trains_without_any_extra(bin_folder, tmp_path):
    words = ["configs/debug.yaml", "engine.device=cpu", "budget.steps=5", "evaluate.every=0"]
    run(bin_folder / "hpclm", "train", *words, cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "runs/debug/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    [attempt] = began(tmp_path / "runs/debug")
    assert attempt["git"] is None  # a repository around the environment is not hpclm's


def test_messages_and_shipped_files_name_only_what_the_wheel_has(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    beside = [path for folder in ("configs", "slurm") for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = [(path, path.read_text()) for path in beside]
    for path in {*(ROOT / "hpclm").rglob("*.py")} - {ROOT / "hpclm/documentation/topics.py"}:  # which explains itself
        nodes = ast.walk(ast.parse(path.read_text()))
        texts += [
            (path, node.value) for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
    found = 0
    for path, text in texts:
        for named in re.findall(r"(?<![\w/:.-])(?:docs|tools|configs|slurm)/[\w./-]*\w", text):
            found += 1
            assert f"hpclm/{named}" in names, f"{path} names {named}"
        for page in re.findall(r"hpclm docs ([\w/-]+)", text):
            found += 1
            assert page in shipped.pages(), f"{path} names the page {page}"
    assert found > 10


def test_a_missing_extra_is_named_and_nothing_is_written(bin_folder, tmp_path):
    told = run(bin_folder / "hpclm", "train", "debug", "engine.name=deepspeed", cwd=tmp_path, check=64).stderr
    assert "engine.name=deepspeed needs deepspeed, which is not installed: pip install 'hpclm[deepspeed]'" in told
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")  # what is not there is said first
    told = run(bin_folder / "hpclm", "convert", "model", "out", cwd=tmp_path, check=64).stderr
    assert "hpclm convert needs safetensors, which is not installed: pip install 'hpclm[convert]'" in told
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
