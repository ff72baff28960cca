"""What a start costs a rank does not grow with the number of ranks: counted, not timed."""

import secrets
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from hpclm.base.errors import ConfigError
from hpclm.config import ClusterConfig
from hpclm.distributed import rendezvous
from hpclm.distributed.bootstrap import World
from hpclm.distributed.ranks import RankInfo
from tests.runs import PATIENCE

OPERATIONS = ("set", "get", "add", "check", "wait", "compare_set", "multi_get", "multi_set")


def counted(store):
    """A store class, each of whose stores counts what is asked of it."""

    def method(name):
        def call(self, *args):
            self.counts[name] += 1
            return getattr(store, name)(self, *args)

        return call

    def connect(self, *args, **kwargs):
        self.counts = Counter()
        serves = args[3]
        assert serves or serving.wait(PATIENCE)  # or a client would hold the lock that the server waits for
        with one_at_a_time:  # PyTorch mixes up the addresses of two clients of a process that connect at once
            store.__init__(self, *args, **kwargs)
        if serves:
            serving.set()

    one_at_a_time, serving = threading.Lock(), threading.Event()
    return type("Counted", (store,), {"__init__": connect} | {name: method(name) for name in OPERATIONS})


@pytest.mark.parametrize("size", [4, 16])
def test_at_the_rendezvous_a_rank_asks_as_often_however_many_they_are(size, monkeypatch):
    monkeypatch.setattr(dist, "TCPStore", counted(dist.TCPStore))
    job, host = secrets.token_hex(8), socket.gethostname()
    worlds = [World("Slurm", rank, size, rank, size, job, (host,) * size) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        met = list(pool.map(lambda world: rendezvous.connect(world, ClusterConfig()), worlds))
    assert [info.rank for info in met[-1].ranks] == list(range(size)) and len({each.ranks for each in met}) == 1
    for each in met:
        assert sum(each.store.counts.values()) == 7


def test_ranks_with_unequal_versions_are_refused():
    store = dist.HashStore()

    def come(rank, version):
        return rendezvous.introduce(store, RankInfo(rank, 2, version=version), PATIENCE)

    with ThreadPoolExecutor(2) as pool:
        coming = [pool.submit(come, rank, version) for rank, version in enumerate(("1.0", "1.1"))]
    for each in coming:
        with pytest.raises(
            ConfigError, match=r"rank 0 on .* runs hpclm 1[.]0, rank 1 on .* 1[.]1; use one installation"
        ):
            each.result()
