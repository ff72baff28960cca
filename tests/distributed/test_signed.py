"""Another user of a node writes into the store of a run: nothing of it is believed."""

import json
import secrets
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from hpclm.distributed import failure
from hpclm.distributed.failure import Failure
from hpclm.distributed.rendezvous import RankInfo
from hpclm.distributed.signed import SignedStore
from tests.forks import Ranks
from tests.runs import PATIENCE, has_step, launch, lines, until

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
    assert len(found.text) < 2 * failure.MAX_TEXT_CHARACTERS
    told = found.describe([RankInfo(0, 1, 0, 1, host="node1")]).splitlines()
    assert told[0].startswith("rank 0 on node1") and all(line.startswith("  ") for line in told[1:])


def intruder(launched):
    """The store of a launch, as another user of the node reaches it."""
    server = TCPStore("127.0.0.1", launched["MASTER_PORT"], None, False, timedelta(seconds=PATIENCE))
    return PrefixStore(f"{launched['TORCHELASTIC_RUN_ID']}.0", server)


def test_another_user_s_entries_neither_hold_up_a_start_nor_end_a_run_nor_blame_a_rank_nor_forge_its_log(
    tiny, tmp_path
):
    launched, words = (
        {**launch(2), "HPCLM_SECRET": SECRET},
        tiny("run", "budget.steps=100000", "cluster.preflight=false"),
    )
    with Ranks(2, words, only=[0], **launched) as first:
        store = intruder(launched)

        def overwrite(*keys, data=FORGED):
            for key in keys:
                store.set(f"hpclm/{key}", data)
            time.sleep(0.2)

        meeting = ("rank/0", "rank/1", "ranks", "arrived", "met/1", "failure", "heartbeat/1")
        for _ in range(5):
            overwrite(*meeting)
        with Ranks(2, words, only=[1], **launched) as second:
            until(lambda: overwrite(*meeting) or has_step(tmp_path / "run", 3), "step 3")
            for data in (FORGED, "not JSON", b"\xff\n"):
                own = ("failure", "heartbeat/1", "heartbeat/0", "exited/1", "logged", "reported", "read/1")
                for _ in range(5):
                    overwrite(*own, data=data)
            before = len(lines(tmp_path / "run/metrics.jsonl"))
            until(lambda: len(lines(tmp_path / "run/metrics.jsonl")) > before + 1, "another step")
            assert first.processes[0].poll() is None and second.processes[1].poll() is None
            store.set("hpclm/exited/1", FORGED)
            second.processes[1].kill()
            (code, output), (_, other) = first.wait()[0], second.wait()[1]
    log = (tmp_path / "run/log.txt").read_text()
    assert code == 1 and "rank 1 on" in log and "was killed" in log and SECRET not in log + output
    warned = [said.count("wrote hpclm/failure") for said in (output, other)]  # by the rank that saw it first
    assert sum(warned) and max(warned) == 1 and "I the run is done" not in log and "Traceback" not in log, log
