"""Which rank is lost when others only see a closed connection: those that do not answer the roll call."""

import os
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from hpclm.distributed import failure
from hpclm.distributed.failure import Failure
from hpclm.distributed.hang import RankState
from hpclm.distributed.heartbeat import ROLL_CALL, Heartbeat
from hpclm.distributed.rendezvous import RankInfo, rank_key
from hpclm.distributed.store import JsonStore
from hpclm.errors import ConfigError
from tests.distributed.test_watchdog import descendants, training
from tests.events import began
from tests.forks import Hpclm
from tests.runs import PATIENCE, has_step, until


class Beating(threading.Thread):
    """The exchange of a rank, again and again until it knows a failure."""

    def __init__(self, *args):
        super().__init__(daemon=True)
        self.heartbeat = Heartbeat(*args)

    def run(self):
        while self.heartbeat.failure is None:
            self.heartbeat.exchange()
            time.sleep(0.1)

    def end(self):
        """The failure that the rank learns of."""
        self.join(PATIENCE)
        return self.heartbeat.failure


def heartbeats(lost):
    """Heartbeats of the ranks of two nodes, without those of ``lost``."""
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=PATIENCE), wait_for_workers=False)
    store = JsonStore(server)
    ranks = [RankInfo(rank, 4, rank % 2, 2, f"node{1 + rank // 2}", 100 + rank, machine=str(rank)) for rank in range(4)]
    beats = {me.rank: Beating(store, me, ranks, RankState, 85) for me in ranks}
    for rank in beats.keys() - {*lost}:
        beats[rank].start()
    return store, ranks, beats


CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer [10.0.0.2]:1234"


@pytest.mark.parametrize("lost, notices", [([2, 3], 1), ([3], 0), ([1, 2, 3], 0)])
def test_ranks_that_do_not_answer_after_a_connection_was_closed_are_the_cause(lost, notices):
    store, ranks, beats = heartbeats(lost)
    began = time.monotonic()
    failure.publish(store, Failure(notices, "disconnected", 85, CLOSED))
    for rank in {0, 1, 2, 3} - {*lost}:
        found = beats[rank].end()
        assert found and (found.rank, found.kind, found.code) == (lost[0], "lost", 85)
        assert failure.named(lost, ranks) in found.describe(ranks)
    assert time.monotonic() - began >= ROLL_CALL


def test_a_cause_replaces_a_symptom_and_a_symptom_never_a_cause():
    store, _, beats = heartbeats([])
    symptom, cause = Failure(1, "disconnected", 85, CLOSED), Failure(2, "raised", 64, "no data")
    assert failure.publish(store, symptom) == symptom
    assert failure.publish(store, cause) == cause and failure.publish(store, symptom) == cause
    for beat in beats.values():
        assert beat.end() == cause
    assert store.get_all([rank_key("read", rank) for rank in range(4)]) == [True] * 4


@pytest.mark.parametrize("text, code", [(CLOSED, 85), ("DistBackendError: NCCL error, invalid usage", 1)])
def test_without_a_lost_rank_a_closed_connection_may_be_the_network_and_other_errors_are_the_rank_s_own(text, code):
    store, _, beats = heartbeats([])
    failure.publish(store, Failure(1, "disconnected", 85, text))
    for beat in beats.values():
        cause = beat.end()
        assert (cause.rank, cause.kind, cause.code) == (1, "raised", code)
        assert text in cause.text and ("network may be at fault" in cause.text) == (code == 85)


@pytest.mark.parametrize(
    "cause, text",
    [
        (Failure(2, "killed", 1), "rank 2 on node1 (pid 102) was killed"),
        (Failure(3, "raised", 1, "ValueError: boom"), "rank 3 on node1 (pid 103) failed: ValueError: boom"),
        (Failure(1, "lost", 85, "rank 1 on node0 was lost"), "rank 1 on node0 was lost; the other ranks end too"),
        (Failure(0, "launcher", 1), "the launcher of rank 0 on node0 (pid 100) is gone"),
    ],
)
def test_a_failure_names_rank_host_and_process(cause, text):
    ranks = [RankInfo(rank, 4, rank % 2, 2, host=f"node{rank // 2}", pid=100 + rank) for rank in range(4)]
    assert cause.describe(ranks).startswith(text)


def test_only_a_lost_peer_counts_as_lost():
    assert failure.lost_a_peer(RuntimeError(CLOSED))
    assert not failure.lost_a_peer(RuntimeError("boom")) and not failure.lost_a_peer(ConfigError("the socket is blue"))


@pytest.mark.parametrize("launcher", ["local", pytest.param("mpirun", marks=[pytest.mark.mpi, pytest.mark.whole])])
def test_a_launcher_of_which_two_ranks_are_killed_at_once_names_one_of_them_and_leaves_nothing(
    launcher, tiny, tmp_path
):
    words = tiny("run", "budget.steps=100000", "batch.global_size=6", "batch.micro_size=1", "cluster.preflight=false")
    env = os.environ | {"OMP_NUM_THREADS": "1", "HPCLM_SITE": ""}
    with Hpclm("submit", *words, f"job.cluster={launcher}", "job.gpus=3", env=env, merged=True) as process:
        until(lambda: has_step(tmp_path / "run", 3), "step 3", process)
        ranks = [pid for pid in descendants(process.pid) if training(pid)]
        [first] = [attempt["pid"] for attempt in began(tmp_path / "run")]
        assert len(ranks) == 3
        for pid in [pid for pid in ranks if pid != first][:2]:
            os.kill(pid, signal.SIGKILL)
        said, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGKILL and "was killed" in said, said
    assert not any(map(alive, ranks))


def alive(pid):
    with suppress(OSError):
        return training(pid)
    return False
