"""The code of a run: which files it is, a copy of it, and what is said when it changes."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.rundir import code
from tests.events import began
from tests.forks import hpclm
from tests.runs import ROOT
from tests.slurm import until

MINE = "import json\nimport torch\nfrom tools import chart\nfrom helper import factor\n\n\ndef rate(position, length, optim):\n    return optim.lr * factor\n"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with a person's own modules, which PYTHONPATH names."""
    folder = tmp_path / "mine"
    (folder / "package" / "inner").mkdir(parents=True)
    (folder / "tools").mkdir()  # a package without __init__.py
    (folder / "tools" / "chart.py").write_text("")
    (folder / "own.py").write_text(MINE)
    (folder / "helper.py").write_text("factor = 1.0\n")
    (folder / "other.py").write_text("")
    (folder / "helper").mkdir()  # Python prefers helper.py
    (folder / "helper" / "data.txt").write_text("")
    (folder / "package").joinpath("table.py").write_text("x = " + "+".join(["1"] * 20_000))  # too deep to be parsed
    for path in ("__init__.py", "block.py", "inner/__init__.py", "data.txt"):
        (folder / "package" / path).write_text("from package import inner\n" if path == "block.py" else "")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_the_code_is_hpclm_and_the_modules_that_settings_name_with_what_they_import_from_beside_them(mine):
    run = config.load("debug", ["optim.schedule=own:rate", "model.block=package.block:Block", "engine.name=json:loads"])
    found = code.sources(run.modules())
    own = {name for name in found if not name.startswith("hpclm/")}
    assert own == {
        "own.py",
        "helper.py",
        "tools/chart.py",
        *(f"package/{n}" for n in ("__init__.py", "block.py", "table.py", "inner/__init__.py", "data.txt")),
    }
    assert found["hpclm/rundir/code.py"] == Path(code.__file__) and not any("__pycache__" in name for name in found)
    before = code.digest(found)
    assert before == code.digest(code.sources(run.modules()))
    (mine / "helper.py").write_text("factor = 2.0\n")
    assert code.digest(code.sources(run.modules())) != before


def test_a_copy_is_made_once_whole_and_a_large_one_refused(mine, tmp_path):
    run = config.load("debug", ["model.block=package.block:Block"])
    copy = code.keep(tmp_path, code.sources(run.modules()))
    assert (
        copy == code.keep(tmp_path, code.sources(run.modules())) == code.folder(tmp_path, code.sources(run.modules()))
    )
    names = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert {"hpclm/training/loop.py", "package/inner/__init__.py", "SNAPSHOT.json"} <= names
    assert json.loads((copy / "SNAPSHOT.json").read_text())["git"] == code.revision()
    assert [path.name for path in (tmp_path / "job").iterdir()] == [copy.name]
    with (mine / "package" / "data.txt").open("wb") as file:
        file.truncate(code.MAX_CODE_BYTES)
    with pytest.raises(ConfigError, match=r"would copy 6\d MB of code: move data out"):
        code.keep(tmp_path, code.sources(run.modules()))


def test_a_warning_says_that_the_code_has_changed_since_the_last_attempt(mine, tiny, tmp_path):
    words = tiny("run", "optim.schedule=own:rate", "stop_at=4")
    warning = "the code is not the one that the last attempt ran"

    def train(*more):
        return (
            warning
            in hpclm("train", *words, *more, cwd=mine, env=os.environ | {"PYTHONPATH": str(mine)}, check=0).stderr
        )

    assert not train() and not train("stop_at=6")
    (mine / "helper.py").write_text("factor = 2.0\n")
    assert train("stop_at=8") and not train("stop_at=10")
    assert (tmp_path / "run" / "log.txt").read_text().count(f"{warning}: files have changed") == 1


def test_a_job_with_a_snapshot_runs_the_code_it_was_submitted_with(cluster, tmp_path):
    checkout, out = tmp_path / "checkout", tmp_path / "run"
    shutil.copytree(ROOT / "hpclm", checkout / "hpclm", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("configs", "slurm"):
        shutil.copytree(ROOT / folder, checkout / folder)
    (checkout / "own.py").write_text("def rate(position, length, optim):\n    return optim.lr\n")
    env = {**cluster.env, "HPCLM_SITE": "", "OMP_NUM_THREADS": "1"}
    words = [
        "job.snapshot=true",
        "budget.steps=1000000",
        "evaluate.every=0",
        "engine.device=cpu",
        "log.tensorboard=false",
    ]
    words += ["optim.schedule=own:rate", "--time", "60", f"out={out}"]
    command = [sys.executable, "-m", "hpclm", "submit", *words]
    job = cluster.run(command, cwd=checkout, env=env).stdout.split()[1].rstrip(":")

    until(lambda: began(out), "attempt", cluster)
    for path in ("own.py", "hpclm/training/loop.py"):  # what a git pull may do
        (checkout / path).write_text("raise SystemExit('other code')\n")
    cluster.run(["scontrol", "requeue", job])
    until(lambda: len(began(out)) == 2, "second attempt", cluster)
    first, second = began(out)
    assert first["digest"] == second["digest"] and first["git"] == second["git"]
    assert "is not the one" not in (out / "log.txt").read_text()


def test_a_process_that_does_not_run_its_snapshot_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCLM_SNAPSHOT", str(tmp_path))
    with pytest.raises(ConfigError, match=f"should run {tmp_path}, but runs {os.fspath(ROOT / 'hpclm')}"):
        code.check_snapshot()
