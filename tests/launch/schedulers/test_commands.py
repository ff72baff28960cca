import os
import re
import sys
from dataclasses import replace

import pytest

from hpclm.base.errors import HpclmError
from hpclm.launch.schedulers import slurm_commands as slurm
from hpclm.node.job import Job
from hpclm.node.processes import NoAnswerError
from tests import forks
from tests.runs import PATIENCE, until


@pytest.fixture
def stand_in(tmp_path):
    """Put a shell script in the place of one of Slurm's commands; the environment that finds it."""

    def put(name, script):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
        return os.environ | {"PATH": f"{folder}:/usr/bin:/bin"}

    return put


LINE = "7|RUNNING|1:02:03|22:57:57|2026-11-21T10:00:00|2|node[1-2,4]|None"


def test_the_output_of_squeue_is_parsed(stand_in):
    env = stand_in("squeue", f"echo '{LINE}'; echo '8_3|PENDING|0:00|2:00|N/A|1||Resources|x'; echo '9|RUNNING|'")
    running = Job("7", "RUNNING", "1:02:03", "22:57:57", "2026-11-21T10:00:00", 2, "node[1-2,4]", "None")
    found = slurm.states(["7", "8_3", "9"], env=env)
    assert found == {"7": running, "8_3": Job("8_3", "PENDING", "0:00", "2:00", "N/A", 1, "", "Resources|x")}
    assert running.live and not running.waits and found["8_3"].waits
    env = stand_in("squeue", f"echo '{LINE}|/a|b/script-1.sbatch'")
    assert slurm.states(["7"], env=env) == {"7": replace(running, script="/a|b/script-1.sbatch")}


def test_the_id_of_an_array_finds_all_its_tasks(stand_in):
    env = stand_in("squeue", 'for i in 1 2; do echo "8_$i|PENDING|0:00|2:00|N/A|1||None"; done')
    assert sorted(slurm.states(["8"], env=env)) == ["8_1", "8_2"]


def test_jobs_that_were_not_asked_for_are_left_out(stand_in):
    assert list(slurm.states(["7"], env=stand_in("squeue", f"echo '{LINE}'; echo '17{LINE[1:]}'"))) == ["7"]


def test_squeue_is_not_called_without_jobs(stand_in):
    assert slurm.states([], env=stand_in("squeue", "exit 1")) == {}


def test_a_job_that_slurm_has_forgotten_is_no_error(stand_in):
    env = stand_in("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert slurm.states(["7"], env=env) == {}


@pytest.mark.parametrize(
    "script, why",
    [
        ("sleep 3600", "did not answer within 0.3 s"),
        ("sleep 3600 & sleep 3600 & wait", "did not answer within 0.3 s"),
        ("trap '' TERM; echo half; while :; do sleep 1; done", "did not answer within 0.3 s"),
        ("yes 7", "did not answer within 0.3 s"),
        ("echo '<html>proxy error</html>'", "cannot be parsed: '<html>"),
        ("head -c 100000 /dev/urandom", "cannot be parsed"),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", "Unable to contact"),
        ("exit 3", "exit code 3"),
    ],
)
def test_a_squeue_that_does_not_answer_is_an_error_in_time(script, why, stand_in):
    seconds = 0.3 if "did not answer" in why else PATIENCE
    assert re.search(why, forks.call(unanswered, seconds, stand_in("squeue", script)))


def unanswered(seconds, env):
    """Why squeue does not answer within so many seconds; in a process that can be killed, if it waits for ever."""
    with pytest.raises(NoAnswerError) as caught:
        slurm.states(["7"], seconds=seconds, env=env)
    return str(caught.value)


def test_without_slurm_the_error_says_so(tmp_path):
    env = {"PATH": str(tmp_path)}
    with pytest.raises(NoAnswerError, match="is it installed here"):
        slurm.states(["7"], env=env)


def test_the_users_own_SQUEUE_variables_change_nothing(stand_in):
    env = stand_in("squeue", f"[ -z \"$SQUEUE_PARTITION$SQUEUE_FORMAT\" ] && echo '{LINE}'")
    assert slurm.states(["7"], env=env | {"SQUEUE_PARTITION": "x", "SQUEUE_FORMAT": "%i"})


def test_a_command_is_retried_while_the_controller_is_down(stand_in, tmp_path):
    count = tmp_path / "count"
    script = (
        f"echo x >> {count}; [ $(wc -l < {count}) = 3 ] || {{ echo 'Unable to contact slurm controller' >&2; exit 1; }}"
    )
    assert slurm.retry(["scancel", "7"], stand_in("scancel", script), pause=0.01) == ""
    assert count.read_text().count("x") == 3


def test_commands_are_tried_three_times(stand_in, tmp_path):
    assert forks.call(starts, stand_in("scancel", "sleep 3600")) == 3


def starts(env):
    """How often a command is started that never answers."""
    started = []
    sys.addaudithook(lambda event, args: started.append(args) if event == "subprocess.Popen" else None)
    with pytest.raises(NoAnswerError, match="did not answer"):
        slurm.retry(["scancel", "7"], env, seconds=0.1, pause=0.01)
    return len(started)


def test_a_job_that_is_over_needs_no_cancelling(stand_in):
    over = "echo 'scancel: error: Kill job error on job id 7: Job/step already completing or completed' >&2; exit 1"
    assert slurm.cancel("7", env=stand_in("scancel", over)) is False
    assert slurm.cancel("7", env=stand_in("scancel", "exit 0")) is True
    with pytest.raises(HpclmError, match=r"Slurm refused: .*denied"):
        slurm.cancel("7", env=stand_in("scancel", "echo 'error: Access/permission denied' >&2; exit 1"))


def test_a_requeue_that_slurm_did_itself_counts(stand_in):
    env = stand_in("scontrol", "echo 'slurm_requeue error: Job is pending execution' >&2; exit 1")
    assert slurm.requeue("7", env=env)
    assert not slurm.requeue("7", env=stand_in("scontrol", "echo 'disabled' >&2; exit 1"))


def test_a_real_job_is_seen_waiting_changed_and_cancelled(cluster):
    job = cluster.batch("sleep 3600", "--hold", f"--output={cluster.folder}/held-%j.log")
    state = slurm.states([job, "999999"], [os.getuid()], env=cluster.env)[job]
    assert (state.name, state.reason, state.waits) == ("PENDING", "JobHeldUser", True)
    assert slurm.shown(job, env=cluster.env)["StdOut"] == f"{cluster.folder}/held-{job}.log"
    assert slurm.update(job, requeue=0, env=cluster.env) and cluster.show(job)["Requeue"] == "0"
    assert slurm.cancel(job, env=cluster.env)
    assert slurm.states([job], env=cluster.env)[job].name == "CANCELLED"
    assert slurm.states(["999999"], env=cluster.env) == {}


def test_steps_of_a_real_job_and_a_signal_to_one_process_of_it(cluster, tmp_path):
    script = f"python3 -c 'import time; time.sleep(3600)' hpclm & echo $! > {tmp_path}/pid; wait $!; echo $? > {tmp_path}/code"
    job = cluster.batch(script, "--output=/dev/null")
    cluster.wait(job, "RUNNING")
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the process's number")
    assert slurm.steps(job, env=cluster.env) == []
    node, pid = cluster.show(job)["NodeList"], int((tmp_path / "pid").read_text())
    assert not slurm.signal_process(job, node, 1, "TERM", env=cluster.env)  # not one of hpclm's
    assert slurm.signal_process(job, node, pid, "TERM", env=cluster.env)
    cluster.wait(job)
    assert (tmp_path / "code").read_text() == "143\n"
