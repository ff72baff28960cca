"""Another user of a node writes into the store of a run: nothing of it is believed."""

import json
import secrets
import time
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, HashStore, PrefixStore, TCPStore

from hpclm.distributed import failure
from hpclm.distributed.failure import Failure
from hpclm.distributed.heartbeat import ROLL_CALL, Heartbeat, LocalPeers
from hpclm.distributed.rendezvous import RankInfo
from hpclm.distributed.shutdown import LOGGED, read_key
from hpclm.distributed.signed import SignedStore
from tests.runs import Ranks, launch, lines

SECRET = secrets.token_hex(16)
FORGED = json.dumps({"rank": 0, "kind": "raised", "code": 0, "text": "done\n2026-03-01 10:15:00 I the run is done"})


def a_store(raw=None, run_id="7.0.0", secret=SECRET):
    raw = raw or HashStore()
    raw.set_timeout(timedelta(seconds=5))
    return SignedStore(raw, run_id, secret)


def test_a_value_counts_under_its_key_in_its_run_only():
    store = a_store()
    store.set("a", {"x": 1})
    sealed = store.raw.get("a")
    assert store.get("a") == {"x": 1} and store.get("missing") is None
    for raw, run_id, secret in [
        ("b", "7.0.0", SECRET),
        ("a", "7.0.1", SECRET),
        ("a", "7.0.0", ""),
        ("a", "7.0.0", "x"),
    ]:
        assert a_store(run_id=run_id, secret=secret).opened(raw, sealed) is None
    assert store.opened("a", sealed.replace(b"1}", b"2}")) is None


@pytest.mark.parametrize("data", [FORGED, "{", b"\xff\x00", "x" * 10**6, f"{'0' * 64} {FORGED}", ""])
def test_what_is_not_signed_is_ignored_logged_once_and_replaced(data, caplog):
    store = a_store()
    store.raw.set(failure.KEY, data)
    for _ in range(3):
        assert failure.read(store, 4) is None
    assert len(caplog.messages) == bool(data) and all("\n" not in text for text in caplog.messages)
    store.raw.set(failure.KEY, data)
    true = Failure(3, "raised", 64, "no data")
    assert failure.publish(store, true, 4) == true == failure.read(store, 4)
    assert failure.publish(store, Failure(1, "killed", 1), 4) == true  # the first counts


@pytest.mark.parametrize(
    "wrong",
    [
        *({"code": code} for code in (0, -1, 256, 2, True, "1", None, [])),
        *({"rank": rank} for rank in (-1, 4, 10**9, "0", 1.0, True, None)),
        *({"kind": kind} for kind in ("", "Raised", None, ["raised"])),
        *({"text": text} for text in (None, 7, ["x"])),
        {"more": 1},
    ],
    ids=str,
)
def test_a_failure_that_no_rank_publishes_is_none_even_if_it_is_signed(wrong):
    right = {"rank": 1, "kind": "raised", "code": 1, "text": "x"}
    assert failure.parse(right, 4) and failure.parse({**right, **wrong}, 4) is None


def test_a_failure_s_text_is_short_and_none_of_its_lines_looks_like_another_entry():
    found = failure.parse({"rank": 0, "kind": "raised", "code": 1, "text": "a\n2026-03-01 10:15:00 I done" * 10**5}, 1)
    assert len(found.text) < 2 * failure.LONGEST
    told = found.describe([RankInfo(0, 1, 0, 1, host="node1")]).splitlines()
    assert told[0].startswith("rank 0 on node1") and all(line.startswith("  ") for line in told[1:])


def intruder(launched):
    """The store of a launch, as another user of the node reaches it."""
    until = time.monotonic() + 60
    while True:
        try:
            server = TCPStore("127.0.0.1", launched["MASTER_PORT"], None, False, timedelta(seconds=5))
            return PrefixStore(f"{launched['TORCHELASTIC_RUN_ID']}.0", server)
        except DistNetworkError:
            assert time.monotonic() < until


def test_another_user_s_entries_neither_end_a_run_nor_blame_a_rank_nor_forge_its_log(tiny, tmp_path):
    launched = {**launch(2), "HPCLM_SECRET": SECRET}
    with Ranks(2, tiny("run", "budget.steps=100000", "cluster.preflight=false"), **launched) as ranks:
        store = intruder(launched)
        for key in ("rank/1", "ranks"):  # while they meet
            store.set(f"hpclm/{key}", FORGED)
        ranks.wait_for(tmp_path / "run", 3)
        before = len(lines(tmp_path / "run/metrics.jsonl"))
        for data in (FORGED, "not JSON", b"\xff\n"):
            for key in (
                "failure",
                "heartbeat/1",
                "heartbeat/0",
                "exited/1",
                "logged",
                "reported",
                "read/1",
                "position/1",
            ):
                store.set(f"hpclm/{key}", data)
            time.sleep(1)
        assert len(lines(tmp_path / "run/metrics.jsonl")) > before
        assert [process.poll() for process in ranks.processes.values()] == [None, None]
        store.set("hpclm/exited/1", FORGED)
        ranks.processes[1].kill()
        code, output = ranks.wait(60)[0]
    log = (tmp_path / "run/log.txt").read_text()
    assert code == 1 and "rank 1 on" in log and "was killed" in log and SECRET not in log + output
    assert log.count("wrote hpclm/failure") == 1 and "I the run is done" not in log and "Traceback" not in log, log


def heartbeats(lost, size=4):
    """Heartbeats of the ranks of two nodes, without those of ``lost``."""
    store = a_store(TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False))
    ranks = [RankInfo(rank, size, rank % 2, 2, host=f"node{1 + rank // 2}", pid=100 + rank) for rank in range(size)]
    found = {}
    for me in ranks:
        peers = LocalPeers(me, [me], watch_launcher=False)
        found[me.rank] = Heartbeat(store, me, ranks, lambda: {"phase": "step", "ticks": 1}, peers, lost_code=85)
        if me.rank not in lost:
            found[me.rank].start()
    return store, ranks, found


CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer [10.0.0.2]:1234"


@pytest.mark.parametrize("lost, notices", [([2, 3], 1), ([3], 0), ([1, 2, 3], 0)])
def test_ranks_that_do_not_answer_after_a_connection_was_closed_are_the_cause(lost, notices):
    store, ranks, beats = heartbeats(lost)
    began = time.monotonic()
    failure.publish(store, Failure(notices, "disconnected", 85, CLOSED), 4)
    for rank in {0, 1, 2, 3} - {*lost}:
        beats[rank].join(ROLL_CALL + 5)
        found = beats[rank].failure
        assert found and (found.rank, found.kind, found.code) == (lost[0], "lost", 85)
        assert failure.named(lost, ranks) in found.describe(ranks)
    assert ROLL_CALL <= time.monotonic() - began < ROLL_CALL + 5


def test_a_cause_replaces_a_symptom_and_a_symptom_never_a_cause():
    store, _, beats = heartbeats([])
    symptom, cause = Failure(1, "disconnected", 85, CLOSED), Failure(2, "raised", 64, "no data")
    assert failure.publish(store, symptom, 4) == symptom
    assert failure.publish(store, cause, 4) == cause and failure.publish(store, symptom, 4) == cause
    for beat in beats.values():
        beat.join(5)
        assert beat.failure == cause
    assert store.get_all([read_key(rank) for rank in range(4)]) == [True] * 4 and store.get(LOGGED) is None


@pytest.mark.parametrize("text, code", [(CLOSED, 85), ("DistBackendError: NCCL error, invalid usage", 1)])
def test_without_a_lost_rank_a_closed_connection_may_be_the_network_and_other_errors_are_the_rank_s_own(text, code):
    store, ranks, beats = heartbeats([])
    failure.publish(store, Failure(1, "disconnected", 85, text), 4)
    for beat in beats.values():
        beat.join(ROLL_CALL + 5)
        assert (beat.failure.rank, beat.failure.kind, beat.failure.code) == (1, "raised", code)
        assert text in beat.failure.text and ("network may be at fault" in beat.failure.text) == (code == 85)
