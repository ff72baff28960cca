"""Several processes train as one, meet, refuse to start together, and end together."""

import os
import re
import secrets
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

from hpclm.base.errors import HpclmError
from hpclm.config import ClusterConfig
from hpclm.distributed import network, rendezvous
from hpclm.distributed.bootstrap import World
from hpclm.node import python
from tests import runs
from tests.forks import Ranks, hpclm
from tests.runs import PATIENCE, figures, free_port, lines, losses, until


def test_several_processes_learn_what_one_does(tiny, tmp_path):
    more = ["model.ffn=48", "batch.micro_size=1", "evaluate.every=6", "evaluate.batches=3", "cluster.preflight=false"]
    hpclm("train", *tiny("one", *more), check=0)
    with Ranks(4, tiny("four", *more)) as ranks:
        assert {code for code, _ in ranks.wait().values()} == {0}
    one, four = (figures(tmp_path / out, "loss", "grad_norm") for out in ("one", "four"))
    assert len(one) == 12
    for alone, together in zip(one, four, strict=True):
        assert together == pytest.approx(alone, abs=1e-5)
    held_out = [figures(tmp_path / out, "validation_loss") for out in ("one", "four")]
    assert held_out[1][0] == pytest.approx(held_out[0][0], abs=1e-5) and len(held_out[1]) == 2
    assert sorted(p.name for p in (tmp_path / "four/logs").iterdir()) == [f"rank-0000{rank}.log" for rank in (1, 2, 3)]


def test_a_signal_to_one_rank_saves_and_stops_all(tiny, tmp_path):
    more = ["budget.steps=60", "checkpoint.every=0", "cluster.preflight=false"]
    with Ranks(2, tiny("whole", *more)) as ranks:
        ranks.wait()
    with Ranks(2, tiny("run", *more)) as ranks:
        ranks.wait_for(tmp_path / "run", 3)
        ranks.processes[1].send_signal(signal.SIGUSR2)
        assert {code for code, _ in ranks.wait().values()} == {85}
    assert "SIGUSR2: saved at step" in (tmp_path / "run/log.txt").read_text()
    with Ranks(2, tiny("run", *more)) as ranks:
        assert {code for code, _ in ranks.wait().values()} == {0}
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_an_interface_that_a_node_lacks_is_named_with_those_it_has(tiny):
    with Ranks(2, tiny("run", "cluster.interface=nosuch0")) as ranks:
        ended = ranks.wait()
    assert {code for code, _ in ended.values()} == {64}
    assert f"cluster.interface=nosuch0: {socket.gethostname()} has only lo" in ended[0][1] and not ended[1][1]


@pytest.mark.parametrize("killed", [2, 0])
def test_when_a_rank_is_killed_the_others_end_and_the_log_names_it(killed, tiny, tmp_path):
    words = tiny("run", "budget.steps=100000", "batch.micro_size=1", "cluster.preflight=false")
    with Ranks(4, words) as ranks:
        ranks.wait_for(tmp_path / "run", 3)
        pid = ranks.processes[killed].pid
        ranks.processes[killed].kill()
        ended = ranks.wait()
    assert ended.pop(killed)[0] == -signal.SIGKILL and {code for code, _ in ended.values()} == {1}, ended
    said = f"rank {killed} on {socket.gethostname()} (pid {pid}) left no message: killed"
    assert (tmp_path / "run/log.txt").read_text().count(f" E {said}") == 1, (tmp_path / "run/log.txt").read_text()
    if killed:  # the others' output is in their logs
        assert f"lost its connection to another rank: {said}" in ended[0][1]


def test_when_ranks_0_and_1_die_together_another_writes_it_down(tiny, tmp_path):
    words = tiny("run", "budget.steps=100000", "batch.micro_size=1", "cluster.preflight=false")
    with Ranks(4, words) as ranks:
        ranks.wait_for(tmp_path / "run", 3)
        for rank in (1, 0):
            ranks.processes[rank].kill()
        ranks.wait()
    assert (tmp_path / "run/log.txt").read_text().count("ranks 0-1 on") == 1


def test_a_rank_that_ends_as_if_all_were_well_is_named(tiny, tmp_path):
    with Ranks(2, tiny("run", "data.source=tests.faults:leaving", "cluster.preflight=false")) as ranks:
        ended = ranks.wait()
    assert {code for code, _ in ended.values()} == {1} and "it called sys.exit(0)" in ended[1][1]
    assert "rank 0 on" in ended[0][1] and "see the output of the others" in ended[0][1]


@pytest.mark.parametrize(
    "last, steps, code",
    [
        ("SIGSTOP", 100_000, 85),
        ("SIGKILL", 3, 0),
        pytest.param("SIGSTOP", 3, 0, marks=pytest.mark.whole),
        pytest.param("SIGKILL", 100_000, 85, marks=pytest.mark.whole),
    ],
)
def test_what_a_rank_has_done_counts_whatever_becomes_of_another_while_they_disconnect(
    last, steps, code, tiny, tmp_path
):
    words = tiny(
        "run", f"budget.steps={steps}", "data.source=tests.faults:never_disconnecting", "cluster.preflight=false"
    )
    with Ranks(2, words, TEST_SIGNAL=last) as ranks:
        if code:
            ranks.wait_for(tmp_path / "run", 3)
            ranks.processes[0].send_signal(signal.SIGUSR2)
        text, _ = ranks.processes[0].communicate(timeout=PATIENCE)
        assert ranks.processes[0].returncode == code, text
    said = {
        "SIGSTOP": "could not disconnect from the other ranks within 1 s",
        "SIGKILL": "had finished its work, but could not disconnect: ",
    }
    assert said[last] in text


def connections(port):
    """How many are connected to a port of this machine."""
    rows = [line.split() for family in ("tcp", "tcp6") for line in lines(Path("/proc/net", family))[1:]]
    return sum(row[3] == "01" and int(row[1].partition(":")[2], 16) == port for row in rows)


def test_a_pause_of_rank_0_before_the_last_rank_comes_is_no_contradiction(tiny, tmp_path):
    words, store = tiny("run", "cluster.preflight=false", "batch.global_size=12"), launch()
    with Ranks(3, words, only=[0, 1], **store) as ranks:
        until(lambda: connections(store["MASTER_PORT"]) >= 2, "the connections of two ranks")
        ranks.processes[0].send_signal(signal.SIGSTOP)
        with Ranks(3, words, only=[2], **store) as more:
            until(lambda: connections(store["MASTER_PORT"]) >= 3, "the third rank's connection")
            time.sleep(8)  # in which it hears nothing
            ranks.processes[0].send_signal(signal.SIGCONT)
            ended = [*ranks.wait().values(), *more.wait().values()]
    assert [code for code, _ in ended] == [0, 0, 0], ended


def test_the_first_cause_stands_first_with_its_traceback(tiny, tmp_path):
    words = tiny(
        "run", "budget.steps=1000", "data.source=tests.faults:exploding", "data.workers=0", "batch.micro_size=1"
    )
    with Ranks(4, [*words, "cluster.preflight=false"]) as ranks:
        ended = ranks.wait()
    assert {code for code, _ in ended.values()} == {1}
    told = [line for line in lines(tmp_path / "run/log.txt") if " E " in line or "Error" in line]
    assert "rank 2 on" in told[0] and "failed: Traceback" in told[0]
    text = (tmp_path / "run/log.txt").read_text()
    assert "RuntimeError: boom in the data" in text and "in explode" in text
    assert "boom in the data" in ended[0][1]


def test_what_all_ranks_find_wrong_is_said_once(tiny, tmp_path):
    with Ranks(3, tiny("run", "data.source=indexed", "data.prefix=/nowhere/x", "batch.global_size=12")) as ranks:
        ended = ranks.wait()
    assert {code for code, _ in ended.values()} == {64}
    assert sum("/nowhere/x" in output for _, output in ended.values()) == 1 and not (tmp_path / "run").exists()


def test_processes_that_the_layout_does_not_divide_are_refused_with_the_arithmetic(tiny, tmp_path):
    words = tiny("run", "parallel.tensor=2", "batch.global_size=12")
    with runs.Ranks(3, words, PYTHONPROFILEIMPORTTIME=1) as ranks:
        ended = ranks.wait()
    assert {code for code, _ in ended.values()} == {64}
    said = "".join(output for _, output in ended.values())
    assert said.count("3 processes cannot be divided by parallel.tensor=2 x parallel.pipeline=1 = 2") == 1, said
    assert not (tmp_path / "run").exists()
    imported = re.findall(r"^import time: .*\| +(\S+)$", said, re.M)
    assert "hpclm.distributed.bootstrap" in imported and "torch" not in imported  # before anything takes long


@pytest.mark.parametrize(
    "env, answer",
    [
        ({"WORLD_SIZE": "4", "RANK": "0"}, "no launcher started this process, but WORLD_SIZE=4"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "no launcher started this process, but PMI_SIZE=2"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, "but this process was started alone, without srun"),
    ],
)
def test_a_process_whose_environment_tells_of_others_is_refused(env, answer, tiny, tmp_path):
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI", "PMI"))}
    done = hpclm("train", *tiny(), env=own | env, check=64)
    assert answer in done.stderr and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "only, env, code, message",
    [
        # where the machine is so busy that others are late, they are missed, too
        ([0, 1, 3], {}, 1, r"[123] of 4 processes did not arrive within 5 s: ranks? (1-|1, )?2"),
        ([1, 2], {}, 1, "could not reach rank 0 at"),
    ],
)
def test_who_does_not_come_is_named(only, env, code, message, tiny, tmp_path):
    with Ranks(4, tiny("run", "cluster.start_seconds=5", "batch.micro_size=1"), only, **env) as ranks:
        ended = ranks.wait()
    assert {found for found, _ in ended.values()} == {code}
    said = "".join(output for _, output in ended.values())
    assert re.search(message, said) and not (tmp_path / "run").exists(), said


@pytest.mark.parametrize(
    "first, second, message",
    [
        (dict(size=2, only=[0]), dict(size=3, only=[1]), "the processes disagree: rank 0"),
        (dict(size=3, only=[0, 1]), dict(size=3, only=[1]), "two processes are rank 1"),
        pytest.param(
            *(dict(size=3, only=[0]), dict(size=2, only=[1]), "the processes disagree: rank 0"), marks=pytest.mark.whole
        ),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(first, second, message, tiny, tmp_path):
    words = tiny("run", "cluster.start_seconds=5", "batch.global_size=12", "batch.micro_size=1")
    store = launch()
    with Ranks(**first, words=words, **store) as some, Ranks(**second, words=words, **store) as others:
        ended = [*some.wait().values(), *others.wait().values()]
    refused = [output for code, output in ended if code == 64]
    assert refused and all(message in output for output in refused), ended


def launch():
    """What two sets of ranks need to be those of one launch."""
    return {"TORCHELASTIC_RUN_ID": secrets.token_hex(8), "MASTER_PORT": free_port()}


def in_a_job(rank, size, job):
    """The world of a rank that srun started on this machine."""
    host = socket.gethostname()
    return World("Slurm", rank, size, rank, size, job, (host,) * size)


def test_with_strangers_on_the_ports_of_a_launch_its_ranks_meet_and_on_loopback_only():
    """Programs that accept and say nothing hold the first ports, the store of another job the next."""
    job = secrets.token_hex(8)
    ports = network.candidates(job)
    strangers = [socket.create_server(("127.0.0.1", port)) for port in ports[:3]]
    other = rendezvous.serve(network.listen(ports[3:4], "127.0.0.1"), in_a_job(0, 2, "another job"))
    with ThreadPoolExecutor(2) as pool:
        met = list(pool.map(lambda rank: rendezvous.connect(in_a_job(rank, 2, job), ClusterConfig()), range(2)))
    met[0].store.set("key", "value")
    assert met[1].store.get("key") == b"value" and [info.rank for info in met[1].ranks] == [0, 1]
    assert {each.interface for each in met} == {"lo"} and other.num_keys() <= 3
    with open("/proc/net/tcp") as file:
        rows = [line.split() for line in file.readlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and int(row[1].partition(":")[2], 16) in ports]
    assert len(listening) == 5 and all(address.startswith("0100007F:") for address in listening), listening
    for stranger in strangers:
        stranger.close()


def test_ranks_meet_where_the_name_of_rank_0_s_node_leads_nowhere_and_say_so_without_an_address():
    job, [address, *_] = secrets.token_hex(8), network.own_addresses(None)
    settings, nowhere = ClusterConfig(start_seconds=5), "nowhere.invalid"
    worlds = [World("Slurm", rank, 2, 0, 1, job, (), (nowhere, address)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        met = list(pool.map(lambda world: rendezvous.connect(world, settings), worlds))
    met[0].store.set("key", "value")
    assert met[1].store.get("key") == b"value" and met[1].ranks[1].address == address
    with pytest.raises(
        HpclmError, match=rf"rank 0 at {nowhere} within 1 s \({nowhere}: no IPv4 address is known here\)"
    ):
        rendezvous.connect(replace(worlds[1], masters=(nowhere,)), replace(settings, start_seconds=1))


def test_of_many_that_want_the_same_ports_at_once_each_gets_one_of_its_own():
    """There is no moment between the choice of a port and its being taken: to take it is to choose it."""
    doors = network.candidates("many")
    with ThreadPoolExecutor(16) as pool:
        together = Barrier(16)
        listeners = list(pool.map(lambda _: (together.wait(), network.listen(doors))[1], range(16)))
    try:
        taken = [listener.getsockname()[1] for listener in listeners]
        assert len(set(taken)) == 16 and set(taken) <= set(doors)
        with pytest.raises(HpclmError, match=r"no free port on .* are all in use"):
            network.listen(taken)
    finally:
        for listener in listeners:
            listener.close()


def test_ports_are_below_those_the_system_hands_out_and_follow_from_the_launch():
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        lowest = int(file.read().split()[0])
    assert all(1024 < port < lowest for port in network.candidates("a"))
    assert network.candidates("a") == network.candidates("a") != network.candidates("b")


@pytest.mark.mpi
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_that_its_mpi_left_alone_is_refused_before_anything_is_written(rank, tiny, tmp_path):
    """The variables are those of a launch of two, but MPI_Init finds nobody: a singleton."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print('{}')"
    found = python.ask(code, os.environ)  # not imported here: MPI's variables would be every later process's
    if "error" in found:
        pytest.skip(f"mpi4py: {found['error']}")
    numbers = {"RANK": rank, "SIZE": "2", "LOCAL_RANK": rank, "LOCAL_SIZE": "2"}
    env = os.environ | {f"OMPI_COMM_WORLD_{name}": value for name, value in numbers.items()}
    done = hpclm("train", *tiny(), env=env, check=64)
    assert f"says rank {rank} of 2, but MPI itself (" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.always
@pytest.mark.parametrize("launcher", [pytest.param("mpirun", marks=pytest.mark.mpi), "torchrun"])
def test_mpirun_and_torchrun_give_the_same_run(launcher, tiny, tmp_path):
    import sys

    env = dict(os.environ, OMP_NUM_THREADS="1", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    train = ["-m", "hpclm", "train"]
    hpclm("train", *tiny("one"), check=0)
    starts = {
        "mpirun": ["mpirun", "-n", "2", "--oversubscribe", sys.executable, *train],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *train],
    }
    command = [*starts[launcher], *tiny(launcher)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    for alone, together in zip(figures(tmp_path / "one", "loss"), figures(tmp_path / launcher, "loss"), strict=True):
        assert together == pytest.approx(alone, abs=1e-5)
