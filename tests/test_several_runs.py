"""Verbs that take several runs, by name or by pattern; runs of other users; names that look like options."""

import json
import os
import shlex
import subprocess
import sys
from importlib import import_module

import pytest

from hpclm import cli, config
from hpclm.base.errors import ConfigError
from hpclm.rundir import runs
from tests.events import submit
from tests.forks import hpclm
from tests.rundir.test_runs import checkpoint, make
from tests.runs import PATIENCE, until
from tests.test_status import attempt, rows, squeue  # noqa: F401 (a fixture)

SMALL = ["budget.steps=5", "engine.device=cpu", "evaluate.every=0", "log.tensorboard=false"]
WAITS = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); print(1, flush=True); time.sleep(3600)"


def launcher(run):
    """A process that counts as the one which launched the run, and ends when it is told to."""
    process = subprocess.Popen([sys.executable, "-c", WAITS, "hpclm"], stdout=subprocess.PIPE)
    process.stdout.readline()
    submit(run, "local", str(process.pid), os.uname().nodename, 1, 1, "")
    return process


def test_runs_are_chosen_by_name_and_by_pattern_each_once(tmp_path):
    for name in ("sweep-1", "sweep-2", "other", "group/sweep-3", "lr=1"):
        make(tmp_path / name)
    assert runs.choose(["sweep-*"], tmp_path) == [tmp_path / "sweep-1", tmp_path / "sweep-2"]
    assert runs.choose(["group/*", "other", str(tmp_path / "other"), "o*"], tmp_path) == [
        tmp_path / "group/sweep-3",
        tmp_path / "other",
    ]
    assert runs.choose([f"{tmp_path}/sweep-[1-9]"], tmp_path / "group") == [tmp_path / "sweep-1", tmp_path / "sweep-2"]
    assert runs.choose(["lr=1"], tmp_path) == [tmp_path / "lr=1"]
    with pytest.raises(ConfigError, match="no run directory matches 'x-\\*'"):
        runs.choose(["x-*"], tmp_path)
    shown = json.loads(hpclm("status", "--json", "--runs", tmp_path, "sweep-*", check=0).stdout)
    assert [each["run"] for each in shown] == [str(tmp_path / "sweep-1"), str(tmp_path / "sweep-2")]


def test_cancel_ends_all_runs_it_is_given_and_one_it_cannot_end_does_not_save_the_others(tmp_path):
    processes = [launcher(make(tmp_path / f"sweep-{number}")) for number in (1, 2)]
    make(tmp_path / "sweep-0", [attempt()], lock='{"host": "elsewhere", "pid": 12}')
    done = hpclm("cancel", "--runs", tmp_path, "sweep-*", check=1)
    assert [process.wait(PATIENCE) for process in processes] == [0, 0]
    for process in processes:
        process.stdout.close()
        assert f"process {process.pid}: asked to save and exit" in done.stdout
    assert "cancel it there: ssh elsewhere" in done.stderr
    assert "is not running" in hpclm("cancel", "--runs", tmp_path, "sweep-1", "sweep-2", check=0).stdout


def test_a_sweep_is_cancelled_in_the_queue_and_resumed_as_a_whole(cluster, tmp_path):
    env = {**cluster.env, "HPCLM_SITE": ""}

    def call(*words, check=0):
        return hpclm(*words, cwd=tmp_path, env=env, check=check)

    def waiting():
        return cluster.run(["squeue", "-h", "-t", "PD", "-o", "%j"]).stdout.split()

    call("submit", *SMALL, "--sbatch", "hold", "--sweep", "optim.lr=1e-3,3e-3")
    assert len(waiting()) == 2
    assert call("cancel", "debug-lr-*").stdout.count(": cancelled") == 2

    def states():
        return [each["state"] for each in json.loads(call("status", "--json").stdout)]

    until(
        lambda: states() == ["cancelled", "cancelled"], "two cancelled runs"
    )  # unknown, while a busy Slurm says nothing
    assert waiting() == []
    call("resume", "debug-lr-*", "--job-name", "again", "optim.warmup=1")
    assert waiting() == ["again", "again"]
    assert call("resume", "debug-lr-1e-3", "debug-lr-3e-3", check=75).stderr.count("is waiting (job ") == 2
    rates = {path.parent.name: config.load(path).optim.lr for path in (tmp_path / "runs").glob("*/config.yaml")}
    assert rates == {"debug-lr-1e-3": 0.001, "debug-lr-3e-3": 0.003}


def test_a_name_that_looks_like_an_option_is_written_so_that_it_is_none(cluster, tmp_path):
    env = {**cluster.env, "HPCLM_SITE": ""}
    done = hpclm("submit", *SMALL, "--sbatch", "hold", "out=-dash", cwd=tmp_path, env=env)
    told = dict(
        line.split(None, 1) for line in done.stdout.splitlines() if line.startswith(("follow", "cancel", "resume"))
    )
    assert set(told) == {"follow", "cancel", "resume"}
    for line, code in ((told["resume"], 75), (told["cancel"], 0)):
        name, *words = shlex.split(line)
        again = hpclm(*words, cwd=tmp_path, env=cluster.env, check=code)
        assert name == "hpclm"
        assert "hpclm resume ./-dash" in again.stdout + again.stderr or "hpclm cancel ./-dash" in again.stderr


MODES = {"closed": 0o700, "closed to reading": 0o711, "open": 0o755}
OTHERS = (
    ["status"], ["status", "--json"], ["status", "a"], ["logs", "a"], ["logs", "a", "--job"], ["cancel", "a"], ["cancel", "a*"],
    ["resume", "a"], ["request", "a", "save"], ["request", "a", "stop"], ["checkpoints", "a"],
)  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_another_user_s_run_is_told_of_in_words(mode, tmp_path, squeue, monkeypatch, capsys):  # noqa: F811
    def another(name):
        run = make(tmp_path / name / "a", [attempt(job_id="7")], rows(5), config_yaml="budget: {steps: 20}\n", lock="")
        submit(run, "slurm", "7", "login", 1, 1, str(run / "logs" / "job-7.log"))
        for folder in ("logs", "job"):
            (run / folder).mkdir(mode=0o700)
        (run / "logs" / "job-7.log").write_text("x\n")
        checkpoint(run / "checkpoints" / "step-00000004")
        run.chmod(mode)
        return tmp_path / name

    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_mode & 0o5 != 0o5:
            path.chmod(0o755)
    monkeypatch.setenv("PATH", squeue("echo '7|RUNNING|1:02:03|22:57:57|2026-01-01T00:00:00|2|node1|None'")["PATH"])
    monkeypatch.setenv("HOME", "/nonexistent")
    for name in (
        "checkpoint.manifest",
        "checkpoint.directory",
        "launch.submit",
    ):  # what the other user may not be able to load
        import_module(f"hpclm.{name}")
    cli.main(["status", "--runs", str(another("mine"))])
    cli.main(["status", "--runs", str(tmp_path / "mine"), "a"])
    for number, words in enumerate(OTHERS):
        cli.parser(words[0])
        run = another(str(number)) / "a"
        files = sorted(run.rglob("*"))
        os.seteuid(65534)
        try:
            code = cli.main([words[0], "--runs", str(run.parent), *words[1:]])
        finally:
            os.seteuid(0)
        said = "".join(capsys.readouterr())
        assert "Traceback" not in said and code in (0, 1, 64, 66), f"{words}: {code}\n{said}"
        if "a" in words and (words[0] in ("cancel", "resume") or mode == 0o700):
            assert code == 64 and "belongs to root" in said, f"{words}: {code}\n{said}"
        assert sorted(run.rglob("*")) == files
