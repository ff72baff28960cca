import contextlib
import socket
import threading

import pytest

from hpclm.cluster.cause import Death, lost_a_peer, verdict
from hpclm.cluster.rollcall import Present, ranges
from hpclm.cluster.wire import LONGEST, Wire
from hpclm.errors import ConfigError

EVERYONE = [Present(rank, 4, rank % 2, 2, host=f"node{rank // 2}", pid=100 + rank) for rank in range(4)]
TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: boom'
LOST = Death(1, "RuntimeError: Connection closed by peer", caused=True)


@pytest.mark.parametrize(
    "deaths, first, code, later",
    {
        "killed": ([Death(2)], "rank 2 on node1 (pid 102) is gone without a word", 1, ""),
        "raised, though others were heard of before": (
            [LOST, Death(3, TRACE)],
            "rank 3 on node1 (pid 103) failed: Traceback",
            1,
            "then rank 1 lost the connection",
        ),
        "killed, and others lost it": ([LOST, Death(0)], "rank 0 on node0", 1, "then rank 1 lost the connection"),
        "who can say why goes before who cannot": (
            [Death(0), Death(2, TRACE)],
            "rank 2 on node1",
            1,
            "rank 0 on node0",
        ),
        "all alike": ([Death(r, "no data", 64) for r in (3, 1, 0)], "ranks 0-1, 3 failed: no data", 64, ""),
        "nobody knows": ([LOST], "rank 1 on node0 (pid 101) failed: RuntimeError", 1, ""),
    }.values(),
)
def test_the_first_cause_is_told_first(deaths, first, code, later):
    text, found = verdict(deaths, EVERYONE)
    assert text.startswith(first) and later in text and found == code
    assert text.count("no data") <= 1


def test_only_a_lost_peer_counts_as_caused():
    assert lost_a_peer(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1"))
    assert not lost_a_peer(RuntimeError("boom")) and not lost_a_peer(ConfigError("the socket is blue"))


def test_ranks_are_listed_shortly():
    assert ranges([3, 1, 5, 4]) == "1, 3-5" and ranges([0]) == "0"


@pytest.fixture
def pair():
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(end) for end in socket.socketpair()]


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b"\xff\xfe\n", b"{" * 100])
def test_who_does_not_speak_the_language_is_hung_up_on(words, pair):
    ours, theirs = pair
    theirs.sendall(words)
    theirs.shutdown(socket.SHUT_WR)
    assert Wire(ours).receive(seconds=5) is None


def test_an_endless_line_is_hung_up_on(pair):
    ours, theirs = pair
    theirs.settimeout(20)
    talker = threading.Thread(target=theirs.sendall, args=(b"x" * LONGEST,))
    talker.start()
    assert Wire(ours).receive(seconds=20) is None
    talker.join()


def test_messages_arrive_whole_and_in_order_however_they_are_cut(pair):
    ours, theirs = pair
    theirs.sendall(b'{"a": 1}\n{"b"')
    wire = Wire(ours)
    assert wire.receive(seconds=5) == {"a": 1} and wire.receive(seconds=0.1) is None
    theirs.sendall(b": 2}\n")
    assert wire.receive(seconds=5) == {"b": 2}
    Wire(theirs).send(text="é\n")
    theirs.close()
    assert wire.waiting() == [{"text": "é\n"}] and wire.waiting() == [None]
