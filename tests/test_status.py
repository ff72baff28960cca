import fcntl
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from hpclm.job import ledger
from hpclm.job.ledger import Submission
from tests.job.test_runs import checkpoint, make
from tests.runs import ROOT, hpclm

SLOW = "sleep 30"
RUNNING = "echo '7|RUNNING|1:02:03|22:57:57|2026-01-01T00:00:00|2|node[1-2]|None'"


@pytest.fixture
def squeue(tmp_path):
    """An environment with a squeue of one's own."""

    def put(script):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "squeue").write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "bin" / "squeue").chmod(0o755)
        (tmp_path / "bin" / "scontrol").write_text("#!/bin/bash\nexit 1\n")  # a real one may know jobs of these numbers
        (tmp_path / "bin" / "scontrol").chmod(0o755)
        return os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}

    return put


def now(offset=0.0):
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() + offset))


def attempt(**more):
    return {"time": now(), "from_step": 0, "host": "elsewhere", "pid": 1, "steps": 20, **more}


def rows(count):
    return [
        {"step": n, "loss": 3.0 - n / 10, "step_seconds": 2.0, "tokens_per_second": 100.0} for n in range(1, count + 1)
    ]


def status(*words, env=None, code=0):
    done = hpclm("status", "--json", *words, env=env, check=code)
    return json.loads(done.stdout)


def test_a_run_of_a_job_is_shown_with_its_queue_its_progress_and_the_time_left(tmp_path, squeue):
    run = make(tmp_path / "runs" / "a", [attempt(job_id="7")], rows(5))
    checkpoint(run / "checkpoints" / "step-00000004")
    (run / "checkpoints" / "step-00000005").mkdir()
    env = squeue(RUNNING)
    [found] = status(run, env=env)
    wanted = dict(
        state="running", step=5, total_steps=20, loss=2.5, tokens_per_second=100.0, seconds_left=30.0, checkpoint=4
    )
    assert {key: found[key] for key in wanted} == wanted and found["job"]["nodelist"] == "node[1-2]"
    said = hpclm("status", "a", "--runs", tmp_path / "runs", env=env, check=0).stdout
    assert "job 7 RUNNING for 1:02:03 on node[1-2]" in said and "5 of 20, 25%, 30 s left" in said
    table = hpclm("status", "--runs", tmp_path / "runs", env=env, check=0).stdout.splitlines()
    assert table[0].split()[:3] == ["RUN", "STATE", "STEP"] and table[1].split()[1:3] == ["running", "5/20"]


def test_a_waiting_job_says_why_it_waits(tmp_path, squeue):
    make(tmp_path / "a")
    ledger.append(tmp_path / "a", Submission("slurm", "8", "login", 2, 4, "logs/job-8.log"))
    [found] = status(tmp_path / "a", env=squeue("echo '8|PENDING|0:00|2:00|2026-01-01T00:00:00|2||Priority'"))
    assert (found["state"], found["job"]["reason"]) == ("waiting", "Priority")


@pytest.mark.parametrize("script", [SLOW, "yes", "echo garbage", "exit 1", None], ids=str)
def test_whatever_squeue_does_the_rest_is_told_within_a_second(script, tmp_path, squeue):
    for number in range(100):
        run = make(tmp_path / "runs" / str(number), [attempt(job_id="7")], rows(5))
        with (run / "metrics.jsonl").open("r+b") as file:
            tail = file.read()
            file.seek(100 << 20)  # 100 MB, most of which is a hole
            file.write(b"\n" + tail)
        (run / "log.txt").write_text("2026-01-01 10:00:00,000 E rank 1 on node2 failed\n" if number == 3 else "")
        (run / "lock").write_text("" if number == 3 else '{"host": "elsewhere", "pid": 1}')
    env = squeue(script) if script else os.environ | {"PATH": "/nowhere"}
    times = []
    for _ in range(3):  # another process may have the core for a moment
        began = time.monotonic()
        found = status("--runs", tmp_path / "runs", env=env)
        times.append(time.monotonic() - began)
    assert len(found) == 100 and all(each["step"] == 5 and "unknown" in each["queue"] for each in found)
    assert {each["state"] for each in found} == {"running", "failed"}  # by their own files
    assert min(times) < 1.0


def test_a_local_run_is_alive_while_it_holds_its_lock(tmp_path, tiny):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "hpclm", "train", *tiny("run", "budget.steps=100000")]
    child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        while not (out / "metrics.jsonl").exists():
            assert child.poll() is None
            time.sleep(0.1)
        found = status(out)[0]
        assert found["process"] == child.pid and found["state"] in ("starting", "running")
    finally:
        child.kill()
        child.wait()
    found = status(out)[0]
    assert (found["state"], found["process"]) == ("ended", None) and "without a word" in found["ending"]
    child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    while status(out)[0]["state"] != "running":
        assert child.poll() is None
    child.terminate()
    assert child.wait(60) == 85
    found = status(out)[0]
    assert found["state"] == "left" and found["checkpoint"] == found["step"] > 0


def test_a_run_that_is_done_says_so(tmp_path, tiny):
    hpclm("train", *tiny("run"), check=0)
    [found] = status(tmp_path / "run")
    assert (found["state"], found["step"], found["total_steps"], found["checkpoint"]) == ("done", 12, 12, 12)


def test_how_an_attempt_failed_is_told_in_its_log_s_words(tmp_path, tiny):
    wild = ["optim.lr=1e30", "optim.min_lr=1e30", "optim.clip=0", "optim.schedule=constant", "optim.nonfinite=stop"]
    hpclm("train", *tiny("run", *wild), check=93)
    [found] = status(tmp_path / "run")
    assert found["state"] == "failed" and "finite" in found["ending"]


@pytest.mark.parametrize(
    "line, state",
    [
        ("slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2026-01-01T10:00:00 DUE TO TIME LIMIT ***", "ended"),
        ("error: data.prefix is not set", "failed"),
        ("10:00:00 W SIGUSR2: saved at step 5 and leaving; the same command goes on from here", "left"),
        ("10:00:00 I done at step 5, 40 samples; next: ls", "done"),
    ],
)
def test_the_job_s_log_says_how_it_ended_where_the_run_s_own_does_not(line, state, tmp_path, squeue):
    run = make(tmp_path / "a", [attempt(job_id="7")], rows(5), lock='{"host": "elsewhere", "pid": 1}')
    os.utime(run / "metrics.jsonl", (1, 1))
    (run / "logs").mkdir()
    (run / "logs" / "job-7.log").write_text(
        f"10:00:00 I run directory a, a new run\n{line}\nsrun: error: node1: task 0: x\n"
    )
    [found] = status(run, env=squeue("true"))
    assert found["state"] == state and found["ending"].split()[-1] in line


def test_the_cause_is_the_last_line_of_a_traceback_and_no_error_that_training_survived(tmp_path):
    step = "2026-01-01 10:00:01,000 I step 5/20  loss 1.0  lr 1  1 tokens/s"
    log = f"""2026-01-01 10:00:00,000 I run directory a, a new run
2026-01-01 10:00:00,500 E checkpoint could not be saved; training goes on
{step}
"""
    run = make(tmp_path / "a", [attempt()], rows(5), log_txt=log, lock="")
    assert status(run)[0]["state"] == "left"
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\nValueError: no luck\n'
    (run / "log.txt").write_text(f"{log}2026-01-01 10:00:02,000 E rank 3 on node2 (pid 5) failed: {trace}")
    [found] = status(run)
    assert (found["state"], found["ending"]) == ("failed", "rank 3 on node2 (pid 5) failed: ValueError: no luck")


def test_a_silent_run_a_loss_that_is_not_finite_and_a_crash_loop_are_warned_of(tmp_path, squeue):
    run = make(
        tmp_path / "a", [attempt(time=now(-5000), job_id="7", from_step=3)] * 3, rows(5) + [{"step": 6, "loss": None}]
    )
    os.utime(run / "metrics.jsonl", (time.time() - 4000,) * 2)
    (run / "checkpoints" / ".bad-step-00000004").mkdir(parents=True)
    env = squeue(RUNNING)
    found = " ".join(status(run, env=env)[0]["warnings"])
    assert "no step for 1 h 06 min" in found and "loss of step 6 is not finite" in found and "1 bad checkpoint" in found
    make(run, [attempt(job_id="7", from_step=6)] * 3)
    assert "three attempts from step 6 without a step" in " ".join(status(run, env=squeue("true"))[0]["warnings"])


def test_a_lock_that_is_held_is_not_taken_by_looking(tmp_path):
    run = make(tmp_path / "a", [attempt(host=socket.gethostname())])
    with (run / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert status(run)[0]["process"] == os.getpid()


def test_without_runs_it_says_where_it_looked(tmp_path):
    assert "no run in runs" in hpclm("status", cwd=tmp_path, check=0).stdout
    assert "no run directory" in hpclm("status", "x", cwd=tmp_path, check=64).stderr


def test_status_loads_no_heavy_library():
    code = "import sys, hpclm.status, hpclm.logs, hpclm.cancel, hpclm.resume; print({'torch', 'numpy', 'omegaconf'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
