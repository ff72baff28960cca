"""Machines that share a host name, as cloned virtual machines and containers do, are told apart."""

import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpclm.base import files
from hpclm.launch import jobs
from hpclm.rundir import runs, state
from hpclm.rundir.lease import Lease
from tests.events import began
from tests.forks import hpclm
from tests.rundir.test_runs import make
from tests.runs import ROOT, variables

NAME = "twin"
ENTER = 'hostname "$1"; mount --bind "$2" /proc/sys/kernel/random/boot_id; shift 2; exec "$@"'


def usable():
    """Whether namespaces of every kind that is needed may be made here."""
    command = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    return bool(shutil.which("ip")) and subprocess.run(command, capture_output=True).returncode == 0


@contextmanager
def two_machines(folder):
    """Commands that run what follows them on each of two machines, which share nothing but a name, a network and the disk."""
    names = [f"hpclm{secrets.token_hex(2)}" for _ in range(2)]
    links = [f"v{name[-4:]}" for name in names]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        ends = ["netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1]]
        subprocess.run(["ip", "link", "add", links[0], *ends], check=True)
        machines = []
        for number, (name, link) in enumerate(zip(names, links, strict=True), 1):
            for act in (f"addr add 198.19.31.{number}/24 dev {link}", f"link set {link} up", "link set lo up"):
                subprocess.run(["ip", "-n", name, *act.split()], check=True)
            boot = folder / f"boot-{number}"
            boot.write_text(f"{uuid.uuid4()}\n")
            apart = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
            machines.append(["ip", "netns", "exec", name, *apart, "sh", "-c", ENTER, "sh", NAME, str(boot)])
        yield machines
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def other(machine):
    """A machine that is not ``machine``, whatever its host name."""
    return "-".join(["0" * 16, *machine.split("-")[1:]])


@pytest.mark.skipif(not usable(), reason="needs the right to make network namespaces")
def test_two_machines_with_one_host_name_train_together(tiny, tmp_path):
    launched = {
        **{"TORCHELASTIC_RUN_ID": "twins", "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "OMP_NUM_THREADS": 1},
        **{"MASTER_ADDR": "198.19.31.1", "MASTER_PORT": 29511},
    }
    train = [sys.executable, "-m", "hpclm", "train"]
    with two_machines(tmp_path) as machines:
        processes = [
            subprocess.Popen(
                [*machine, *train, *tiny("run", "batch.micro_size=2", "cluster.start_seconds=300")],
                env=variables(rank, launched) | {"LOCAL_RANK": "0"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
            )
            for rank, machine in enumerate(machines)
        ]
        shown = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], shown
    assert f"on {NAME}, {NAME};" in shown[0] and "2 ranks on 2 nodes agree" in shown[0]
    [attempt] = began(tmp_path / "run")
    assert attempt["hosts"] == [NAME, NAME]
    assert attempt["nodes"] == 2  # hpclm resume asks for as many


def test_a_process_of_a_machine_with_the_same_name_is_neither_looked_up_nor_ended_here(tmp_path):
    with subprocess.Popen(["sh", "-c", "read line", "hpclm"], stdin=subprocess.PIPE) as bystander:
        named = {"host": socket.gethostname(), "pid": bystander.pid}
        began = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "from_step": 0, "steps": 9}
        for machine, here in (({"machine": other(files.here())}, False), ({"machine": files.here()}, True), ({}, True)):
            record = named | machine  # an old one names no machine
            run = make(tmp_path / f"run-{here}", [record | began], lock=json.dumps(record), lock_beat="1 1")
            assert state.process_here(runs.read_run(run)) == (bystander.pid if here else None)
        run = tmp_path / "run-False"
        standing = jobs.state(run, 1)
        assert standing.live and "according to its files" in standing.where()
        assert "cancel it there" in hpclm("cancel", run, check=1).stderr
        assert bystander.poll() is None


def test_the_lease_of_a_machine_with_the_same_name_is_taken_over_after_silence_only(tmp_path, caplog):
    holder = {"generation": 4, "host": socket.gethostname(), "pid": 1, "job": None, "start": 0, "token": "x"}
    for machine, waits in ((other(files.here()), True), (files.here(), False), (None, False)):
        (tmp_path / "lock").write_text(json.dumps(holder | ({"machine": machine} if machine else {})))
        (tmp_path / "lock.beat").write_text("4 17\n")
        caplog.clear()
        with caplog.at_level(logging.INFO), Lease(tmp_path, seconds=0.5) as lease:
            assert ("for a heartbeat of process 1" in caplog.text) == waits and lease.generation == 5


def test_unfinished_files_of_a_machine_with_the_same_name_are_left_alone(tmp_path):
    process = subprocess.Popen(["true"])
    process.wait()
    here, there = files.here(), other(files.here())
    for machine in (here, there, socket.gethostname() + here.split("-")[2]):  # the last: as earlier versions wrote it
        (tmp_path / f"x.tmp-{machine}-{process.pid}-abc").touch()
    files.sweep(tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"x.tmp-{machine}-{process.pid}-abc" for machine in (there, socket.gethostname() + here.split("-")[2])
    )
    assert files.aside(Path("x")).name.startswith(f"x.tmp-{here}-{os.getpid()}-")


MEET = """
from hpclm.config import ClusterConfig
from hpclm.distributed import rendezvous
from hpclm.distributed.bootstrap import World
rendezvous.connect(World("LAUNCHER", 0, 2, 0, 1, "7.0.0", ("n1", "n2")), ClusterConfig(start_seconds=1))
"""


@pytest.mark.skipif(not usable(), reason="needs network namespaces")
@pytest.mark.parametrize("launcher", ["Slurm", "Open MPI"])
def test_ranks_on_machines_without_ipv4_do_not_wait_but_say_that_they_need_it(launcher):
    code = MEET.replace("LAUNCHER", launcher)
    only_ipv6 = "ip link set lo up; ip link add d0 type dummy; ip addr add fd00:77::1/64 dev d0; ip link set d0 up"
    command = ["unshare", "--net", "sh", "-c", f'{only_ipv6}; exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    said = (
        f"has no IPv4 address but loopback's, and ranks that {launcher} starts meet over IPv4: start them with torchrun"
    )
    assert f"ConfigError: {socket.gethostname()} {said}" in done.stderr
