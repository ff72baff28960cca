import json
import os
import shutil
import time

import pytest

from hpclm.checkpoint.manifest import Manifest
from hpclm.errors import ConfigError
from hpclm.rundir import runs, saved, submissions
from hpclm.rundir.submissions import Submission
from tests.checkpoint import state


def make(folder, attempts=(), rows=(), **files):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "attempts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in attempts))
    if rows:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def test_run_directories_are_found_by_their_files_and_not_searched_further(tmp_path):
    make(tmp_path / "a")
    make(tmp_path / "sweep" / "lr=1")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "jobs.jsonl").touch()
    make(tmp_path / "a" / "checkpoints")
    make(tmp_path / "1" / "2" / "3" / "4")
    make(tmp_path / ".hidden")
    assert runs.find(tmp_path) == [tmp_path / "a", tmp_path / "b", tmp_path / "sweep" / "lr=1"]
    assert runs.find(tmp_path / "a") == [tmp_path / "a"]
    assert runs.find(tmp_path / "nowhere") == []


def test_a_run_is_named_by_its_path_or_by_its_name_below_the_folder_of_runs(tmp_path):
    run = make(tmp_path / "sweep" / "lr=1")
    assert runs.resolve(str(run), tmp_path) == run
    assert runs.resolve("sweep/lr=1", tmp_path) == run
    with pytest.raises(
        ConfigError, match=r"sweep/lr=2 is not a run directory; .* has sweep/lr=1\. Did you mean 'sweep/lr=1'"
    ):
        runs.resolve("sweep/lr=2", tmp_path)


def test_missing_and_broken_files_are_ignored(tmp_path):
    run = runs.read(tmp_path)
    assert (run.attempts, run.rows, run.checkpoint, run.holder, run.total, run.step) == ([], [], None, None, None, 0)
    for name in ("attempts.jsonl", "metrics.jsonl", "jobs.jsonl", "config.yaml", "lock", "log.txt"):
        (tmp_path / name).write_bytes(b'\xff\x00{]: \n[1, 2]\n"x"\n12\n{"step"')
    run = runs.read(tmp_path)
    assert (run.attempts, run.rows, run.checkpoint, run.holder, run.total, run.step) == ([], [], None, None, None, 0)


def test_jobs_come_from_jobs_jsonl_and_from_attempts(tmp_path):
    make(tmp_path, [{"from_step": 0, "job_id": "12"}, {"from_step": 5, "job_id": 14}])
    for cluster, job in (("slurm", "12"), ("slurm", "13_1"), ("local", "999")):
        submissions.append(tmp_path, Submission(cluster, job, "host", 1, 1, ""))
    assert runs.read(tmp_path).jobs == ["12", "13_1", "14"]


def test_the_job_around_a_local_launch_is_not_the_runs(tmp_path):
    around = {"from_step": 0, "job_id": "7", "time": "2026-01-02T00:00:00+0000"}
    make(tmp_path, [around | {"launcher": "local"}])
    assert runs.read(tmp_path).jobs == []
    make(tmp_path, [around | {"launcher": "Slurm"}])
    assert runs.read(tmp_path).jobs == ["7"]  # srun by hand
    submissions.append(tmp_path, Submission("local", "999", "host", 1, 1, "", time="2026-01-01T00:00:00+0000"))
    assert runs.read(tmp_path).jobs == []  # srun by hpclm submit --interactive


def test_only_the_end_of_the_metrics_is_read(tmp_path):
    make(tmp_path)
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.truncate(1 << 40)  # a terabyte, if it were read
        file.seek(0, 2)
        file.write(b'\n{"step": 7, "loss": 1.5, "step_seconds": 2.0}\n{"step": 8, "lo')
    run = runs.read(tmp_path)
    assert run.step == 7 and run.steps == [{"step": 7, "loss": 1.5, "step_seconds": 2.0}]


def checkpoint(folder, processes=1, tensors=1):
    """A folder as a checkpoint is left, by names and sizes."""
    folder.mkdir(parents=True)
    files = {f"rank-{rank:05d}.safetensors": {"size": 100, "xxh3": "0" * 32} for rank in range(processes)}
    parts = {
        f"tensor-{number}": {"parts": [{"file": name, "start": [0, 0]} for name in files]} for number in range(tensors)
    }
    Manifest({"step": int(folder.name[5:])}, {}, {}, parts, files, {"processes": processes}).write(folder)
    for name in files:
        (folder / name).write_bytes(bytes(100))
    return folder


def test_the_newest_checkpoint_is_the_one_of_the_highest_step(tmp_path):
    for name in ("step-00000900", "step-100000000", ".bad-step-00000950", ".tmp-step-200000000", "latest"):
        checkpoint(tmp_path / "checkpoints" / name) if name[0] == "s" else (tmp_path / "checkpoints" / name).mkdir()
    run = runs.read(tmp_path)
    assert run.checkpoint and run.checkpoint[0] == 100000000 and run.bad == 1


def spoil(folder, what):
    manifest, first = folder / "MANIFEST.json", folder / "rank-00000.safetensors"
    text = manifest.read_text()
    if what == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    elif what == "a file":
        shutil.rmtree(folder)
        folder.touch()
    elif what == "no manifest":
        manifest.unlink()
    elif what == "a file gone":
        first.unlink()
    elif what == "a file cut":
        first.write_bytes(b"")
    elif what == "a folder for a file":
        first.unlink()
        first.mkdir()
    elif what == "a pipe for a manifest":
        manifest.unlink()
        os.mkfifo(manifest)
    else:
        manifest.write_text(text.replace(*what) if isinstance(what, tuple) else what)


SPOILT = ["empty", "a file", "no manifest", "a file gone", "a file cut", "a folder for a file", "a pipe for a manifest"]
TEXTS = [
    "",
    "[]",
    "{}",
    "[" * 5000,
    '{"files": {}}',
    ('"size": 100', '"size": "100"'),
    ('"size": 100', '"size": 1e400'),
]


@pytest.mark.parametrize("what", [*SPOILT, *TEXTS, ('"rank-00000.safetensors": {', '"../x": {')], ids=str)
def test_an_incomplete_checkpoint_is_not_the_newest(what, tmp_path):
    checkpoint(tmp_path / "checkpoints/step-00000100")
    spoil(checkpoint(tmp_path / "checkpoints/step-00000200"), what)
    found = runs.read(tmp_path).checkpoint
    assert found == (100, (tmp_path / "checkpoints/step-00000100").stat().st_mtime)


def test_a_manifest_may_be_long_and_without_line_breaks(tmp_path):
    folder = checkpoint(tmp_path / "checkpoints/step-00000100", processes=64, tensors=1200)
    path = folder / "MANIFEST.json"
    assert path.stat().st_size > 2 * saved.END and saved.complete(folder)
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert saved.complete(folder)
    (folder / "rank-00063.safetensors").unlink()
    assert not saved.complete(folder)


def test_what_the_store_has_saved_is_complete_and_a_thousand_that_are_not_cost_little_time(tmp_path):
    state.saved(tmp_path / "checkpoints", (1, 2))
    assert runs.read(tmp_path).checkpoint[0] == 2
    for step in range(10, 1010):
        (tmp_path / f"checkpoints/step-{step:08d}").mkdir()
        (tmp_path / f"checkpoints/step-{step:08d}/MANIFEST.json").write_text('{\n "files": {"a": {"size": 1}}\n}')
    times = []
    for _ in range(3):  # another process may have the core for a moment
        began = time.monotonic()
        assert runs.read(tmp_path).checkpoint[0] == 2
        times.append(time.monotonic() - began)
    assert min(times) < 0.3


@pytest.mark.parametrize(
    "budget, steps",
    {
        "steps: 50": 50,
        "samples: 100": 12,
        "tokens: 1610": 12,
        "{steps: 50, samples: 100}": 12,
        "hours: 2": None,
    }.items(),
)
def test_the_planned_steps_follow_from_the_budget_where_no_attempt_says_them(budget, steps, tmp_path):
    budget = budget if budget.startswith("{") else f"{{{budget}}}"
    text = f"budget: {budget}\nbatch: {{global_size: 8, rampup: null}}\nmodel: {{context: 16}}\n"
    make(tmp_path, config_yaml=text)
    assert runs.read(tmp_path).total == steps
    make(tmp_path, [{"from_step": 0, "steps": 77}])
    assert runs.read(tmp_path).total == 77
