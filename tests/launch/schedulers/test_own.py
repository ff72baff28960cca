"""A third scheduler needs one file, which is the user's own."""

import json
import os

from hpclm.launch.schedulers import of_job
from tests.forks import hpclm
from tests.runs import ROOT, lines, until


def test_code_that_another_user_s_run_directory_names_is_not_loaded():
    owners = {os.getuid(): "Own", os.getuid() + 1: "Slurm"}
    for owner, name in owners.items():
        assert type(of_job("tests.launch.schedulers.own:Own", "", owner)).__name__ == name


def test_a_scheduler_of_ones_own_submits_shows_and_cancels(tmp_path, tiny):
    env = os.environ | {"PYTHONPATH": str(ROOT), "HPCLM_SITE": "", "OMP_NUM_THREADS": "1"}
    out = tmp_path / "run"
    words = [*tiny("run", "budget.steps=1000000"), "job.cluster=tests.launch.schedulers.own:Own"]
    done = hpclm("submit", *words, "--dry-run", check=0, env=env)
    assert "-m hpclm.launch.job" in done.stdout and "it looks well" in done.stderr and not out.exists()
    done = hpclm("submit", *words, check=0, env=env)
    job = done.stdout.split()[1].rstrip(":")
    until(lambda: '"step": 3,' in "".join(lines(out / "metrics.jsonl")), "step 3")
    [status] = json.loads(hpclm("status", "--json", out, check=0, env=env).stdout)
    assert status["state"] == "running" and status["job"]["id"] == job
    assert f"job {job} (running)" in hpclm("submit", *words, check=75, env=env).stderr
    said = hpclm("cancel", out, check=0, env=env).stdout
    assert f"job {job}: asked to save and exit" in said and "saved at step" in said
    assert (
        "job.cluster 'nowhere:X' cannot be loaded"
        in hpclm("submit", *words[:-1], "job.cluster=nowhere:X", "--dry-run", check=64, env=env).stderr
    )
