import json
import os
import signal
import subprocess
import sys

import pytest

from tests.events import submit
from tests.forks import Hpclm, hpclm
from tests.rundir.test_runs import make
from tests.runs import PATIENCE, ROOT, lines, until
from tests.test_status import attempt, squeue  # noqa: F401 (a fixture)

AGAIN = """again() {
    until state=$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID"); do sleep 1; done
    [ "$state" != RUNNING ] || scontrol requeue "$SLURM_JOB_ID"
}
"""
END = """code=$?
[ $code != 85 ] || again
exit $code"""
SCRIPTS = {
    "srun": f"{AGAIN} srun -n1 --kill-on-bad-exit=1 COMMAND\n{END}",
    "a script alone": f"{AGAIN} COMMAND\n{END}",
    "mpirun": f"{AGAIN} export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\nmpirun --oversubscribe -n 1 COMMAND\n{END}",
}


def steps(out, count=3):
    """Wait until a run has done some steps."""
    until(lambda: len(lines(out / "metrics.jsonl")) >= count, f"step {count}")


def endless(tiny):
    return tiny("run", "budget.steps=100000", "checkpoint.every=0")


def test_a_local_run_saves_and_leaves_and_cancelling_again_changes_nothing(tmp_path, tiny):
    child = Hpclm("train", *endless(tiny))
    steps(tmp_path / "run")
    done = hpclm("cancel", tmp_path / "run", check=0)
    assert child.wait() == 85
    assert f"process {child.pid}: asked to save and exit" in done.stdout and "saved at step" in done.stdout
    assert "is not running: exited" in hpclm("cancel", tmp_path / "run", check=0).stdout


def test_now_ends_a_local_run_even_one_that_hangs(tmp_path, tiny):
    child = Hpclm("train", *endless(tiny))
    steps(tmp_path / "run")
    child.send_signal(signal.SIGSTOP)
    assert "--now" in hpclm("cancel", tmp_path / "run", "--wait", 1, check=1).stderr
    assert child.poll() is None
    said = hpclm("cancel", tmp_path / "run", "--now", check=0).stdout
    assert child.wait() == -9 and "nothing is saved" in said


def test_the_launching_process_is_told_and_not_the_one_that_trains(tmp_path):
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); print(1, flush=True); time.sleep(3600)"
    launcher = subprocess.Popen([sys.executable, "-c", code, "hpclm"], stdout=subprocess.PIPE)
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", "hpclm"])
    host = os.uname().nodename
    run = make(tmp_path / "a", [attempt(host=host, pid=rank.pid)])
    submit(run, "local", str(launcher.pid), host, 1, 2, "")
    try:
        launcher.stdout.readline()
        subprocess_done = hpclm("cancel", run, "--wait", 3600)
        assert launcher.wait(PATIENCE) == 0 and rank.poll() is None
        assert subprocess_done.returncode == 0
    finally:
        for child in (launcher, rank):
            child.kill()
            child.wait()
        launcher.stdout.close()


def test_a_process_that_only_has_the_number_of_a_run_is_left_alone(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        run = make(tmp_path / "a", [attempt(host=os.uname().nodename, pid=other.pid)])
        assert "is not running" in hpclm("cancel", run, check=0).stdout
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_run_of_another_host_is_not_called_cancelled(tmp_path):
    run = make(tmp_path / "a", [attempt()], lock='{"host": "elsewhere", "pid": 12}')
    assert "cancel it there: ssh elsewhere hpclm cancel" in hpclm("cancel", run, check=1).stderr


def test_without_an_answer_of_slurm_a_job_is_not_called_cancelled(tmp_path, squeue):  # noqa: F811
    run = make(tmp_path / "a", [attempt(job_id="7")])
    said = hpclm("cancel", run, env=squeue("echo 'Unable to contact' >&2; exit 1"), check=1).stderr
    assert "Unable to contact" in said and "Its last job is 7" in said


def by_hand(cluster, tiny, tmp_path, kind, *options):
    """A job that trains, submitted without hpclm; its number, once it has done some steps."""
    command = f"'{sys.executable}' -u -m hpclm.train " + " ".join(f"'{word}'" for word in endless(tiny))
    script = f"export OMP_NUM_THREADS=1\n{SCRIPTS[kind].replace('COMMAND', command)}"
    job = cluster.batch(
        script, "--requeue", f"--chdir={ROOT}", "--open-mode=append", f"--output={tmp_path}/job.log", *options
    )
    try:
        steps(tmp_path / "run")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{(tmp_path / 'job.log').read_text()}") from None
    return job


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.whole] * (kind == "a script alone")) for kind in SCRIPTS]
)
def test_a_job_saves_leaves_and_does_not_come_back(kind, cluster, tiny, tmp_path):
    job = by_hand(cluster, tiny, tmp_path, kind)
    out = tmp_path / "run"
    [told] = json.loads(hpclm("status", "--json", out, env=cluster.env, check=0).stdout)
    assert told["state"] == "running" and told["job"]["id"] == job
    done = hpclm("cancel", out, env=cluster.env, check=0)
    assert f"job {job}: asked to save and exit" in done.stdout
    assert cluster.show(job)["JobState"] == "FAILED" and cluster.show(job)["Requeue"] == "0"
    [told] = json.loads(hpclm("status", "--json", out, env=cluster.env, check=0).stdout)
    assert told["state"] == "exited" and told["checkpoint"] == told["step"] > 0
    assert "is not running" in hpclm("cancel", out, env=cluster.env, check=0).stdout


def test_a_pending_job_is_taken_out_of_the_queue(cluster, tmp_path):
    run = make(tmp_path / "a")
    job = cluster.batch("sleep 3600", "--hold", "--output=/dev/null")
    submit(run, "slurm", job, "login", 1, 1, "")
    done = hpclm("cancel", run, env=cluster.env, check=0)
    assert f"job {job}: cancelled" in done.stdout and cluster.state(job) == "CANCELLED"


def test_a_job_is_ended_at_once_when_it_is_told_now(cluster, tiny, tmp_path):
    job = by_hand(cluster, tiny, tmp_path, "srun")
    hpclm("cancel", "--now", tmp_path / "run", env=cluster.env, check=0)
    assert cluster.state(job) == "CANCELLED"
