import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest

from hpclm.base import files
from hpclm.rundir.lease import Lease
from tests import forks, traced
from tests.events import note, submit
from tests.forks import Hpclm
from tests.rundir.test_runs import checkpoint, make
from tests.runs import PATIENCE, ROOT

SLOW = "sleep 3600"
RUNNING = "echo '7|RUNNING|1:02:03|22:57:57|2026-01-01T00:00:00|2|node[1-2]|None'"


@pytest.fixture
def squeue(tmp_path):
    """An environment with a squeue of one's own."""
    forks.ready()  # or the files of a run that seems to be alive would be old before anybody looks at them

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


def patient():
    """Let Slurm take as long to answer as a busy machine makes it."""
    from hpclm.commands import status, top

    status.MIN_SECONDS = top.PATIENCE = PATIENCE


def hpclm(*words, before=patient, **more):
    return forks.hpclm(*words, before=before, **more)


def status(*words, code=0, **more):
    return json.loads(hpclm("status", "--json", *words, check=code, **more).stdout)


def test_a_run_of_a_job_is_shown_with_its_queue_its_progress_and_the_time_left(tmp_path, squeue):
    run = make(tmp_path / "runs" / "a", [attempt(job_id="7")], rows(5))
    checkpoint(run / "checkpoints" / "step-00000004")
    (run / "checkpoints" / "step-00000005").mkdir()
    env = squeue(RUNNING)
    [row] = status(run, env=env)
    wanted = dict(
        state="running", step=5, total_steps=20, loss=2.5, tokens_per_second=100.0, seconds_left=30.0, checkpoint=4
    )
    assert {key: row[key] for key in wanted} == wanted and row["job"]["nodelist"] == "node[1-2]"
    said = hpclm("status", "a", "--runs", tmp_path / "runs", env=env, check=0).stdout
    assert (
        "job 7 RUNNING for 1:02:03 on node[1-2]" in said and "step        5/20" in said and "left        30 s" in said
    )
    table = hpclm("status", "--runs", tmp_path / "runs", env=env, check=0).stdout.splitlines()
    assert table[0].split()[:3] == ["RUN", "STATE", "STEP"] and table[1].split()[1:3] == ["running", "5/20"]


@pytest.mark.parametrize("age, state", [(5, "running"), (60, "unknown")])
def test_a_run_that_only_its_files_show_is_running_while_its_heart_beats(age, state, tmp_path):
    run = make(tmp_path / "a", [attempt()], rows(5), lock='{"host": "elsewhere", "pid": 1}', lock_beat="1 7")
    os.utime(run / "lock.beat", (time.time() - age,) * 2)
    [row] = status(run)
    assert row["state"] == state
    assert "process 1 on elsewhere, according to its files" in hpclm("status", run, check=0).stdout


def test_a_waiting_job_says_why_it_waits(tmp_path, squeue):
    make(tmp_path / "a")
    submit(tmp_path / "a", "slurm", "8", "login", 2, 4, "logs/job-8.log")
    [row] = status(tmp_path / "a", env=squeue("echo '8|PENDING|0:00|2:00|2026-01-01T00:00:00|2||Priority'"))
    assert (row["state"], row["job"]["reason"]) == ("waiting", "Priority")


def test_a_done_run_of_a_job_by_hand_has_left_that_job(tmp_path, squeue):
    run = make(tmp_path / "a", [attempt(job_id="7")], rows(5), ("done", "done at step 5", 0), lock="")
    [row] = status(run, env=squeue(RUNNING))
    assert (row["state"], row["job"]) == ("done", None)


def test_a_run_that_trains_is_running_while_its_next_job_waits(tmp_path, squeue):
    run = make(tmp_path / "a", [attempt(job_id="7")], rows(5))
    for job in "78":
        submit(run, "slurm", job, "login", 2, 4, "")
    [row] = status(run, env=squeue(f"{RUNNING}; echo '8|PENDING|0:00|2:00|N/A|2||Dependency'"))
    assert (row["state"], row["job"]["id"], row["step"]) == ("running", "7", 5)


@pytest.mark.parametrize("name, live", [("script-1/.submission_file_0.sh", True), ("script-10.sbatch", False)])
def test_a_job_of_another_cluster_with_the_same_number_is_not_the_run_s(name, live, tmp_path, squeue):
    run = make(tmp_path / "a", [attempt(job_id="7")], rows(5), ("done", "done at step 5", 0), lock="")
    submit(run, "slurm", "7", "login", 2, 4, "", f"{run}/job/script-1.sbatch")
    env = squeue(f"{RUNNING}'|{run}/job/{name}'")
    [row] = status(run, env=env)
    assert (row["state"], row["job"] is not None) == ("completing" if live else "done", live)
    if not live:
        assert "is not running" in hpclm("cancel", run, env=env, check=0).stdout


@pytest.mark.parametrize("script", [SLOW, "yes", "echo garbage", "exit 1", None], ids=str)
def test_whatever_squeue_does_the_rest_is_told_within_a_second(script, tmp_path, squeue):
    for number in range(100):
        failed = ("failed", "rank 1 on node2 failed", 1) if number == 3 else None
        run = make(tmp_path / "runs" / str(number), [attempt(job_id="7")], rows(5), failed, lock_beat="1 1\n")
        (run / "lock").write_text("" if number == 3 else '{"host": "elsewhere", "pid": 1}')
    env = squeue(script) if script else os.environ | {"PATH": "/nowhere"}
    listed = status("--runs", tmp_path / "runs", env=env, before=None)
    assert len(listed) == 100 and all(each["step"] == 5 and "unknown" in each["queue"] for each in listed)
    assert {each["state"] for each in listed} == {"running", "failed"}  # by their own files
    if script in (SLOW, "yes"):
        [waited] = {float(re.search(r"did not answer within (\S+) s", each["queue"])[1]) for each in listed}
        assert waited < 1.0


def test_a_local_run_is_alive_while_it_holds_its_lock(tmp_path, tiny):
    out = tmp_path / "run"
    words = tiny("run", "budget.steps=100000")
    with Hpclm("train", *words) as child:
        forks.steps(child, out, 1)
        row = status(out)[0]
        assert row["process"] == child.pid and row["state"] in ("starting", "running")
    row = status(out)[0]
    assert (row["state"], row["process"]) == ("ended", None) and "without a message" in row["ending"]
    with Hpclm("train", *words) as child:
        while status(out)[0]["state"] != "running":
            assert child.poll() is None
        child.terminate()
        assert child.wait() == 85
    row = status(out)[0]
    assert row["state"] == "exited" and row["checkpoint"] == row["step"] > 0


@pytest.mark.parametrize("killed", [0, 1])
def test_whichever_rank_is_killed_status_says_that_the_run_has_failed_and_who(killed, tmp_path, tiny):
    out = tmp_path / "run"
    with forks.Ranks(2, tiny("run", "budget.steps=100000", "cluster.preflight=false", "log.every=1")) as ranks:
        ranks.wait_for(out, 3)
        ranks.processes[killed].kill()
        ranks.wait()
    [row] = status(out)
    assert row["state"] == "failed" and f"rank {killed} on " in row["ending"]
    assert row["step"] >= 1 and row["exit_code"] == 1


def test_a_run_that_is_done_says_so(tmp_path, tiny):
    hpclm("train", *tiny("run"), check=0)
    [row] = status(tmp_path / "run")
    assert (row["state"], row["step"], row["total_steps"], row["checkpoint"]) == ("done", 12, 12, 12)
    assert (row["ending"], row["exit_code"]) == ("done at step 12, 96 samples", 0)


def test_how_an_attempt_failed_is_told_in_its_own_words(tmp_path, tiny):
    wild = ["optim.lr=1e30", "optim.min_lr=1e30", "optim.clip=0", "optim.schedule=constant", "optim.nonfinite_limit=1"]
    hpclm("train", *tiny("run", *wild), check=93)
    [row] = status(tmp_path / "run")
    assert (row["state"], row["exit_code"]) == ("failed", 93) and "finite" in row["ending"]
    assert (
        f"hpclm logs {tmp_path}/run · the log ends with what to change\n"
        in hpclm("status", tmp_path / "run", check=0).stdout
    )


def test_a_run_that_was_killed_has_the_cause_that_its_supervisor_saw_and_the_last_lines_of_its_log(tmp_path, squeue):
    run = make(tmp_path / "a", [attempt(job_id="7", restart=0)], rows(5), lock='{"host": "elsewhere", "pid": 1}')
    (run / "logs").mkdir()
    (run / "logs" / "job-7.log").write_text("".join(f"line {number}\n" for number in range(9)))
    known = "echo '7|NODE_FAIL|0:10|0:00|2026-01-01T00:00:00|1|node1|None'"
    [row] = status(run, env=squeue(known))
    killed = "ended without a message: killed, or its node failed; job 7 NODE_FAIL"
    assert (row["state"], row["ending"], row["exit_code"]) == ("ended", killed, None)
    note(run, "ended", code=137, cause="rank 1 was killed", signal=9, job_id="7", restart=0)
    env = squeue("true")
    [row] = status(run, env=env)
    assert (row["state"], row["ending"], row["exit_code"]) == ("ended", "rank 1 was killed", 137)
    said = hpclm("status", run, env=env, check=0).stdout
    assert re.findall("line .", said) == [f"line {number}" for number in range(4, 9)]


def test_a_silent_run_with_a_loss_that_is_not_finite_is_warned_of(tmp_path, squeue):
    last = {"step": 6, "loss": None, "spiking_since": 4, "time": time.time() - 4000}
    run = make(tmp_path / "a", [attempt(time=now(-5000), job_id="7", from_step=3)], [*rows(5), last])
    (run / "checkpoints" / ".bad-step-00000004").mkdir(parents=True)
    env = squeue(RUNNING)
    warnings = " ".join(status(run, env=env)[0]["warnings"])
    assert "no step for 1 h 06 min" in warnings and "1 bad checkpoint" in warnings
    assert "loss spike since step 4" in warnings and "hpclm checkpoints" not in warnings  # there is none
    assert "not finite" in hpclm("status", run, env=env, check=0).stdout


def test_a_lock_that_is_held_is_not_taken_by_looking(tmp_path):
    run = make(tmp_path / "a", [attempt(host=socket.gethostname())])
    with Lease(run):
        assert status(run)[0]["process"] == os.getpid()


def test_without_runs_it_says_where_it_looked(tmp_path):
    assert "no run in runs" in hpclm("status", cwd=tmp_path, check=0).stdout
    assert "not a run directory" in hpclm("status", "x", cwd=tmp_path, check=64).stderr


@pytest.mark.skipif(not traced.usable(), reason="strace is not installed, or may not trace")
@pytest.mark.parametrize("error", ["ESTALE", "EACCES"])
def test_a_run_on_a_disk_that_is_gone_hides_no_other(error, tmp_path):
    for name in ("gone", "here"):
        make(tmp_path / name, [attempt()], rows(5), log_txt="", config_yaml="")
        checkpoint(tmp_path / name / "checkpoints" / "step-00000004")
    names = ["config.yaml", "summary.json", "events.jsonl", "metrics.jsonl", "log.txt", "checkpoints", "lock"]
    paths = [word for name in names for word in ("-P", str(tmp_path / "gone" / name))]
    fault = ["-e", f"inject=openat,newfstatat,getdents64,read:error={error}"]
    command = ["strace", "-f", "-qq", "-o", str(tmp_path / "calls"), *paths, *fault]
    command += [sys.executable, "-m", "hpclm", "status", "--runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "") and "(INJECTED)" in (tmp_path / "calls").read_text()
    gone, here = done.stdout.splitlines()[1:]
    assert gone.split()[0] == f"{tmp_path}/gone" and here.split()[2] == "5/20"


@pytest.mark.parametrize("number, code", [("ESTALE", 1), ("EIO", 1), ("ENOSPC", 1), ("EACCES", 64), ("ELOOP", 64)])
def test_a_fault_of_a_disk_or_of_its_rights_is_one_line(number, code):
    fault = f"raise OSError(errno.{number}, os.strerror(errno.{number}), '/disk/file')"
    verb = f"import errno, os, sys\nfrom hpclm.node import failures\ndef verb(_):\n    {fault}\nsys.exit(failures.run(verb, []))"
    done = subprocess.run([sys.executable, "-c", verb], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == code and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"error: /disk/file: {os.strerror(getattr(errno, number))}; ")


def test_status_loads_no_heavy_library():
    code = "import sys, hpclm.commands.status, hpclm.commands.top, hpclm.commands.logs, hpclm.commands.resume; print({'torch', 'numpy', 'omegaconf'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def submitted(run, *jobs, log=True):
    """A run directory in which these jobs of Slurm were submitted, the last of which has (or has not) a log."""
    (run / "logs").mkdir(exist_ok=True)
    for job in jobs:
        log_path = str(run / "logs" / f"job-{job}.log")
        submit(run, "slurm", job, "login", 1, 1, log_path, steps=12)
        if log or job != jobs[-1]:
            (run / "logs" / f"job-{job}.log").write_text(f"start 1 of job {job} of Slurm, on node1\n")
    return run


@pytest.mark.parametrize(
    "known", ["8|FAILED|0:01|0:00|2026-01-01T00:01:00|1|node1|NonZero", ""], ids=["known", "forgotten"]
)
def test_a_last_job_that_failed_before_training_is_not_hidden_behind_done(known, tmp_path, squeue):
    run = make(tmp_path / "a", config_yaml="")
    submitted(run, "7")
    make(run, [attempt(job_id="7", steps=5)], rows(5), ("done", "done at step 5, 40 samples", 0))
    submitted(run, "8")
    note(run, "ended", code=64, cause="data.prefix is not set", job_id="8", restart=0)
    [row] = status(run, env=squeue(f"echo '{known}'" if known else "true"))
    ending = "data.prefix is not set" + "; job 8 FAILED (NonZero)" * bool(known)
    assert (row["state"], row["ending"], row["exit_code"]) == ("failed", ending, 64)


CANCELLED = {"kind": "cancelled", "by": "ada"}
FAULT = {"kind": "ended", "code": 64, "cause": "no data", "restart": 0}
SIGNALLED = {"kind": "ended", "code": 85, "cause": "SIGTERM during the start", "restart": 0}
KILLED = {"kind": "ended", "code": 137, "cause": "the launcher was killed"}
BEFORE = "before training started"
STARTS = {
    "cancelled in the queue": (
        "slurm",
        [CANCELLED],
        "CANCELLED",
        "cancelled",
        f"its job was cancelled by ada {BEFORE}",
    ),
    "cancelled, and forgotten by Slurm": (
        "slurm",
        [CANCELLED],
        "",
        "cancelled",
        f"its job was cancelled by ada {BEFORE}",
    ),
    "cancelled while it starts": (
        "slurm",
        [CANCELLED, SIGNALLED],
        "",
        "cancelled",
        f"its job was cancelled by ada {BEFORE}",
    ),
    "scancel": ("slurm", [], "CANCELLED", "cancelled", f"its job was cancelled {BEFORE}"),
    "scancel, and forgotten by Slurm": ("slurm", [], "", "ended", f"its job ended {BEFORE}; nothing says how"),
    "signalled": ("slurm", [SIGNALLED], "FAILED", "exited", "SIGTERM during the start"),
    "preempted": ("slurm", [SIGNALLED], "PREEMPTED", "exited", "SIGTERM during the start; job 8 PREEMPTED"),
    "killed by the time limit": ("slurm", [], "TIMEOUT", "failed", f"ended {BEFORE}; job 8 TIMEOUT"),
    "its script failed": ("slurm", [], "FAILED", "failed", f"ended {BEFORE}; job 8 FAILED"),
    "a fault": ("slurm", [FAULT], "FAILED", "failed", "no data; job 8 FAILED"),
    "a fault, and forgotten by Slurm": ("slurm", [FAULT], "", "failed", "no data"),
    "a fault of a later start": ("slurm", [SIGNALLED, {**FAULT, "restart": 1}], "", "failed", "no data"),
    "a launch that is cancelled": ("local", [CANCELLED], "", "cancelled", f"its start was cancelled by ada {BEFORE}"),
    "a launcher that is killed": ("local", [KILLED], "", "failed", "the launcher was killed"),
    "a launch without a word": ("local", [], "", "ended", f"its start ended {BEFORE}; nothing says how"),
}


@pytest.mark.parametrize("cluster, events, state, name, ending", STARTS.values(), ids=STARTS)
def test_a_start_that_has_not_trained_is_told_by_what_is_recorded_of_it(
    cluster, events, state, name, ending, tmp_path, squeue
):
    run = make(tmp_path / "a", config_yaml="")
    submit(run, cluster, "8" if cluster == "slurm" else "99999999", "here", machine=files.here())
    for event in events:
        note(run, **event)
    env = squeue(f"echo '8|{state}|0:01|0:00|2026-01-01T00:01:00|1|node1|NonZeroExitCode'" if state else "true")
    [row] = status(run, env=env)
    assert (row["state"], row["ending"]) == (name, ending)
    assert f"hpclm resume {run}" in hpclm("status", run, env=env, check=0).stdout


def test_a_run_is_as_done_as_before_if_its_next_job_is_cancelled_and_tells_who_cancelled_it(tmp_path, squeue):
    run, env = make(tmp_path / "a", [attempt()], rows(20), ("done", "done at step 20", 0)), squeue("true")
    submit(run, "slurm", "8")
    note(run, "cancelled", by="ada")
    [row] = status(run, env=env)
    assert (row["state"], row["ending"]) == (
        "done",
        "done at step 20; its last job was cancelled by ada before training started",
    )
    run = make(tmp_path / "b", [attempt()], rows(5))
    note(run, "cancelled", by="ada")
    [row] = status(run, env=env)
    killed = "ended without a message: killed, or its node failed"
    assert (row["state"], row["ending"]) == ("cancelled", f"cancelled by ada; {killed}")
    note(run, "ended", state="exited", ending="SIGTERM: saved at step 5, exiting", code=85)
    [row] = status(run, env=env)
    assert (row["state"], row["ending"]) == ("exited", "SIGTERM: saved at step 5, exiting; cancelled by ada")


@pytest.mark.parametrize("damage", ["is gone", "cannot be read"])
def test_a_run_whose_summary_is_lost_is_as_done_as_before(damage, tmp_path):
    run = tmp_path / "run"
    hpclm("train", "debug", f"out={run}", "budget.steps=3", "engine.device=cpu", check=0)
    [before] = status(run)
    (run / "summary.json").unlink()
    if damage != "is gone":
        with (run / "summary.json").open("wb") as file:
            file.truncate(1 << 33)
    [after] = status(run)
    assert [after[key] for key in ("state", "ending", "step")] == [before[key] for key in ("state", "ending", "step")]
    assert before["state"] == "done" and "is done" in hpclm("resume", run, "--cluster", "local", check=64).stderr


@pytest.mark.skipif(not traced.usable(), reason="strace is not installed, or may not trace")
def test_the_table_asks_slurm_once_and_the_disk_little_for_each_of_many_runs(tmp_path, squeue):
    told = ("done", "done at step 20, 40 samples", 0)
    done = make(tmp_path / "one", [attempt(job_id="7")] * 30, rows(20), told, lock='{"generation": 3}', log_txt="x\n")
    checkpoint(submitted(done, "7") / "checkpoints" / "step-00000020", processes=32, tensors=20)
    queued = submitted(make(tmp_path / "two", config_yaml=""), "8", log=False)
    for number in range(50):
        for run in (done, queued):
            shutil.copytree(run, tmp_path / "runs" / f"sweep-{number // 20}" / f"{run.name}-{number}")
    env = squeue(f"echo asked >> {tmp_path}/asked; echo '8|PENDING|0:00|1:00|N/A|1||Priority'")
    command = ["strace", "-f", "-qq", "-o", str(tmp_path / "calls"), "-e", "trace=file"]
    command += [sys.executable, "-m", "hpclm", "status", "--runs", str(tmp_path / "runs")]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=True).stdout.splitlines()
    assert sum(" done " in line and " 20/20 " in line for line in said) == 50
    assert sum(" waiting " in line and " 0/12 " in line for line in said) == 50
    assert (tmp_path / "asked").read_text() == "asked\n"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert not any("/yaml/" in line or "log.txt" in line or "metrics.jsonl" in line for line in calls)
    asked = sum(str(tmp_path / "runs") in line for line in calls) / 100
    assert asked < 13
