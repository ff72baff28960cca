"""Another user of a node writes into the store of a run: nothing of it is believed."""

import json
import resource
import secrets
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from hpclm.distributed import failure
from hpclm.distributed.failure import Failure
from hpclm.distributed.rendezvous import RankInfo
from hpclm.distributed.signed import SignedStore
from hpclm.distributed.store_limits import StoreLimits
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
    assert len(found.text) < 2 * failure.LONGEST
    told = found.describe([RankInfo(0, 1, 0, 1, host="node1")]).splitlines()
    assert told[0].startswith("rank 0 on node1") and all(line.startswith("  ") for line in told[1:])


def intruder(launched):
    """The store of a launch, as another user of the node reaches it."""
    server = TCPStore("127.0.0.1", launched["MASTER_PORT"], None, False, timedelta(seconds=PATIENCE))
    return PrefixStore(f"{launched['TORCHELASTIC_RUN_ID']}.0", server)


def limits_of(store, ranks):
    limits = StoreLimits(store, ranks)
    limits.interval = 0.0
    return limits


@pytest.mark.parametrize("torchrun", [False, True])
def test_what_others_write_is_bounded_and_what_ranks_and_libraries_write_stays(torchrun, caplog):
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=PATIENCE), wait_for_workers=False)
    store = SignedStore(PrefixStore("7.0.0", server) if torchrun else server, "7.0.0", SECRET)
    for rank in range(2):
        store.set(f"hpclm/heartbeat/{rank}", {"step": 3})
    store.raw.set("default_pg/0/rank/1", "x" * 60_000)  # gloo's
    server.set("torchelastic/role", "x" * 1000)
    right, limits = sorted(server.list_keys()), limits_of(store, 2)
    limits.enforce()
    assert sorted(server.list_keys()) == right and not caplog.messages

    for number in range(300):
        store.raw.set(f"hpclm/heartbeat/{number + 2}", "x" * 1000)  # as a rank's
        server.set(f"junk/{number}", "x" * 60_000)  # each is small enough
    store.raw.set("hpclm/\n2026-03-01 10:15:00 I done", FORGED)
    server.set("large", "x" * 10**6)
    server.num_keys()  # returns once all is written
    limits.enforce()
    keys = server.list_keys()
    assert (
        {*right} <= {*keys}
        and "large" not in keys
        and not [key for key in keys if "hpclm/" in key and key not in right]
    )
    assert sum(len(server.get(key)) for key in keys) < limits.together + 10_000 < 5_000_000
    assert len(caplog.messages) == 1 and "\n" not in caplog.text.strip()
    limits.enforce()
    assert sorted(server.list_keys()) == sorted(keys) and store.get("hpclm/heartbeat/1") == {"step": 3}


def memory(pid):
    """Megabytes that a process holds in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() >> 20


def test_another_user_s_entries_do_not_fill_rank_0_s_memory(tiny, tmp_path):
    launched = {**launch(2), "HPCLM_SECRET": SECRET}
    with Ranks(2, tiny("run", "budget.steps=100000", "cluster.preflight=false"), **launched) as ranks:
        store = intruder(launched)
        ranks.wait_for(tmp_path / "run", 3)
        server, pid = store.underlying_store, ranks.processes[0].pid
        used = []
        for _ in range(2):  # 300 MB each, half of them under a rank's names
            for number in range(300):
                (server if number % 2 else store).set(f"hpclm/heartbeat/{number}", "x" * (1 << 20))
            until(lambda: len(server.list_keys()) < 100)
            used.append(memory(pid))
        seen = len(lines(tmp_path / "run/metrics.jsonl"))
        until(lambda: len(lines(tmp_path / "run/metrics.jsonl")) > seen, "another step")
        assert used[-1] < used[0] + 200, used  # what is freed is used again
        assert [process.poll() for process in ranks.processes.values()] == [None, None]
    assert (tmp_path / "run/log.txt").read_text().count("another process wrote") <= 3


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
