import pytest

from hpclm.distributed import failure
from hpclm.distributed.failure import Failure, lost_a_peer
from hpclm.distributed.rendezvous import RankInfo
from hpclm.errors import ConfigError
from hpclm.terminal import ranges

RANKS = [RankInfo(rank, 4, rank % 2, 2, host=f"node{rank // 2}", pid=100 + rank) for rank in range(4)]


@pytest.mark.parametrize(
    "found, words",
    [
        (Failure(2, "killed", 1), "rank 2 on node1 (pid 102) was killed"),
        (Failure(3, "raised", 1, "ValueError: boom"), "rank 3 on node1 (pid 103) failed: ValueError: boom"),
        (Failure(1, "lost", 85, "rank 1 on node0 was lost"), "rank 1 on node0 was lost; the others end because of it"),
        (Failure(0, "launcher", 1), "the launcher of rank 0 on node0 (pid 100) is gone"),
    ],
)
def test_a_failure_names_rank_host_and_process(found, words):
    assert found.describe(RANKS).startswith(words)


def test_a_long_text_keeps_its_beginning_and_its_end():
    text = failure.shortened("a" * 10**6 + "b")
    assert len(text) < 2 * failure.LONGEST and text[0] == "a" and text[-1] == "b"


def test_only_a_lost_peer_counts_as_lost():
    assert lost_a_peer(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1"))
    assert not lost_a_peer(RuntimeError("boom")) and not lost_a_peer(ConfigError("the socket is blue"))


def test_ranks_are_listed_shortly():
    assert ranges([3, 1, 5, 4]) == "1, 3-5" and ranges([0]) == "0"
