"""A job's supervisor, with small programs in the place of srun, mpirun and scontrol."""

import json
import os
import shutil

import pytest

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.launch import job
from hpclm.rundir import events
from tests.runs import lines

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_JOB_NODELIST": "node1",
    "SLURMD_NODENAME": "node1",
}
SCONTROL = """#!/bin/bash
case $1 in
show) echo "JobId=7 JobState=RUNNING Requeue=1 Restarts=${SLURM_RESTART_COUNT:-0}" ;;
requeue) echo $2 >> requeued ;;
esac
"""
LAUNCHER = """#!/bin/bash
[ "$1" != --version ] || { echo "mpirun (Open MPI) 4.1.4"; eval $ON_VERSION; exit; }
echo "$@" >> started
env > environment
BEGAN='{"kind": "began", "time": "", "job_id": "7", "restart"'
[ -z "$TRAINED" ] || echo "$BEGAN: ${SLURM_RESTART_COUNT:-0}}" >> run/events.jsonl
if [ $(wc -l < started) -le $PHASES ]; then
    echo '{"kind": "ended", "time": "", "state": "phase", "code": 85}' >> run/events.jsonl
    eval $AT_PHASE
    exit 85
fi
[ -z "$ENDS" ] || { mkdir -p $HPCLM_ERRORS; cp $ENDS $HPCLM_ERRORS/; }
exit $CODE
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start the job; its exit code, and how often it has been requeued."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": LAUNCHER, "mpirun": LAUNCHER, "scontrol": SCONTROL}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)

    def call(*words, number=0, **variables):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))
        for name, value in {
            "TRAINED": "",
            "ENDS": "",
            "ON_VERSION": "",
            "PHASES": 0,
            "AT_PHASE": "",
            **variables,
        }.items():
            monkeypatch.setenv(name, str(value))
        code = job.main(["debug", "engine.device=cpu", f"out={tmp_path}/run", *words])
        return code, len(lines(tmp_path / "requeued"))

    return call


def end(folder, rank, code, moment):
    """The file of a rank that has ended."""
    path = folder / f"rank-{rank}.json"
    path.write_text(json.dumps({"rank": rank, "exit_code": code, "cause": f"cause {rank}", "time": moment}))
    return str(path)


@pytest.mark.parametrize("template", ["srun", "torchrun", "mpirun"])
@pytest.mark.parametrize("code", [85, 137])
def test_a_job_of_which_three_starts_in_a_row_end_before_training_is_not_started_again(code, template, start, capfd):
    trained = ["", "yes", "", ""]
    words = [f"job.template={template}"]
    found = [start(*words, number=number, CODE=code, TRAINED=each) for number, each in enumerate(trained)]
    assert found == [(code, number) for number in (1, 2, 3, 4)]
    assert start(*words, number=4, CODE=code) == (93, 4)
    assert "3 starts in a row ended before training began: the job is not started again" in capfd.readouterr().err


def test_a_job_that_trains_in_every_start_is_started_again_each_time(start):
    assert [start(number=number, CODE=85, TRAINED="yes") for number in range(5)] == [(85, n) for n in range(1, 6)]


@pytest.mark.parametrize(
    "launcher, ends, code, requeued",
    [
        (85, {2: (64, 1.0), 0: (85, 2.0)}, 64, 0),
        (143, {3: (1, 1.0)}, 1, 0),
        (137, {1: (85, 5.0), 0: (1, 6.0)}, 85, 1),
        (139, {}, 139, 1),
        (1, {}, 1, 0),
        (0, {0: (1, 1.0)}, 0, 0),
    ],
    ids=["a mistake", "while others start", "a save", "a crash", "no trace", "done"],
)
def test_the_rank_that_ended_first_decides_not_those_that_the_launcher_then_ends(
    launcher, ends, code, requeued, start, tmp_path, capfd
):
    files = " ".join(end(tmp_path, rank, *how) for rank, how in ends.items())
    assert start(CODE=launcher, ENDS=files) == (code, requeued)
    if code in (1, 64) and ends:
        assert (
            f"srun ended with exit code {code}: cause {min(ends, key=lambda rank: ends[rank][1])}"
            in capfd.readouterr().err
        )


def test_where_scontrol_is_missing_a_job_ends_at_once(start, tmp_path, monkeypatch, capfd):
    (tmp_path / "bin" / "scontrol").unlink()
    for name in ("bash", "env", "mkdir", "cp"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert start(CODE=85) == (85, 0)
    assert (
        "scontrol: No such file or directory; is it installed here?: the job is not started again"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize("wrong", ["optim.ler=1", "parallel.tensor=3", "missing.yaml"])
def test_a_mistake_in_the_settings_starts_no_rank(wrong, start, tmp_path):
    with pytest.raises(ConfigError):
        start(wrong, CODE=0)
    assert not (tmp_path / "started").exists()


def test_a_launcher_that_is_not_there_is_named(start):
    with pytest.raises(ConfigError, match=r"srun is not on the PATH \(/nowhere\)"):
        start("job.env.PATH=/nowhere", CODE=0)


def test_a_signal_before_the_ranks_start_has_the_job_started_again(start, tmp_path):
    assert start("job.template=mpirun", CODE=0, ON_VERSION="kill -USR2 $PPID") == (85, 1)
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("template", ["srun", "torchrun", "mpirun"])
def test_ranks_that_end_at_a_phase_are_started_again_in_the_same_job(template, start, tmp_path):
    assert start(f"job.template={template}", CODE=0, TRAINED="yes", PHASES=2) == (0, 0)
    assert len(lines(tmp_path / "started")) == 3
    assert f"HPCLM_ERRORS={tmp_path}/run/logs/errors/7-0-start-3" in lines(tmp_path / "environment")
    said = [event for event in events.read_events(tmp_path / "run") if event["kind"] == "ended"]
    assert [event["state"] for event in said] == ["phase", "phase"]


@pytest.mark.parametrize("phases, signal, starts", [(1, "", 2), (3, "kill -USR2 $PPID; sleep 0.2", 1)])
def test_after_a_phase_a_signal_or_another_end_has_the_job_requeued(phases, signal, starts, start, tmp_path):
    assert start(CODE=85, TRAINED="yes", PHASES=phases, AT_PHASE=signal) == (85, 1)
    assert len(lines(tmp_path / "started")) == starts


def test_ranks_are_as_many_as_the_job_has_tasks_and_get_its_variables_whatever_the_file_says(start, tmp_path):
    assert start("job.nodes=5", "job.gpus=9", "job.env.MINE=a b", "job.notify=[]", CODE=0) == (0, 0)
    [said] = lines(tmp_path / "started")
    assert said.startswith("--nodes=1 --ntasks=2 --ntasks-per-node=2 --kill-on-bad-exit=1 --export=ALL ")
    assert said.endswith(f"hpclm.train debug engine.device=cpu out={tmp_path}/run job.notify=[]")
    variables = dict(line.partition("=")[::2] for line in lines(tmp_path / "environment"))
    assert variables["MINE"] == "a b" and variables["PYTHONSAFEPATH"] == "1" and variables["SLURM_WAIT"] == "60"
    assert variables["HPCLM_ERRORS"] == f"{tmp_path}/run/logs/errors/7-0"


def test_ranks_of_a_container_run_its_python_inside_it(start, tmp_path):
    assert start("job.container=an.sif", CODE=0) == (0, 0)
    [said] = lines(tmp_path / "started")
    assert " apptainer exec --pwd " in said and " an.sif python -P -u -m hpclm.train debug " in said


def test_a_file_s_settings_are_those_of_the_job(start):
    assert job.allocation(config.load(None, ["job.nodes=3"]), {}) == (3, 1)
    assert job.allocation(config.load(None, ["job.nodes=3"]), SLURM) == (1, 2)
