import os
import signal
import subprocess
import sys

import pytest

from tests.events import submit
from tests.forks import Hpclm, hpclm
from tests.rundir.test_runs import make
from tests.runs import PATIENCE, ROOT
from tests.test_status import RUNNING, attempt, squeue  # noqa: F401 (a fixture)

LINES = [f"10:00:{n:02} I step {n}" for n in range(30)]


@pytest.fixture
def run(tmp_path):
    out = make(tmp_path / "a run", [attempt()], log_txt="\n".join(LINES) + "\n", lock="")
    (out / "logs").mkdir()
    (out / "logs" / "rank-00003.log").write_text("from rank 3\n")
    (out / "logs" / "job-7.log").write_text("from the job\n")
    return out


def logs(*words):
    return hpclm("logs", *words, check=0).stdout.splitlines()


def start(*words, **more):
    command = [sys.executable, "-m", "hpclm", "logs", *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


def test_any_log_of_a_run_is_printed_whole_or_its_end_or_what_matches(run):
    assert logs(run) == LINES
    assert logs(run, "--lines", 2) == LINES[-2:]
    assert logs(run, "--grep", "step 2[0-9]$") == LINES[20:]
    assert logs(run, "--grep", "step 1", "--lines", 1) == LINES[19:20]
    assert logs(run, "--rank", 3) == ["from rank 3"]
    assert logs(run, "--rank", 0) == LINES
    assert logs(run, "--job") == ["from the job"]


def test_a_rank_without_a_log_and_a_pattern_that_is_none_are_refused(run):
    assert "no logs/rank-00004.log; ranks with a log: 0 to 3" in hpclm("logs", run, "--rank", 4, check=64).stderr
    assert "not a regular expression" in hpclm("logs", run, "--grep", "(", check=2).stderr


def test_a_log_that_is_a_pipe_is_said_to_be_one(run):
    (run / "log.txt").unlink()
    os.mkfifo(run / "log.txt")
    (run / "logs/job-7.log").unlink()
    refused = hpclm("logs", run, check=64).stderr
    assert "log.txt is a pipe, a device or another special file" in refused and "no log" not in refused


def test_head_ends_it_quietly(run):
    with (run / "log.txt").open("a") as file:
        file.writelines(f"line {n}\n" for n in range(100000))
    command = f"'{sys.executable}' -m hpclm logs '{run}' | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == (LINES[0] + "\n", "")


def test_following_ends_when_its_reader_leaves(run, squeue):  # noqa: F811
    make(run, [attempt(job_id="7")])
    with start("-f", run, env=squeue(RUNNING)) as child:
        assert child.stdout.readline().decode().strip() == LINES[10]
        child.stdout.close()
        with (run / "log.txt").open("a") as file:
            file.write("10:00:30 I step 30\n")
        assert child.wait(PATIENCE) == 141 and child.stderr.read() == b""


def test_ctrl_c_ends_following_with_130(run, squeue):  # noqa: F811
    make(run, [attempt(job_id="7")])
    with start("-f", run, env=squeue(RUNNING)) as child:
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.wait(PATIENCE) == 130


def test_following_a_run_that_is_over_ends_and_says_how_it_ended(run):
    make(run, [attempt()], ended=("failed", "rank 1 on node2 failed: no luck", 1))
    with (run / "log.txt").open("a") as file:
        file.write("10:00:30 E rank 1 on node2 failed: no luck\n")
    done = hpclm("logs", "-f", run, check=0)
    assert done.stdout.splitlines()[-2:] == [LINES[-1], "10:00:30 E rank 1 on node2 failed: no luck"]
    assert "is over: failed, rank 1 on node2 failed: no luck" in done.stderr


def test_a_run_is_followed_from_before_its_first_line_to_its_end(tmp_path, tiny):
    (tmp_path / "run").mkdir(mode=0o700)
    trained = Hpclm("train", *tiny("run", "budget.steps=60", "log.every=20"))
    submit(tmp_path / "run", "local", str(trained.pid), os.uname().nodename, 1, 1, "")
    follower = start("-f", "--lines", 1000, tmp_path / "run")  # also those that come before it looks
    out, error = follower.communicate(timeout=PATIENCE)
    trained.wait()
    steps = [line.split()[4] for line in out.decode().splitlines() if " step " in line and "loss" in line]
    assert steps == ["1/60", "20/60", "40/60", "60/60"]
    assert b"is over: done" in error and follower.returncode == 0


def test_where_training_never_began_the_job_s_log_is_named_and_printed(tmp_path, squeue):  # noqa: F811
    run = make(tmp_path / "a")
    (run / "logs").mkdir()
    log = run / "logs" / "job-7.log"
    submit(run, "slurm", "7", "login", 1, 1, str(log))
    env = squeue("echo '7|PENDING|0:00|2:57|N/A|2||Priority'")
    said = hpclm("logs", run, env=env, check=64).stderr
    assert f"has no log yet; it is waiting (job 7 PENDING (Priority)); the job will print to {log}" in said
    log.write_text("error: data.prefix is not set\n")
    done = hpclm("logs", run, env=squeue("true"), check=0)
    assert done.stdout == "error: data.prefix is not set\n" and f"the job's log, {log}" in done.stderr
