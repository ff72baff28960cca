"""mpirun, the real one that is installed, on this machine and on separate nodes."""

import os
import random
import shlex
import shutil
import signal
import time

import psutil
import pytest

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.launch import mpi
from tests.events import began, of_kind
from tests.forks import hpclm
from tests.launch.launched import job_log, launched, left, ready, save, signals, start, warned
from tests.runs import PATIENCE, losses, until

needs_mpirun = [pytest.mark.mpi, pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed")]


def hosts(tmp_path, text="a slots=2\nb slots=4\n"):
    (tmp_path / "hosts").write_text(text)
    return f"job.hostfile={tmp_path / 'hosts'}"


@pytest.mark.parametrize(
    "told, whose",
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n", "Open MPI"),
        ("mpirun (Open MPI) 5.0.11\n", "Open MPI"),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", "MPICH"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240515\n", "Intel MPI"),
    ],
)
def test_whose_mpirun_it_is_is_read_from_its_version(told, whose):
    assert mpi.flavour(told) == whose


def test_an_unknown_or_missing_mpirun_is_refused():
    with pytest.raises(ConfigError, match="says 'Acme MPI 1'; hpclm knows Open MPI, MPICH and Intel MPI"):
        mpi.flavour("Acme MPI 1\n")
    with pytest.raises(ConfigError, match="mpirun is not on the PATH; load the cluster's MPI module"):
        mpi.installed({"PATH": "/nowhere"})


@pytest.mark.parametrize(
    "kind, wanted",
    [
        (
            "Open MPI",
            "m --bind-to none --map-by slot:OVERSUBSCRIBE "
            "-x A -host a:2 -n 2 env CUDA_VISIBLE_DEVICES=0,1 prog : "
            "-x A -host b:1 -n 1 env CUDA_VISIBLE_DEVICES=5 prog",
        ),
        (
            "MPICH",
            "m -bind-to none -genvall -host a -n 2 env CUDA_VISIBLE_DEVICES=0,1 prog : "
            "-host b -n 1 env CUDA_VISIBLE_DEVICES=5 prog",
        ),
        (
            "Intel MPI",
            "m -genv I_MPI_PIN 0 -genvall -host a -n 2 env CUDA_VISIBLE_DEVICES=0,1 prog : "
            "-host b -n 1 env CUDA_VISIBLE_DEVICES=5 prog",
        ),
    ],
)
def test_each_host_gets_its_own_slots(kind, wanted):
    plan = mpi.MpiPlan({"A": "1", "B": "2"}, "m", kind, {"a": [0, 1], "b": [5]}, 2, 2, "")
    command = [word for word in plan.command(["prog"], ["A"]) if word != "--allow-run-as-root"]
    assert command == wanted.split()


@pytest.mark.parametrize(
    "kind, command",
    [
        ("Open MPI", "m --bind-to none --map-by ppr:4:node:OVERSUBSCRIBE -n 8 prog"),
        ("MPICH", "m -bind-to none -genvall -ppn 4 -n 8 prog"),
    ],
)
def test_without_a_hostfile_the_counts_are_said(kind, command):
    words = mpi.MpiPlan({}, "m", kind, {}, 2, 4, "").command(["prog"])
    assert " ".join(word for word in words if word != "--allow-run-as-root") == command


@pytest.mark.parametrize(
    "settings, chosen",
    [
        ([], {"a": [0, 1], "b": [0, 1, 2, 3]}),
        (["job.nodelist=b:2,3"], {"b": [2, 3]}),
        (["job.exclude=a@b:0"], {"b": [1, 2, 3]}),
        (["job.nodes=2", "job.gpus=1"], {"a": [0], "b": [0]}),
        (["job.gpus=2"], {"a": [0, 1]}),
    ],
)
def test_the_settings_choose_hosts_and_slots(tmp_path, settings, chosen):
    assert mpi.resources(config.load(None, [hosts(tmp_path), *settings])) == chosen


def submitted(tmp_path, *words, check, **env):
    """`hpclm submit --hostfile hosts WORDS` with two machines that there are not."""
    words = [hosts(tmp_path, "none-a slots=1\nnone-b slots=2\n"), "engine.device=cpu", f"out={tmp_path}/run", *words]
    return hpclm("submit", *words, check=check, env=clean(HPCLM_SITE="", **env))


class TestHere:
    pytestmark = needs_mpirun

    def test_a_rank_that_fails_ends_all_and_is_named(self, tiny, tmp_path):
        """It does not wait in MPI_Finalize for ranks that wait for it."""
        words = ["budget.steps=100000", "data.source=tests.faults:exploding", "data.workers=0", "batch.micro_size=1"]
        words = [*tiny("run", *words, "batch.global_size=6"), "job.cluster=mpirun", "job.gpus=3"]
        done = hpclm("submit", *words, check=1, env=clean(HPCLM_SITE="", OMP_NUM_THREADS="1"))
        cause = done.stderr.splitlines()[-1]
        assert cause.startswith("mpirun ended with exit code 1: rank 2 on ") and cause.endswith("boom in the data")
        assert "RuntimeError: boom in the data" in (tmp_path / "run/log.txt").read_text()

    def test_a_dry_run_shows_the_hosts_the_slots_and_the_command_and_writes_nothing(self, tmp_path):
        said = submitted(tmp_path, "--dry-run", "job.env.WORD=x", check=0).stdout
        told, command = said.splitlines()
        assert told.endswith(": 3 processes on none-a (0), none-b (0, 1)")
        words = shlex.split(command)
        assert words[0].endswith("mpirun") and "WORD" in words and words.count("hpclm.train") == 2
        assert words[-1] == f"{tmp_path}/run/config.yaml" and not (tmp_path / "run").exists()
        said = submitted(tmp_path, "--dry-run", "--include", "none-b:1", check=0).stdout
        assert "1 processes on none-b (1)" in said and "CUDA_VISIBLE_DEVICES=1 " in said

    @pytest.mark.parametrize(
        "acts, code, told",
        [
            (["print=hello", "exit=0"], 0, "hello\n"),
            (["sleep=1:1", "exit=85"], 85, ""),
            (["children", "exit=2:93", "sleep"], 93, "Exit code:    93"),
            (["children", "kill=1:9", "sleep"], 137, "on signal 9 (Killed)"),
        ],
    )
    def test_the_exit_code_is_the_first_failing_ranks_and_nothing_is_left(self, tmp_path, acts, code, told):
        found, _, errors = launched("mpi", tmp_path, "job.gpus=3", *acts)
        assert found == code, errors
        assert told in job_log(tmp_path) and not left(tmp_path)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
    def test_a_warning_reaches_every_rank_once_and_all_may_save(self, tmp_path, number):
        process = start("mpi", tmp_path, "job.gpus=3", "ready", "children", "warned")
        ready(tmp_path, 3)
        process.send_signal(number)
        warned(tmp_path, 3)
        save(tmp_path)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 85, errors
        first = {got[0] for got in signals(tmp_path, 3)}  # mpirun may end the others once the first has left
        assert len(first) == 1 and first <= {"SIGUSR1", "SIGUSR2"} and not left(tmp_path)

    @pytest.mark.parametrize("victim", ["launcher", "mpirun"])
    def test_kill_9_of_what_started_the_ranks_ends_them(self, tmp_path, victim):
        process = start("mpi", tmp_path, "job.gpus=2", "ready", "obey")
        ready(tmp_path, 2)
        time.sleep(random.uniform(0, 0.3))
        started = psutil.Process(process.pid).children(recursive=True)
        [mpirun] = [child.pid for child in started if child.name() == "mpirun"]
        os.kill({"launcher": process.pid, "mpirun": mpirun}[victim], signal.SIGKILL)
        process.communicate(timeout=PATIENCE)
        until(lambda: not left(tmp_path), "the end of all processes")

    def test_more_nodes_than_this_want_a_hostfile(self, tmp_path):
        code, _, errors = launched("mpi", tmp_path, "job.nodes=2", "exit=0", env=clean())
        assert code == 64 and "job.nodes=2 with mpirun needs job.hostfile" in errors


def clean(**more):
    return {key: value for key, value in os.environ.items() if not key.startswith("SLURM")} | more


class TestNodes:
    """Several hosts, with names, process tables and networks of their own, that mpirun enters instead of using ssh."""

    pytestmark = needs_mpirun

    @pytest.fixture
    def nodes(self, cluster, tmp_path):
        if not cluster.isolated:
            pytest.skip("needs nodes that are separate machines")
        agent = tmp_path / "agent"
        agent.write_text(
            f"#!/bin/bash\nhost=$1; shift\nfirst=$(<{cluster.folder}/run/slurmd-$host.pid)\n"
            "read -r inside rest < /proc/$first/task/$first/children\n"  # process 1 of the node
            'exec nsenter -t "${inside:-$first}" --net --uts --ipc --pid --mount bash -c "$*"\n'
        )
        agent.chmod(0o700)
        a, b = cluster.nodes[:2]
        return hosts(tmp_path, f"{a} slots=2\n{b} slots=4\n"), clean(OMPI_MCA_plm_rsh_agent=str(agent)), (a, b)

    def test_every_host_runs_what_was_chosen_of_it_with_its_gpus_and_variables(self, nodes, tmp_path):
        hostfile, env, (a, b) = nodes
        settings = f"{hostfile} job.nodelist={a}@{b}:1,3 job.env.WORD=x;y,z"
        code, told, errors = launched(
            "mpi", tmp_path / "out", settings, "env=CUDA_VISIBLE_DEVICES", "env=WORD", env=env
        )
        assert code == 0, errors
        assert sorted(filter(None, told.splitlines())) == sorted(
            [f"{rank} {host} CUDA_VISIBLE_DEVICES={gpus}" for rank, host, gpus in
             [(0, a, "0,1"), (1, a, "0,1"), (2, b, "1,3"), (3, b, "1,3")]]
            + [f"{rank} {host} WORD=x;y,z" for rank, host in [(0, a), (1, a), (2, b), (3, b)]]
        )  # fmt: skip
        [submitted] = of_kind(tmp_path / "out", "submitted")
        assert (submitted["nodes"], submitted["cluster"]) == (2, "mpirun")

    @pytest.mark.parametrize("victim", ["rank", "launcher"])
    def test_kill_9_leaves_nothing_on_any_host(self, nodes, tmp_path, victim):
        hostfile, env, (a, b) = nodes
        out = tmp_path / "out"
        acts = ["ready", *(["sleep=3:1", "kill=3:9"] if victim == "rank" else []), "sleep"]
        process = start("mpi", out, f"{hostfile} job.nodelist={a}@{b}:0,1", *acts, env=env)
        ready(out, 4)
        if victim == "launcher":
            process.kill()
        _, errors = process.communicate(timeout=PATIENCE)
        until(lambda: not left(out), "the end of all processes on all hosts")
        if victim == "rank":
            assert process.returncode == 137 and f"on node {b} exited on signal 9 (Killed)" in errors

    def test_a_run_on_two_hosts_learns_what_one_process_learns(self, nodes, tiny, tmp_path):
        hostfile, env, (a, b) = nodes
        hpclm("train", *tiny("alone", "batch.micro_size=1", "optim.warmup=0"), check=0)
        words = tiny("mpi", "batch.micro_size=1", "optim.warmup=0", hostfile, f"job.nodelist={a}@{b}:0,1")
        hpclm("submit", *words, "--cluster", "mpirun", check=0, env=env)
        alone, found = (
            {step: float.fromhex(loss) for step, loss in losses(tmp_path / run).items()} for run in ("alone", "mpi")
        )
        assert found == pytest.approx(alone, abs=1e-4)
        assert began(tmp_path / "mpi")[0]["hosts"] == [a, b]
