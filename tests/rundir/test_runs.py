"""What a run directory tells, read from the files that a run leaves: the helpers here write them by hand."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from hpclm.base.errors import ConfigError
from hpclm.checkpoint.manifest import Manifest, Progress
from hpclm.rundir import runs
from hpclm.rundir.summary import RunSummary
from tests import work
from tests.events import note, submit


def make(folder, attempts=(), rows=(), ended=None, summary=True, **files):
    """A run directory. ``ended``: state, ending, exit code and perhaps whether it is over, if the run said so; without ``summary``: it has lost its summary.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").touch()
    for each in attempts:
        note(folder, "began", **each)
    if rows:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    if attempts and summary:
        kept = RunSummary(folder)
        kept.begin(attempts[-1], attempts[-1].get("steps"))
        for row in rows:
            kept.measured({"time": time.time(), **row})
        if ended:
            kept.end(*ended)
        kept.write()
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def checkpoint(folder, processes=1, tensors=1):
    """A folder as a checkpoint is left, by names and sizes."""
    folder.mkdir(parents=True)
    files = {f"rank-{rank:05d}.safetensors": {"size": 100, "xxh3": "0" * 32} for rank in range(processes)}
    parts = {
        f"tensor-{number}": {"parts": [{"file": name, "start": [0, 0]} for name in files]} for number in range(tensors)
    }
    Manifest(
        vars(Progress(int(folder.name[5:]))) | {"health": None}, {}, {}, parts, files, {"processes": processes}
    ).write(folder)
    for name in files:
        (folder / name).write_bytes(bytes(100))
    return folder


def test_run_directories_are_found_by_their_files_and_not_searched_further(tmp_path):
    make(tmp_path / "a")
    make(tmp_path / "sweep" / "lr=1")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "events.jsonl").touch()
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
        ConfigError,
        match=r"sweep/lr=2 is not a run directory: it does not exist; .* has sweep/lr=1\. Did you mean 'sweep/lr=1'",
    ):
        runs.resolve("sweep/lr=2", tmp_path)


def test_runs_are_looked_for_three_folders_down_and_the_first_twenty_are_named(tmp_path):
    make(tmp_path / "1/2/3")
    make(tmp_path / "1/2/4/5")
    assert runs.find(tmp_path) == [tmp_path / "1/2/3"]
    many = tmp_path / "many"
    for number in range(21):
        make(many / f"run-{number:02}")
    names = ", ".join(f"run-{number:02}" for number in range(20))
    with pytest.raises(ConfigError, match=rf"^zzz is not a run directory: it does not exist; \S+ has {names}, …\.$"):
        runs.resolve("zzz", many)
    assert len(runs.choose(["run-0*", "run-01", str(many / "run-20")], many)) == 11
    with pytest.raises(ConfigError, match="no run directory matches 'zzz-\\*', neither here nor in"):
        runs.choose(["zzz-*"], many)


def test_the_log_of_a_run_that_has_not_trained_is_that_of_its_newest_job(tmp_path):
    assert runs.read_run(make(tmp_path)).job_log() is None
    (tmp_path / "logs").mkdir()
    for name, age in (("job-7.log", 5), ("job-9.log", 20), ("rank-00001.log", 0)):
        (tmp_path / "logs" / name).touch()
        os.utime(tmp_path / "logs" / name, (1e9 - age,) * 2)
    assert runs.read_run(tmp_path).job_log() == tmp_path / "logs/job-7.log"


def test_a_checkpoint_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    run = make(tmp_path / "runs/a")
    checkpoint(run / "checkpoints/step-00000004")
    assert runs.located(Path("a"), tmp_path / "runs") == run == runs.located(run, tmp_path)
    with pytest.raises(ConfigError, match=r"step-5 does not exist; .*/checkpoints has step-00000004$"):
        runs.located(Path("a/checkpoints/step-5"), tmp_path / "runs")


def test_missing_and_broken_files_tell_nothing(tmp_path):
    for damage in ("", f"{tmp_path}/events.jsonl, line 1, is damaged: "):
        run = runs.read_run(tmp_path)
        assert (run.attempt, run.summary, run.checkpoint, run.holder, run.total, run.step) == ({}, {}, *(None,) * 3, 0)
        assert run.damage.startswith(damage) and bool(run.damage) == bool(damage)
        for name in ("events.jsonl", "metrics.jsonl", "summary.json", "lock", "log.txt"):
            (tmp_path / name).write_bytes(b'\xff\x00{]: \n[1, 2]\n"x"\n12\n{"step"')


def test_jobs_come_from_submissions_and_from_attempts(tmp_path):
    make(tmp_path, [{"from_step": 0, "job_id": "12"}, {"from_step": 5, "job_id": 14}])
    for cluster, job in (("slurm", "12"), ("slurm", "13_1"), ("local", "999")):
        submit(tmp_path, cluster, job, "host", 1, 1, "")
    assert runs.read_run(tmp_path).jobs == ["12", "13_1", "14"]


def test_the_job_around_a_local_launch_is_not_the_runs(tmp_path):
    around = {"from_step": 0, "job_id": "7", "time": "2026-01-02T00:00:00+0000"}
    make(tmp_path, [around | {"launcher": "local"}])
    assert runs.read_run(tmp_path).jobs == []
    (tmp_path / "events.jsonl").unlink()
    make(tmp_path, [around | {"launcher": "Slurm"}])
    assert runs.read_run(tmp_path).jobs == ["7"]  # srun by hand
    (tmp_path / "events.jsonl").unlink()
    submit(tmp_path, "local", "999", "host", 1, 1, "")
    make(tmp_path, [around | {"launcher": "Slurm"}])
    assert runs.read_run(tmp_path).jobs == []  # srun by hpclm submit --interactive


def test_a_run_without_a_summary_is_known_from_its_attempts(tmp_path):
    attempts = [{"from_step": 0, "steps": 20}, {"from_step": 4, "steps": 20, "host": "elsewhere", "pid": 1}]
    run = runs.read_run(make(tmp_path, attempts, summary=False))
    assert (run.step, run.total, run.summary) == (4, 20, {})
    assert {name: run.attempt[name] for name in attempts[-1]} == attempts[-1]


KILLED = {"code": 137, "cause": "rank 1 was killed", "restart": 0}
SAVED = {"state": "exited", "code": 85, "ending": "SIGTERM: saved at step 5", "generation": 1}
LATE = {"state": "failed", "code": 1, "ending": "it lost a connection", "generation": 1}
REFUSED = {"state": "failed", "code": 64, "ending": "preflight: no room", "generation": 2}
ENDS = {
    "nothing says how": ([], {}),
    "a rank": ([SAVED], SAVED),
    "the first rank that knew": ([SAVED, LATE], SAVED),
    "what had started the ranks, which were killed": ([KILLED], KILLED),
    "a rank, and then what had started it": ([SAVED, KILLED], SAVED),
    "a rank, after what had started it": ([KILLED, LATE], LATE),
    "a later start, which did not begin to train": ([SAVED, REFUSED], REFUSED),
    "a later start of the job, whose ranks never came so far": (
        [SAVED, KILLED | {"restart": 1}],
        KILLED | {"restart": 1},
    ),
    "a rank of the attempt before, which was paused": ([{**LATE, "generation": 0}], {}),
}


@pytest.mark.parametrize("ends, wanted", ENDS.values(), ids=ENDS)
def test_the_end_of_a_run_is_what_knows_best_about_its_last_start(ends, wanted, tmp_path):
    make(tmp_path, [{"from_step": 0, "generation": 1, "restart": 0}], summary=False)
    for end in ends:
        note(tmp_path, "ended", **end)
    run = runs.read_run(tmp_path)
    assert {name: run.end[name] for name in wanted} == wanted and bool(run.end) == bool(wanted)
    assert run.step == (wanted.get("step") or 0)


@pytest.mark.parametrize("kinds, trained", [("sb", True), ("bs", False), ("sbs", False), ("b", True), ("", True)])
def test_a_launch_has_trained_if_an_attempt_began_after_it(kinds, trained, tmp_path):
    for kind in kinds:
        submit(tmp_path, "local", "999") if kind == "s" else note(tmp_path, "began", from_step=0)
    assert runs.read_run(tmp_path).trained == trained


@pytest.mark.parametrize("job, trained", [("7", False), ("8", True)])
def test_a_job_has_trained_if_the_last_attempt_is_its_own(job, trained, tmp_path):
    for submitted in ("7", "8"):
        submit(tmp_path, "slurm", submitted)
    note(tmp_path, "began", job_id=job)
    assert runs.read_run(tmp_path).trained == trained


def test_the_newest_checkpoint_is_the_one_of_the_highest_step_and_a_thousand_broken_ones_cost_little(tmp_path):
    folder = tmp_path / "checkpoints"
    checkpoint(folder / "step-00000900")
    checkpoint(folder / "step-100000000")
    for name in (".bad-step-00000950", ".tmp-step-200000000", "latest"):
        (folder / name).mkdir()
    run = runs.read_run(tmp_path)
    assert run.checkpoint == (100000000, (folder / "step-100000000/MANIFEST.json").stat().st_mtime) and run.bad == 1
    (folder / "step-100000001").touch()
    for step in range(100000002, 100001002):
        (folder / f"step-{step}").mkdir()
    (folder / "step-100001002").mkdir()
    os.mkfifo(folder / "step-100001002" / "MANIFEST.json")
    shutil.copy(folder / "step-00000900" / "MANIFEST.json", folder / ".tmp-step-200000000")
    assert runs.read_run(tmp_path).checkpoint[0] == 100000000
    assert work.calls(lambda: runs.read_run(tmp_path)) < 20_000  # some for each name, but no folder is looked into


def test_the_planned_steps_are_those_of_the_last_attempt_or_of_a_later_submission(tmp_path):
    make(tmp_path, config_yaml="")
    submit(tmp_path, "slurm", "7", "host", 1, 1, "", steps=50)
    assert runs.read_run(tmp_path).total == 50
    make(tmp_path, [{"from_step": 0, "steps": 77, "job_id": "7"}])
    assert runs.read_run(tmp_path).total == 77
    submit(tmp_path, "slurm", "8", "host", 1, 1, "", steps=99)
    assert runs.read_run(tmp_path).total == 99
