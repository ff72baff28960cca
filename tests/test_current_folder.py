"""A current folder in which somebody else has put modules: no process of hpclm imports them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpclm.node import python
from tests.runs import PATIENCE, ROOT

STANDARD = ("random", "socket", "typing", "multiprocessing", "runpy", "tempfile")
MODULES = (
    "mpi4py",
    "wandb",
    "torch",
    "yaml",
    "numpy",
    "submitit",
    "omegaconf",
    "psutil",
    "my_sink",
    *STANDARD,
)
HPCLM = str(Path(sys.executable).parent / "hpclm")
SRUN = '#!/bin/bash\nwhile [ "$1" != "$python" ]; do shift; done\nexec "$@"\n'
SUBMIT = [HPCLM, "submit", "--gpus", "2", "job.env.OMP_NUM_THREADS=1", "budget.steps=2"]


@pytest.fixture
def hostile(tmp_path):
    """The folder, and the file in which its modules write down who has imported them; my_sink is also where PYTHONPATH says."""
    folder, mark = tmp_path / "theirs", tmp_path / "mark"
    (folder / "hpclm").mkdir(parents=True)
    for path in (folder / "hpclm" / "__init__.py", *(folder / f"{name}.py" for name in MODULES)):
        path.write_text(f"import sys\nopen({str(mark)!r}, 'a').write(f'{{__name__}} by {{sys.orig_argv}}\\n')\n")
    (folder / "docs.jsonl").write_text('{"text": "hello"}\n' * 50)
    (tmp_path / "own").mkdir()
    shutil.copy(ROOT / "tests" / "sinks" / "own.py", tmp_path / "own" / "my_sink.py")
    return folder, mark


def run(words, cwd, **more):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HPCLM_SITE": "", "PYTHONPATH": "", **more}
    return subprocess.run(list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE)


DOORS = {
    "ranks and sinks": [*SUBMIT, "--cluster", "local", "log.sinks=[my_sink:Written]", "TINY"],
    "mpirun": [*SUBMIT, "--cluster", "mpirun", "TINY"],
    "train": [HPCLM, "train", "log.sinks=[my_sink:Written]", "TINY"],
    "doctor": [HPCLM, "doctor"],
    "preprocess": [
        HPCLM,
        "preprocess",
        "--input",
        "docs.jsonl",
        "--output-prefix",
        "OUT/data",
        "--tokenizer",
        "bytes",
        "--workers",
        "2",
    ],
    "python -m": [sys.executable, "-m", "hpclm.submit", "--cluster", "local", "TINY"],
}
MARKS = {"mpirun": [pytest.mark.mpi, pytest.mark.whole], "train": pytest.mark.whole, "python -m": pytest.mark.whole}
REST = ["torchrun", "container", "mpirun"]


@pytest.mark.parametrize("door", [pytest.param(door, marks=MARKS.get(door, ())) for door in DOORS])
def test_no_process_imports_what_lies_in_the_current_folder(door, hostile, tiny, tmp_path):
    folder, mark = hostile
    if door == "python -m":  # Python itself imports these before hpclm can do anything
        (folder / "hpclm" / "__init__.py").unlink()
        (folder / "hpclm").rmdir()
        (folder / "runpy.py").unlink()
    words = [w.replace("OUT", str(tmp_path)) for word in DOORS[door] for w in (tiny() if word == "TINY" else [word])]
    done = run(words, folder, PYTHONPATH=str(tmp_path / "own"))
    assert not mark.exists(), mark.read_text()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert ("log.sinks=[my_sink:Written]" in words) == (tmp_path / "run" / "written.jsonl").exists()


@pytest.mark.parametrize("template", ["srun", *(pytest.param(each, marks=pytest.mark.whole) for each in REST)])
def test_no_rank_of_a_job_imports_what_lies_in_the_current_folder(template, hostile, tiny, tmp_path):
    folder, mark = hostile
    program = tmp_path / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(SRUN)
    program.chmod(0o755)
    shown = run([HPCLM, "submit", "--dry-run", *image(template), *tiny()], folder)
    script = tmp_path / "script.sh"
    script.write_text(shown.stdout)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "localhost", "python": sys.executable}
    (tmp_path / "run").mkdir(mode=0o700)
    done = run(["bash", script], folder, PATH=f"{program.parent}:{Path(HPCLM).parent}:{os.environ['PATH']}", **job)
    assert not mark.exists(), mark.read_text()
    assert "hpclm" in shown.stdout and "run/config.yaml" in done.stdout + done.stderr, (
        done
    )  # the job's, not yet written
    assert "Traceback" not in done.stderr


def image(template):
    return ["job.container=x.sif", "job.venv=null"] if template == "container" else ["--template", template]


SHORT = python.command("hpclm", "--version")
TRAINED = [HPCLM, "submit", "--cluster", "local", "TINY"]


@pytest.mark.parametrize("words", [SHORT, pytest.param(TRAINED, marks=pytest.mark.whole)], ids=["short", "trained"])
def test_it_runs_in_a_folder_that_has_a_clone_in_it(words, tiny, tmp_path):
    (tmp_path / "hpclm" / "hpclm").mkdir(parents=True)
    done = run([w for word in words for w in (tiny() if word == "TINY" else [word])], tmp_path)
    assert done.returncode == 0, done.stderr
