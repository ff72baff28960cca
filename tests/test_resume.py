import os
import subprocess
import sys

from hpclm import resume
from hpclm.job import ledger, runs
from hpclm.job.ledger import Submission
from tests.job.test_runs import make
from tests.runs import ROOT, hpclm
from tests.test_cancel import endless, steps
from tests.test_status import attempt, squeue  # noqa: F401 (a fixture)


def test_a_run_that_waits_or_runs_is_not_started_twice(tmp_path, tiny, squeue):  # noqa: F811
    run = make(tmp_path / "a", [attempt(job_id="7")], config_yaml="")
    said = hpclm("resume", run, env=squeue("echo '7|PENDING|0:00|2:57|N/A|2||Priority'"), check=75).stderr
    assert f"is waiting (job 7 PENDING (Priority)); wait for it, or end it: hpclm cancel {run}" in said
    child = subprocess.Popen(
        [sys.executable, "-m", "hpclm", "train", *endless(tiny)], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        steps(tmp_path / "run")
        assert "is running" in hpclm("resume", tmp_path / "run", check=75).stderr
    finally:
        child.kill()
        child.wait()


def test_a_run_that_is_done_is_not_started_without_more_to_do(tmp_path, tiny):
    hpclm("train", *tiny("run"), check=0)
    assert (
        "is done: done at step 12, 96 samples; to go on, give it more"
        in hpclm("resume", tmp_path / "run", check=64).stderr
    )


def test_a_run_is_submitted_again_by_its_own_settings_and_its_last_size(tmp_path):
    make(tmp_path, config_yaml="")
    config = str(tmp_path / "config.yaml")
    for nodes in (1, 2):
        ledger.append(tmp_path, Submission("slurm", str(nodes), "login", nodes, 8, ""))
    run = runs.read(tmp_path)
    again = ["--config", config, "--cluster", "slurm", "--nodes", "2", "--gpus", "8", f"out={tmp_path}"]
    assert resume.words(run, []) == again
    changes = ["--nodes=4", "--partition", "long", "job.gpus=4", "optim.lr=1e-4"]
    assert resume.words(run, changes) == [*again[:4], f"out={tmp_path}", *changes]


def test_a_run_that_was_started_by_hand_keeps_its_size(tmp_path):
    make(tmp_path, [attempt(size=8, hosts=["a", "b"])], config_yaml="")
    assert resume.words(runs.read(tmp_path), [])[2:6] == ["--nodes", "2", "--gpus", "4"]


def test_a_run_that_never_wrote_its_settings_cannot_be_resumed(tmp_path):
    run = make(tmp_path / "a", [attempt(host=os.uname().nodename)])
    assert "has no config.yaml" in hpclm("resume", run, check=64).stderr
